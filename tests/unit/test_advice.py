"""Masks that defeat the analysis: which term did, and what to write instead, each kind with a mask that people write.

The mend of each is followed, and then the mask is intervals alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from attngen.diag.diagnostic import Severity
from attngen.diag.render import render, render_github, render_short
from attngen.ir.spec import AttentionSpec
from attngen.passes.advice import element_wise
from attngen.passes.mask_form import mask_form
from attngen.passes.serves import why_not
from attngen.search import plan
from attngen.syntax import load_spec


@dataclass(frozen=True)
class Kind:
    """A mask with its declarations; the term at fault, a part of why and of the mend; the mended clauses, if any."""

    declared: str
    mask: str
    term: str
    why: str
    mend: str
    mended: str | None = None


DOC = "tensor doc: i32[batch, seqlen_kv]"
KINDS = {
    "a share of the keys, in floats": Kind(
        "param share: float = 0.5", "float(kv_idx) < share * float(seqlen_kv)",
        "float(kv_idx) < share * float(seqlen_kv)", "it compares floats", "`//` in the place of `/`",
        "mask = kv_idx < seqlen_kv // 2",
    ),
    "a soft distance": Kind(
        "", "tanh(float(q_pos - kv_idx)) < 0.5", "tanh(float(q_pos - kv_idx)) < 0.5", "it compares floats",
        "what a rising function is applied to", "mask = q_pos - kv_idx < 1",
    ),
    "documents without a promise": Kind(
        DOC, "kv_idx <= q_pos and doc[b, q_pos] == doc[b, kv_idx]", "doc[b, q_pos] == doc[b, kv_idx]",
        "values of tensor `doc`", "declare `doc` sorted if it never decreases",
        f"{DOC} sorted\n  mask = kv_idx <= q_pos and doc[b, q_pos] == doc[b, kv_idx]",
    ),
    "marked keys": Kind(
        "tensor present: bool[batch, seqlen_kv]", "kv_idx <= q_pos and present[b, kv_idx]", "present[b, kv_idx]",
        "values of tensor `present`", "e.g. `kv_idx < length[b]`; otherwise `block_sparse { q = 128, kv = 128 }`",
        "tensor length: i32[batch]\n  mask = kv_idx <= q_pos and kv_idx < length[b]",
    ),
    "weighted keys": Kind(
        "tensor weight: f32[batch, seqlen_kv]", "weight[b, kv_idx] > 0.5", "weight[b, kv_idx] > 0.5",
        "values of tensor `weight`", "block_sparse",
    ),
    "a dense mask": Kind(
        "tensor keep: bool[batch, seqlen_q, seqlen_kv]", "keep[b, q_idx, kv_idx]", "keep[b, q_idx, kv_idx]",
        "values of tensor `keep`", "its first and last key instead, e.g. `kv_idx >= start[b, q_idx]`",
        "tensor start: i32[batch, seqlen_q]\n  mask = kv_idx >= start[b, q_idx]",
    ),
    "a stride": Kind(
        "", "kv_idx <= q_pos and (q_pos - kv_idx) % 4 == 0", "(q_pos - kv_idx) % 4 == 0",
        "a remainder of the key repeats", "use `//` where whole blocks are meant", "mask = kv_idx // 4 == q_pos // 4",
    ),
    "a product of positions": Kind(
        "param n: int = 100", "q_pos * kv_idx <= n", "q_pos * kv_idx <= n",
        "the factor `q_pos` may be zero or negative", "write `max(q_pos, 1)`", "mask = max(q_pos, 1) * kv_idx <= n",
    ),
    "a square": Kind(
        "", "kv_idx * kv_idx <= q_pos", "kv_idx * kv_idx <= q_pos", "not linear in the key", "bounds on `kv_idx`"
    ),
    "blocks of any size": Kind(
        "param block: int = 4", "kv_idx // block <= q_pos // block", "kv_idx // block <= q_pos // block",
        "the divisor `block` may be zero or negative", "declare `param block: int >= 1`",
        "param block: int >= 1 = 4\n  mask = kv_idx // block <= q_pos // block",
    ),
    "blocks of a size in a tensor": Kind(
        "tensor size: i32[batch]", "kv_idx // size[b] <= q_pos // size[b]", "kv_idx // size[b] <= q_pos // size[b]",
        "the divisor `size[b]` may be zero or negative", "write `max(size[b], 1)`",
        "mask = kv_idx // max(size[b], 1) <= q_pos // max(size[b], 1)",
    ),
    "the key in two terms": Kind(
        "", "kv_idx + kv_idx // 4 <= q_pos", "kv_idx + kv_idx // 4 <= q_pos",
        "several terms, `kv_idx` and `kv_idx // 4`", "bring it to one term",
    ),
    "a permuted table": Kind(
        f"tensor order: i32[seqlen_kv]\n  {DOC} sorted", "doc[b, order[kv_idx]] == doc[b, q_pos]",
        "doc[b, order[kv_idx]] == doc[b, q_pos]", "values of tensor `doc`", "block_sparse",
    ),
    "many pieces": Kind(
        "", " or ".join(f"kv_idx == {7 * i}" for i in range(12)), "kv_idx", "more than 8 key intervals",
        "a union of fewer intervals",
    ),
}  # fmt: skip


def spec_of(clauses: str) -> AttentionSpec:
    return load_spec(f"attn 1\n\nattention a {{\n  head_dim = 64\n  {clauses}\n}}\n")


@pytest.mark.parametrize("kind", KINDS)
def test_the_note_names_the_term_why_and_the_mend(kind: str) -> None:
    k = KINDS[kind]
    (note,) = element_wise(spec_of(f"{k.declared}\n  mask = {k.mask}"))
    assert (note.code, note.severity) == ("W0401", Severity.NOTE)
    assert k.term in note.message and k.why in note.notes[0] and k.mend in note.helps[0]
    if note.primary is not None:  # rewritten terms have no place
        assert k.term in str(note.primary.span.source.text)[note.primary.span.start : note.primary.span.end]


@pytest.mark.parametrize("kind", [n for n, k in KINDS.items() if k.mended])
def test_the_mend_leaves_intervals_alone(kind: str) -> None:
    k = KINDS[kind]
    assert k.mended is not None
    kept = "\n  ".join(line for line in k.declared.split("\n  ") if line and line.split(":")[0] not in k.mended)
    spec = spec_of(f"{kept}\n  {k.mended}")
    assert mask_form(spec).is_exact and element_wise(spec) == ()


@pytest.mark.parametrize("kind", [n for n, k in KINDS.items() if "values of tensor" in k.why])
def test_blocks_that_the_values_empty_are_served(kind: str) -> None:
    """What the note says of values that nothing bounds: the clause is taken as it stands, and silences the note."""
    k = KINDS[kind]
    (note,) = element_wise(spec_of(f"{k.declared}\n  mask = {k.mask}"))
    clause = re.search(r"`(block_sparse .*?)`", note.helps[0])
    assert clause is not None
    spec = spec_of(f"{k.declared}\n  mask = {k.mask}\n  {clause[1]}")
    assert why_not(spec, "sm_90a") == () and plan(spec).plans and element_wise(spec) == ()


def test_terms_with_one_cause_are_one_note() -> None:
    (note,) = element_wise(spec_of("param width: int >= 1 = 16\n  mask = abs(kv_idx % width - q_pos % width) <= 2"))
    assert ", and 1 more like it, element by element" in note.message


def test_branches_and_segments_have_masks_of_their_own() -> None:
    branches = "".join(f"\n  branch {n} {{\n    mask = {m}\n  }}" for n, m in (("x", "true"), ("y", "kv_idx % 5 == 0")))
    (note,) = element_wise(spec_of(f"mask = kv_idx % 3 == 0{branches}"))
    assert "kv_idx % 5 == 0" in note.message
    (note,) = element_wise(spec_of("mask = kv_idx <= q_pos\n  segment past {\n    mask = kv_idx % 7 == 0\n  }"))
    assert "kv_idx % 7 == 0" in note.message


def test_block_lists_answer_the_note() -> None:
    assert element_wise(spec_of("mask = kv_idx % 3 == 0\n  block_sparse { q = 128, kv = 128 }")) == ()


def test_a_note_in_every_format() -> None:
    (note,) = element_wise(spec_of("mask = kv_idx % 3 == 0"))
    text = render(note)
    assert text.startswith("note[W0401]: `a` tests the mask's term `kv_idx % 3 == 0` element by element")
    assert "mask = kv_idx % 3 == 0" in text and "^^^^^^^^^^^^^^^ no interval of keys says this" in text
    assert ": note[W0401]: " in render_short(note) and render_github(note).startswith("::notice file=")
    assert "\x1b[36mnote" in render(note, color=True) or "\x1b[36m" in render(note, color=True)
