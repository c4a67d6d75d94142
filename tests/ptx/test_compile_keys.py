"""Which kernels the tests take for one: those of whose text the compiler reads the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ptxcheck.compile import seen_by_compiler

from attngen.emit.module import emit
from attngen.search import plan
from attngen.syntax import load_spec

GALLERY = sorted((Path(__file__).resolve().parents[2] / "generated").glob("*.py"))
CAUSAL = "mask = kv_idx <= q_pos"


def text(name: str = "a", head_dim: int = 128, clauses: str = CAUSAL, doc: str = "Words.") -> str:
    return emit(
        plan(load_spec(f'attn 1\n"{doc}"\nattention {name} {{\n  head_dim = {head_dim}\n  {clauses}\n}}\n'))
    ).text


def test_names_and_words_are_nothing_to_it() -> None:
    first, second = text(), text("longer_name", doc="Other words.")
    assert first != second and all(seen_by_compiler(first, i) == seen_by_compiler(second, i) for i in range(2))


def test_the_other_plans_of_a_file_are_nothing_to_it() -> None:
    both, alone = text(), text(clauses=f"{CAUSAL}\n  schedule {{ tile = 192 x 80 }}")
    assert seen_by_compiler(both, 1) == seen_by_compiler(alone, 0) != seen_by_compiler(both, 0)


def test_all_else_counts() -> None:
    texts = [
        text(),
        text(head_dim=64),
        text(clauses="mask = kv_idx < q_pos"),
        text(clauses=f"dtype = fp16\n  {CAUSAL}"),
    ]
    assert len({seen_by_compiler(t, 0) for t in texts}) == len(texts)


@pytest.mark.parametrize("file", GALLERY, ids=lambda f: f.name)
def test_what_is_left_out_is_not_read(file: Path) -> None:
    """Of the facts for tools only the kernel's name, of the plans the one that is compiled, of the limits nothing."""
    whole = file.read_text(encoding="utf-8")
    seen = seen_by_compiler(whole, 0)
    assert len(seen) < len(whole) and "def compile_" in seen
    code = re.sub(r'""".*?"""|#[^\n]*', "", seen, flags=re.DOTALL)
    assert set(re.findall(r"ATTN_META(?:\[[^]]*\])*", code)) == {'ATTN_META["kernel_id"]'}
    assert set(re.findall(r"\bPLANS\b[^,)\n]*", code)) == {"PLANS[index]"}
    assert not re.search(r"\bLIMITS\b", code)
