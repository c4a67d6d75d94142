"""Tables of masks over sorted tensors: their values, golden counts of kept pairs, what a kernel's text says of them."""

from __future__ import annotations

import pytest
import torch
from builders import positions

from attngen.emit.module import emit
from attngen.ir.tables import words
from attngen.passes.mask_form import mask_form
from attngen.plan_text import describe
from attngen.ref import interp
from attngen.ref.evaluate import evaluate
from attngen.ref.tables import table_values
from attngen.search import plan
from attngen.syntax import load_spec

LENGTHS = [1, 127, 128, 200, 300, 244]
DOC = torch.repeat_interleave(torch.arange(6, dtype=torch.int32), torch.tensor(LENGTHS))[None]


def spec(mask: str, more: str = "tensor doc: i32[batch, seqlen_kv] sorted"):  # type: ignore[no-untyped-def]
    return load_spec(f"attn 1\nattention packed {{\n  head_dim = 8\n  {more}\n  mask = {mask}\n}}\n")


@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        ("kv_idx <= q_pos and doc[b, q_pos] == doc[b, kv_idx]", 111525),
        ("doc[b, kv_idx] == doc[b, q_pos]", 222050),
        ("doc[b, q_pos] != doc[b, kv_idx]", 1000 * 1000 - 222050),
        ("kv_idx <= q_pos and doc[b, q_pos] >= doc[b, kv_idx]", 500500),
    ],
)
def test_golden_counts(mask: str, kept: int) -> None:
    """Kept pairs of the limits that the tables give, no element tested by the mask itself."""
    form = mask_form(spec(mask))
    assert form.is_exact
    env, tensors = positions(1000, 1000), {"doc": DOC}
    tensors |= table_values(form.tables, env, tensors)
    keep = torch.zeros(1, 1, 1000, 1000, dtype=torch.bool)
    for c in form.clauses:
        low = 0 if c.lower is None else evaluate(c.lower, env, tensors)
        high = 1000 if c.upper is None else evaluate(c.upper, env, tensors)
        keep |= (env["kv_idx"] >= low) & (env["kv_idx"] < high)
    assert int(keep.sum()) == kept


def test_tiles_outside_the_documents_are_skipped() -> None:
    """Documents of whole tiles: each row tile visits its own document, no more, and masks nothing but the diagonal."""
    plans = plan(spec("kv_idx <= q_pos and doc[b, q_pos] == doc[b, kv_idx]"))
    tile = plans.plans[0].compute
    n = tile.tile_m * tile.tile_n // 32
    doc = (torch.arange(4 * n, dtype=torch.int32) // n)[None]
    q = torch.randn(1, 4 * n, 1, 8)
    _, _, trace = interp.run(plans.plans[0], plans.spec, q, q, q, tensors={"doc": doc})
    for visit in trace.visits:
        assert visit.tile.n_block * tile.tile_n // n == visit.q_lo // n


def test_values() -> None:
    """First and end of runs, of values that no key has, of keys before and after all; unsorted rows end as well."""
    form = mask_form(spec("kv[b, kv_idx] == when[b, q_idx]", "tensor kv: i32[batch, seqlen_kv] sorted\n"
                          "  tensor when: i32[batch, seqlen_q]"))  # fmt: skip
    env = positions(5, 6, 2)
    kv = torch.tensor([[1, 1, 4, 4, 4, 9], [5, 1, 3, 2, 2, 0]], dtype=torch.int32)
    when = torch.tensor([[4, 0, 5, 9, 99], [2, 2, 2, 9, -9]], dtype=torch.int32)
    found = table_values(form.tables, env, {"kv": kv, "when": when})
    assert found["kv_first"][0].tolist() == [2, 0, 5, 5, 6] and found["kv_end"][0].tolist() == [5, 0, 5, 6, 6]
    assert ((found["kv_first"][1] >= 0) & (found["kv_end"][1] <= 6)).all()
    assert [t.sorted for t in form.tables] == [False, False]


def test_words() -> None:
    sizes = {"batch": 2, "seqlen_q": 70, "heads_q": 3}
    rows = [{"dims": ["batch", "seqlen_q"]}, {"dims": ["batch"]}, {"dims": [4, ["seqlen_q", 64], "heads_q"]}]
    assert words(rows, sizes) == 140 + 2 + 4 * 2 * 3


def test_a_sum_that_may_leave_32_bits_is_added_up_in_64() -> None:
    text = emit(plan(spec("doc[b, q_pos] - doc[b, kv_idx] < 7 or doc[b, kv_idx] == doc[b, 0]"))).text
    assert "wanted = Int64(at(doc, b, q_pos)) - 6\n" in text and "wanted = at(doc, b, 0)\n" in text


def test_explained() -> None:
    text = describe(plan(spec("kv_idx <= q_pos and doc[b, q_pos] == doc[b, kv_idx]")))
    assert "table doc_first: i32[batch, seqlen_q] sorted" in text
    assert "how many elements of doc[b] are below doc[b, q_pos]" in text and "4 * (batch * seqlen_q) bytes" in text


def test_no_table_no_trace() -> None:
    """A kernel without tables knows nothing of them."""
    text = emit(plan(spec("kv_idx <= q_pos", ""))).text
    assert "table" not in text.replace("softmax_table", "")
