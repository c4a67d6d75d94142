"""Commands on a spec of several kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEXT = """attn 1
attention cache {
  head_dim = 64
  param window: int >= 1 = 20
  mask = kv_idx <= q_pos
  segment past {
    mask = q_pos - kv_idx < window
  }
}
"""


def written(folder: Path) -> Path:
    path = folder / "cache.attn"
    path.write_text(TEXT)
    return path


def test_compile_writes_a_file_for_each_part(attngen: Any, tmp_path: Path) -> None:
    spec, out = written(tmp_path), tmp_path / "cache.py"
    done = attngen("compile", spec, "-o", out, "--only", "forward")
    assert done.code == 0 and sorted(p.name for p in tmp_path.glob("*.py")) == ["cache.main.py", "cache.past.py"]
    assert "put them together: O = exp(LSE_main - LSE) O_main + exp(LSE_past - LSE) O_past" in done.err
    found = json.loads(attngen("compile", spec, "-o", out, "--only", "forward", "--json").out)
    assert [p["meta"]["name"] for p in found["parts"]] == ["cache_main", "cache_past"]
    assert "LSE_past" in found["formula"]
    one = attngen("compile", spec, "--part", "past", "--only", "forward")
    assert one.code == 0 and one.out == (tmp_path / "cache.past.py").read_text()
    for refused in (attngen("compile", spec), attngen("explain", spec, "--svg", "-")):
        assert refused.code == 1 and "E0404" in refused.err and "--part main" in refused.err
    assert "E0405" in attngen("compile", spec, "--part", "future").err


def test_explain_and_check(attngen: Any, tmp_path: Path) -> None:
    spec = written(tmp_path)
    text = attngen("explain", spec, "--seqlen", "1024", "--param", "window=9").out
    assert text.startswith("cache: 2 kernels, put together in torch: main, past")
    assert text.index("cache_main for sm_90a") < text.index("cache_past for sm_90a") and text.count("rooflines, ") == 2
    found = json.loads(attngen("explain", spec, "--seqlen", "1024", "--json").out)
    assert list(found["parts"]) == ["main", "past"] and found["parts"]["past"]["name"] == "cache_past"
    alone = json.loads(attngen("explain", spec, "--seqlen", "1024", "--json", "--part", "past").out)
    assert alone == found["parts"]["past"]
    done = attngen("check", "--plan", spec)
    assert done.code == 0 and done.err.strip().endswith("ok")


def test_run(attngen: Any, tmp_path: Path) -> None:
    done = attngen("run", written(tmp_path), "--seqlen", "50x70", "--cpu")
    lines = [line.split() for line in done.out.splitlines()[1:]]
    assert done.code == 0 and {line[-1] for line in lines} == {"ok"} and len(lines) >= 2
