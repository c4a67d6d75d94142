"""Every fault of the language as its reader sees it, pinned in diagnostics.txt.

`python tests/unit/test_syntax_diagnostics.py` writes the file again after a wanted change.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from diagnostic_cases import CASES, clause

from attngen.diag.codes import CODES
from attngen.diag.diagnostic import AttnError, Severity
from attngen.diag.render import render
from attngen.syntax import check_text, load_spec, make_spec

GOLDEN = Path(__file__).parent / "diagnostics.txt"
#: Codes that need files, bounds or the Python API; pinned in test_syntax_load.py and test_syntax_hostile.py.
ELSEWHERE = {"E0108", "E0110", "E0112", "E0220", "E0222", "E0223"}
RULE = "=" * 100


def rendered(text: str) -> str:
    return "\n\n".join(render(d) for d in check_text(text))


def section(code: str, text: str) -> str:
    return f"{RULE}\n{code}\n\n{rendered(text)}\n"


def test_rendered_text_is_pinned() -> None:
    assert "".join(section(*case) for case in CASES) == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("code, text", CASES, ids=[f"{c}-{i}" for i, (c, _) in enumerate(CASES)])
def test_one_fault_of_its_code(code: str, text: str) -> None:
    found = check_text(text)
    assert {d.code for d in found} == {code}
    # A fault that has two ends (a def used wrongly by two clauses, say) is still one fault.
    assert len(found) == 1
    if code.startswith("W"):
        assert found[0].severity is Severity.WARNING
        assert load_spec(text).name == "a"
    else:
        with pytest.raises(AttnError) as caught:
            load_spec(text)
        assert caught.value.code == code


@pytest.mark.parametrize("code, text", CASES, ids=[f"{c}-{i}" for i, (c, _) in enumerate(CASES)])
def test_says_where_and_how_to_mend(code: str, text: str) -> None:
    (d,) = check_text(text)
    assert d.primary is not None
    # A token that is merely unexpected explains itself by what was expected; all else names its mend.
    assert d.helps or code in ("E0101", "E0107")
    assert d.message[0].islower() or d.message[0] == "`" or d.message.startswith("V ")
    assert not d.message.endswith(".")


def test_every_code_of_the_language_is_shown() -> None:
    language = {c for c in CODES if c[:3] in ("E01", "E02", "E03") or c.startswith("W02")}
    assert {code for code, _ in CASES} | ELSEWHERE == language


def test_faults_are_collected_sorted_and_told_once() -> None:
    text = clause("mask = near and qpos < 3 and near\n  score = zz + s\n  sink = kv_idx", "def near = unknwn < 3\n")
    found = check_text(text)
    assert [d.code for d in found] == ["E0201", "E0201", "E0201", "E0304"]
    starts = [d.primary.span.start for d in found if d.primary]
    assert starts == sorted(starts) and len(set(starts)) == 4
    with pytest.raises(AttnError) as caught:
        load_spec(text)
    assert list(caught.value.diagnostics) == found


def test_faults_of_a_base_are_told_once() -> None:
    text = "attn 1\nattention a {\n  head_dim = 64\n  mask = qpos\n}\nattention c extends a { score = s }\n"
    assert [d.code for d in check_text(text)] == ["E0201"]


def test_broken_declaration_is_no_second_fault_where_it_is_used() -> None:
    assert [d.code for d in check_text(clause("param w: f33 = 3\n  mask = q_pos - kv_idx < w"))] == ["E0217"]


def test_at_most_twenty_faults() -> None:
    assert len(check_text(clause("mask = " + " and ".join(f"u{i} < 3" for i in range(40))))) == 20


def test_make_spec_rejects_what_no_spec_can_hold() -> None:
    for bad in (
        {"name": "a b"},
        {"name": "a", "dtype": "bf16\nmask = true"},
        {"name": "a", "scale": float("nan")},
        {"name": "a", "params": {"w": {"kind": "int"}}},
        {"name": "a", "params": {"w": {"default": float("inf")}}},
        {"name": "a", "tensors": {"t": {"dtype": "f32"}}},
        {"name": "a", "doc": "bell \x07"},
        {"name": "a", "mask": 3 + 4j},
    ):
        with pytest.raises(AttnError) as caught:
            make_spec(**{"head_dim": 64, **bad})
        assert caught.value.code == "E0112", bad


if __name__ == "__main__":
    GOLDEN.write_text("".join(section(*case) for case in CASES), encoding="utf-8")
