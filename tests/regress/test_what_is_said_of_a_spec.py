"""What commands said and was not so: `ok` where nothing was kept, `exact` of a mask without its given blocks, a single
branch where two had one name.
"""

from __future__ import annotations

import pytest

import attngen
from attngen import samples
from attngen.cli import run
from attngen.cli.numeric import verify_spec
from attngen.diag.diagnostic import AttnError
from attngen.syntax import load_spec

HEAD = "attn 1\nattention a {\n  head_dim = 64\n  "


@pytest.mark.parametrize("layout", ["bshd", "varlen"])
def test_nothing_kept(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    for mask, empty in (("kv_idx < 0", True), ("kv_idx <= q_pos", False)):
        spec = load_spec(f"{HEAD}layout = {layout}\n  mask = {mask}\n}}\n")
        outcomes = verify_spec(spec, samples.Shape(2, 2, 1, 20, 30), {}, target="sm_90a", with_gpu=False)
        assert len(outcomes) >= 2 and all(o.empty is empty and not o.failed for o in outcomes)
        run._print(outcomes, as_json=False)
        assert ("no row keeps a key" in capsys.readouterr().err) is empty


def test_exact_inside_blocks() -> None:
    blocks = "block_sparse { q = 128, kv = 128, lists = given }\n}\n"
    assert "exact inside the listed blocks" in attngen.explain(load_spec(f"{HEAD}mask = kv_idx <= q_pos\n  {blocks}"))
    assert "mask form: full inside the listed blocks;" in attngen.explain(load_spec(f"{HEAD}{blocks}"))
    plain = attngen.explain(load_spec(f"{HEAD}mask = kv_idx <= q_pos\n}}\n"))
    assert "for each row, exact\n" in plain and "listed blocks" not in plain


@pytest.mark.parametrize("word", ["branch", "segment"])
def test_two_of_one_name(word: str) -> None:
    weight = "{\n    weight = 1.0\n  }" if word == "branch" else "{\n    mask = kv_idx < 3\n  }"
    with pytest.raises(AttnError) as fault:
        load_spec(f"{HEAD}{word} one {weight}\n  {word} one {weight}\n}}\n")
    assert [d.code for d in fault.value.diagnostics] == ["E0203"]
    if word == "branch":
        with pytest.raises(AttnError, match="a single branch"):
            load_spec(f"{HEAD}{word} one {weight}\n}}\n")
