"""Tables of masks over sorted tensors: their values, golden counts of kept pairs, what a kernel's text says of them."""

from __future__ import annotations

import pytest
import torch
from builders import positions

from attngen.emit.module import emit
from attngen.ir.tables import Table, cover, words
from attngen.passes.mask_form import mask_form
from attngen.plan_text import describe, rooflines
from attngen.ref import interp
from attngen.ref.evaluate import evaluate
from attngen.ref.tables import table_values
from attngen.rooflines import roofline
from attngen.samples import Shape
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
    assert [t.sorted for t in form.tables if isinstance(t, Table)] == [False, False]
    # without a promise about `when`, tiles are bounded by the extremes of windows of 128 rows
    assert found["kv_first_least"][0].tolist() == [0] and found["kv_end_greatest"][0].tolist() == [6]


def test_extremes() -> None:
    """Windows of 128 rows, 64 apart; rows past the end count as the last one; two windows cover any tile."""
    form = mask_form(spec("kv_idx >= start[b, h, q_idx]", "tensor start: i32[batch, heads_q, seqlen_q]"))
    start = torch.randint(0, 99, (2, 3, 300), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    env = positions(300, 100, 2, 3)
    found = table_values(form.tables, env, {"start": start})
    least = found["start_least"]
    assert least.shape == (2, 3, 5)
    assert all(torch.equal(least[..., i], start[..., 64 * i : 64 * i + 128].amin(-1).long()) for i in range(5))
    (bounds,) = form.bounds
    for q_lo, rows in ((0, 64), (64, 128), (128, 192), (0, 256), (80, 80), (96, 96), (63, 193), (299, 1), (112, 112)):
        tile = {**env, "q_lo": torch.tensor(q_lo), "q_hi": torch.tensor(min(q_lo + rows, 300) - 1)}
        here = start[:, :, q_lo : q_lo + rows]
        low = evaluate(bounds.lower_min, tile, found)[:, :, 0, 0]
        high = evaluate(bounds.lower_max, tile, found)[:, :, 0, 0]
        assert (low <= here.amin(-1)).all() and (high >= here.amax(-1)).all()
        if q_lo % 64 == 0 and rows % 128 == 0:
            assert torch.equal(low, here.amin(-1).long()) and torch.equal(high, here.amax(-1).long())


def test_which_tiles_two_windows_cover() -> None:
    assert [n for n in range(16, 321, 16) if cover(n)] == [*range(16, 193, 16), 256]
    for rows in (16, 80, 112, 128, 176, 192, 256):
        for first in range(0, 20 * rows, rows):
            i, j = first // 64, (first + rows - 1) // 64
            held = {*range(64 * i, 64 * i + 128), *range(64 * max(j - 1, i), 64 * max(j - 1, i) + 128)}
            assert {*range(first, first + rows)} <= held


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


def test_rooflines_count_tables() -> None:
    plans = plan(spec("kv_idx <= q_pos and doc[b, q_pos] == doc[b, kv_idx]"))
    found = roofline(plans, Shape(1, 2, 2, 1000, 1000), {}, {"doc": DOC})
    assert (found.tables_bytes, found.search_steps) == (4000, 10)
    assert "  tables 4000 B, searches of 10 steps" in rooflines([("1000", found)])
    plans = plan(spec("kv_idx <= q_pos", ""))
    found = roofline(plans, Shape(1, 2, 2, 1000, 1000), {}, {})
    assert found.tables_bytes == 0 and "tables" not in rooflines([("1000", found)])


def test_no_table_no_trace() -> None:
    """A kernel without tables knows nothing of them."""
    text = emit(plan(spec("kv_idx <= q_pos", ""))).text
    assert "table" not in text.replace("softmax_table", "")
