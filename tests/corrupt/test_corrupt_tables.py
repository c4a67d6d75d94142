"""Break what the emitted text does about tables in one place, in either direction: the verifier must name the fault."""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

import pytest

from attngen.emit.backward import emit_backward
from attngen.emit.module import emit
from attngen.search import plan
from attngen.search_backward import plan_backward
from attngen.syntax import load_spec
from attngen.verify import backward_source, source

SPEC = load_spec("""attn 1
attention packed {
  head_dim = 64
  tensor doc: i32[batch, seqlen_kv] sorted
  mask = doc[b, q_pos] == doc[b, kv_idx]
}
""")
DIRECTIONS = ("forward", "backward")


@cache
def emitted(direction: str) -> tuple[str, Any]:
    plans: Any = plan(SPEC) if direction == "forward" else plan_backward(SPEC)
    return (emit(plans) if direction == "forward" else emit_backward(plans)).text, plans


def faults(direction: str, text: str) -> list[str]:
    check = source.source_faults if direction == "forward" else backward_source.source_faults
    return list(check(text, emitted(direction)[1]))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_fault(direction: str) -> None:
    assert faults(direction, emitted(direction)[0]) == []


#: Name -> (what stands in the text, what takes its place, the fault).
BROKEN = {
    "another table": ('{"name": "doc_end", ', '{"name": "doc_ends", ', "ATTN_META lists other tables"),
    "other axes": (
        '"doc_end", "dims": ["batch", "seqlen_q"]', '"doc_end", "dims": ["batch"]', "ATTN_META lists other tables",
    ),
    "filled into another": ("p.doc_end[b, q_idx] = low", "p.doc_first[b, q_idx] = low", "does not store p.doc_end"),
    "a table that nothing fills": ("    def fill_doc_end(", "    def find_doc_end(", "for 2 tables"),
    "no early launch": (
        "        cute.arch.griddepcontrol_launch_dependents()  # which wait", "        pass  # which wait",
        "does not let the next grid begin",
    ),
    "filled unasked": ("if build_tables != 0:", "if build_tables == build_tables:", "if it is asked for"),
}  # fmt: skip


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", BROKEN)
def test_broken(name: str, direction: str) -> None:
    old, new, fault = BROKEN[name]
    text, _ = emitted(direction)
    assert text.count(old) == 1
    assert any(fault in f for f in faults(direction, text.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("        cute.arch.griddepcontrol_wait()  # the tables\n", "", "reads tables before it waits"),
        ("            use_pdl=True,\n", "", "is not launched to wait for the grid before"),
    ],
)
def test_a_forward_that_does_not_wait(old: str, new: str, fault: str) -> None:
    text, _ = emitted("forward")
    assert text.count(old) == 1 and any(fault in f for f in faults("forward", text.replace(old, new)))


def test_filled_after_they_are_read() -> None:
    text, _ = emitted("backward")
    launch = text.index("        # ---- mask: tables, int32 arrays")
    first, last = text.index("        prepare(\n", launch), text.index("        kernel(\n", launch)
    moved = text[:launch] + text[first:last] + text[launch:first] + text[last:]
    assert any("`fill` comes first" in f for f in faults("backward", moved))


UNSORTED = load_spec("""attn 1
attention late {
  head_dim = 64
  tensor doc: i32[batch, seqlen_kv] sorted
  tensor own: i32[batch, seqlen_q]
  mask = own[b, q_idx] == doc[b, kv_idx]
}
""")


def test_extremes_come_after_what_they_are_of() -> None:
    """Two kernels, the second about tables of the first: in this order, and only the second lets the main one begin."""
    plans = plan(UNSORTED)
    text = emit(plans).text
    assert [t["name"] for t in source.meta_of(ast.parse(text))["tables"]] == [
        "doc_first", "doc_end", "doc_first_least", "doc_first_greatest", "doc_end_least", "doc_end_greatest"
    ]  # fmt: skip
    first, second = text.index("            fill(\n"), text.index("            extremes(\n")
    end = text.index("        # ---- schedule", second)
    swapped = text[:first] + text[second:end] + text[first:second] + text[end:]
    early = text.replace(
        '"""Tables of positions: one thread for an element of each."""\n',
        '"""Tables of positions."""\n        cute.arch.griddepcontrol_launch_dependents()\n',
    )
    assert source.source_faults(text, plans) == []
    assert any("`fill`, `extremes` comes first" in f for f in source.source_faults(swapped, plans))
    assert any("or too early" in f for f in source.source_faults(early, plans))
