"""The shape of mask forms: which clauses, which bounds, which reasons."""

from __future__ import annotations

import time

import pytest
import torch
from builders import CAUSAL, DOC_K, FLAG_K, MASKS, QP, SK, SQ, START, B, C, H, K, P, Q, W, X, f, load, param, spec, x

from attngen.ir.expr import Expr
from attngen.ir.forms import Clause
from attngen.ir.spec import ParamDecl
from attngen.ir.tables import Table
from attngen.ir.types import DType, Type
from attngen.passes.mask_form import mask_form
from attngen.ref.evaluate import evaluate
from attngen.syntax import print_expr


def texts(c: Clause) -> tuple[str | None, ...]:
    return tuple(None if e is None else print_expr(e) for e in (c.lower, c.upper, c.rows, c.residual))


def clauses(mask: X, *tensors: str) -> list[tuple[str | None, ...]]:
    return [texts(c) for c in mask_form(spec(mask, tensors=tensors)).clauses]


@pytest.mark.parametrize(
    ("mask", "lower", "upper"),
    [
        (x(True), None, None),
        (CAUSAL, None, "q_pos + 1"),
        (~(K > QP), None, "q_pos + 1"),
        (K < QP, None, "q_pos"),
        (K <= Q + SK - SQ, None, "q_pos + 1"),
        (MASKS["prefix"], None, "max(q_pos + 1, prefix)"),
        (MASKS["chunk"], "q_pos // size * size", "q_pos + 1"),
        (MASKS["chunk_const"], "q_pos // 256 * 256", "q_pos + 1"),
        (MASKS["block_causal"], None, "q_pos // size * size + size"),
        (MASKS["left_pad"], "start[b]", "q_pos + 1"),
        ((K + 3) // 16 == Q // 16, "q_idx // 16 * 16 - 3", "q_idx // 16 * 16 + 13"),
        (K * 2 <= Q, None, "q_idx // 2 + 1"),
        (Q - K * 3 <= 2, "q_idx // 3", None),
        (f("clamp", K, 2, 5) == 3, "3", "4"),
        (f("abs", K - Q) < 4, "q_idx - 3", "q_idx + 4"),
        ((K - Q) * C <= 7, None, "q_idx + 7 // size + 1"),
        (CAUSAL | (K > QP), None, None),
        (CAUSAL | (K < 0), None, "q_pos + 1"),
        (CAUSAL & (K < Q + SK), None, "q_pos + 1"),
        ((K < 5) == x(True), None, "5"),
        (K - K % C >= 0, None, None),
    ],
)
def test_one_interval(mask: X, lower: str | None, upper: str | None) -> None:
    assert clauses(mask, "start") == [(lower, upper, None, None)]


def test_nothing_kept() -> None:
    """Contradictions leave no clause."""
    for mask in (x(False), K < 0, K >= SK, CAUSAL & (K > QP), (K < 3) & (K >= 3), (K < 3) & (H < 0) & ~(H < 0)):
        assert mask_form(spec(mask)).clauses == ()


def test_several_clauses() -> None:
    assert clauses(CAUSAL & (K != QP)) == [(None, "q_pos", None, None)]
    assert clauses(f("min", K, P) < Q) == [(None, "q_idx", None, None), (None, None, "prefix < q_idx", None)]
    assert clauses(K != QP) == [(None, "q_pos", None, None), ("q_pos + 1", None, None, None)]
    found = clauses((f("abs", QP - K) <= 2) | load("row_flag", B, Q, dtype=DType.BOOL) | FLAG_K, "row_flag", "flag")
    assert found == [
        ("q_pos - 2", "q_pos + 3", None, None),
        (None, None, "row_flag[b, q_idx]", None),
        (None, None, None, "flag[b, kv_idx]"),
    ]


def test_unsorted_documents_keep_the_causal_interval() -> None:
    loose = spec(CAUSAL & (load("doc", B, QP) == DOC_K), tensors=("doc",))
    form = mask_form(loose.replace(tensors=(loose.tensors[0].replace(sorted=False),)))
    assert [texts(c) for c in form.clauses] == [(None, "q_pos + 1", None, "doc[b, q_pos] == doc[b, kv_idx]")]
    assert print_expr(form.bounds[0].upper_min) == "0" and not form.tables
    (reason,) = form.reasons
    assert reason.term == "doc[b, q_pos] == doc[b, kv_idx]" and "`doc`" in reason.why and "sorted" in reason.mend


DOC_Q, OTHER, OTHER_K = load("doc", B, QP), load("other", B, Q), load("other", B, K)


@pytest.mark.parametrize(
    ("mask", "lower", "upper", "tables"),
    [
        (CAUSAL & (DOC_Q == DOC_K), "doc_first[b, q_idx]", "q_pos + 1", ["doc_first doc[b, q_pos] sorted"]),
        (
            DOC_K == DOC_Q,
            "doc_first[b, q_idx]",
            "doc_end[b, q_idx]",
            ["doc_first doc[b, q_pos] sorted", "doc_end doc[b, q_pos] sorted"],
        ),
        (DOC_K <= OTHER, None, "doc_end[b, q_idx]", ["doc_end other[b, q_idx]"]),
        (OTHER < DOC_K, "doc_end[b, q_idx]", None, ["doc_end other[b, q_idx]"]),
        (DOC_K < OTHER, None, "doc_first[b, q_idx]", ["doc_first other[b, q_idx]"]),
        (DOC_K >= OTHER + 3, "doc_first[b, q_idx]", None, ["doc_first other[b, q_idx] + 3"]),
        (DOC_Q - DOC_K < W, "doc_end[b, q_idx]", None, ["doc_end doc[b, q_pos] - window sorted"]),
        (DOC_K * 2 <= Q, None, "doc_end[b, q_idx]", ["doc_end q_idx // 2 sorted"]),
        (load("doc", B, K // 4) == load("doc", B, QP // 4), "doc_first[b, q_idx] * 4", "doc_end[b, q_idx] * 4",
         ["doc_first doc[b, q_pos // 4] sorted", "doc_end doc[b, q_pos // 4] sorted"]),
        (load("doc", B, K + 1) >= P, "doc_first[b] - 1", None, ["doc_first prefix"]),
        ((DOC_K == DOC_Q) & (DOC_K >= 0), "max(doc_first[b, q_idx], doc_first_2[b])", "doc_end[b, q_idx]",
         ["doc_first doc[b, q_pos] sorted", "doc_end doc[b, q_pos] sorted", "doc_first_2 0"]),
    ],
)  # fmt: skip
def test_sorted_tensors_at_the_key(mask: X, lower: str | None, upper: str | None, tables: list[str]) -> None:
    form = mask_form(spec(mask, tensors=("doc",)))
    assert [texts(c) for c in form.clauses] == [(lower, upper, None, None)]
    found = [f"{t.name} {print_expr(t.value)}{' sorted' * t.sorted}" for t in form.tables if isinstance(t, Table)]
    assert sorted(found) == sorted(tables)


def test_no_table_where_it_would_not_say_the_same() -> None:
    """Unsorted tensors, floats, keys in leading indices, indices that nothing solves."""
    pair = load("doc", B, K) < load("doc", B, K + 1)
    for mask in (OTHER_K < 3, pair, load("doc", K, Q) < 3, load("doc", B, K % 3) < 3):
        form = mask_form(spec(mask, tensors=("doc",)))
        assert not form.tables and form.clauses[0].residual == mask.e


def test_no_extremes_where_every_tile_is_live_anyway() -> None:
    """Longformer: any key may be global, so that nothing is skipped, whatever the rows are."""
    row = load("row_flag", B, Q, dtype=DType.BOOL)
    assert mask_form(spec(CAUSAL | row)).tables
    assert not mask_form(spec(CAUSAL | row | FLAG_K)).tables


def test_forms_without_tables_are_written_as_before() -> None:
    """A kernel's name hashes its plan: it must not move with a field that is empty."""
    assert "tables" not in mask_form(spec(CAUSAL)).model_dump()
    assert "tables" in mask_form(spec(DOC_K == DOC_Q, tensors=("doc",))).model_dump()


def test_rows_fold_into_bounds() -> None:
    form = mask_form(spec(CAUSAL & (Q < P)))
    (t,) = form.bounds
    assert print_expr(t.upper_min) == "max(q_lo + seqlen_kv - seqlen_q + 1, 0) if q_hi < prefix else 0"
    assert print_expr(t.upper_max).endswith(" if q_lo < prefix else 0")


def test_sorted_tensor_bounds_rows() -> None:
    """A `sorted` tensor read at a monotone row index has its value at the tile's ends; another one has no bound."""
    (t,) = mask_form(spec(load("first", B, Q) <= K, tensors=("first",))).bounds
    assert print_expr(t.lower_min) == "min(max(first[b, q_lo], 0), seqlen_kv)"
    assert print_expr(t.lower_max) == "min(max(first[b, q_hi], 0), seqlen_kv)"
    form = mask_form(spec((load("other", B, Q) <= K) & load("row_flag", B, Q, dtype=DType.BOOL)))
    (t,) = form.bounds
    last = "max(q_hi // 64 - 1, q_lo // 64)"
    least, most = (f"other_{n}[b, q_lo // 64], other_{n}[b, {last}]" for n in ("least", "greatest"))
    assert print_expr(t.lower_min) == f"min(max(min({least}), 0), seqlen_kv)"
    assert print_expr(t.lower_max) == f"min(max(max({most}), 0), seqlen_kv)"
    some = f"max(row_flag_greatest[b, q_lo // 64], row_flag_greatest[b, {last}])"
    assert print_expr(t.upper_max) == f"seqlen_kv if {some} != 0 else 0"
    assert [(t.name, t.dims) for t in form.tables] == [
        (f"{n}_{which}", ("batch", "seqlen_q")) for n in ("other", "row_flag") for which in ("least", "greatest")
    ]


@pytest.mark.parametrize(
    ("mask", "why", "mend"),
    [
        (K // W <= QP // W, "the divisor `window` may be zero or negative", "declare `param window: int >= 1`"),
        ((K - Q) * W < 3, "the factor `window` may be zero or negative", "declare `param window: int >= 1`"),
        (K // START <= 2, "the divisor `start[b]` may be zero or negative", "use a positive constant"),
        (K % 2 == Q % 2, "a remainder of the key repeats along the row", "use `//`"),
        (K / 2 < 1.5, "it compares floats", "compare ints"),
        (K + K // C < 3, "the key stands in several terms, `kv_idx` and `kv_idx // size`", "bring it to one term"),
        (FLAG_K, "depends on the values of tensor `flag`", "give its ends"),
        (K * K < 9, "it is not linear in the key", "bounds on `kv_idx`"),
    ],
)
def test_reasons(mask: X, why: str, mend: str) -> None:
    form = mask_form(spec(mask, tensors=("start", "flag")))
    (reason,) = form.reasons
    assert why in reason.why and mend in reason.mend
    assert reason.term == print_expr(mask.e)


def test_too_many_clauses() -> None:
    """Past eight intervals the term is tested element by element, the rest keeps its bounds."""
    mask: X = K == 0
    for i in range(1, 10):
        mask = mask | (3 * i == K)
    form = mask_form(spec(CAUSAL & mask))
    assert len(form.clauses) == 1 and form.clauses[0].residual is not None
    assert texts(form.clauses[0])[1] == "q_pos + 1"
    assert "more than 8" in form.reasons[0].why


def test_deep_conditionals_end() -> None:
    """Splitting conditionals doubles what follows; the number of splits is bounded, so analysis ends quickly."""
    mask: X = K < 3
    for i in range(30):
        mask = f("where", (K + i) % 3 == 0, mask, i < K)
    form = mask_form(spec(mask))
    assert 1 <= len(form.clauses) <= 8


def test_large_masks_end() -> None:
    """A spec is untrusted text: what would multiply out is left whole, in time."""
    many, apart, nested = K == 0, K != 0, K
    for i in range(1, 150):
        many, apart = many | (3 * i == K), apart & (3 * i != K)
    for i in range(14):
        nested = f("abs", nested - i)
    start = time.process_time()
    for mask in (many, apart, nested < P, f("abs", nested) + f("abs", nested) > nested):
        form = mask_form(spec(mask))
        assert len(form.clauses) <= 8 and form.reasons
    assert time.process_time() - start < 10


def int32(e: Expr, **values: int) -> int:
    """Evaluate in wrapping int32, as a kernel does."""
    env = {n: torch.tensor([v], dtype=torch.int32) for n, v in values.items()}
    out = torch.broadcast_to(evaluate(e, env), (1,))
    assert out.dtype == torch.int32 or not env
    return int(out[0])


@pytest.mark.parametrize("window", [-(2**31), -(2**30), -1, 0, 1, 128, 2**30, 2**31 - 1])
@pytest.mark.parametrize("lengths", [(1, 1), (1000, 1000), (1, 2**30 - 1), (2**30 - 1, 1), (2**30 - 1, 2**30 - 1)])
@pytest.mark.parametrize("name", ["window", "two_sided"])
def test_huge_params_do_not_overflow(name: str, lengths: tuple[int, int], window: int) -> None:
    """Bounds in int32 equal bounds in unbounded integers, once clamped to [0, seqlen_kv]."""
    (sq, skv), form = lengths, mask_form(spec(MASKS[name]))
    for q in {0, sq // 2, sq - 1}:
        pos = q + skv - sq
        for c, t in zip(form.clauses, form.bounds, strict=True):
            assert c.lower is not None and c.upper is not None
            at = {"q_idx": q, "q_pos": pos, "seqlen_q": sq, "seqlen_kv": skv, "window": window}
            lower = pos - window + (name == "window")
            upper = pos + 1 + (window if name == "two_sided" else 0)
            for e, want in ((c.lower, lower), (c.upper, upper)):
                assert min(max(int32(e, **at), 0), skv) == min(max(want, 0), skv)
            tile = {"q_lo": q, "q_hi": q, "seqlen_q": sq, "seqlen_kv": skv, "window": window}
            assert int32(t.lower_min, **tile) == min(max(lower, 0), skv) == int32(t.lower_max, **tile)
            assert int32(t.upper_min, **tile) == min(max(upper, 0), skv) == int32(t.upper_max, **tile)


def test_declared_ranges_need_no_guard() -> None:
    """A param whose range is declared keeps its plain spelling."""
    bounded = spec(CAUSAL & (param("w") > QP - K)).replace(
        params=(ParamDecl(name="w", type=Type.INT, minimum=1, maximum=1 << 20),)
    )
    (c,) = mask_form(bounded).clauses
    assert texts(c)[0] == "q_pos - w + 1"
    half = bounded.replace(params=(ParamDecl(name="w", type=Type.INT, minimum=1),))
    assert texts(mask_form(half).clauses[0])[0] == "q_pos - min(w, 1073741824) + 1"


def test_bounds_stay_small() -> None:
    """The kernel evaluates bounds for each tile: a few operations each."""
    from attngen.ir.expr import walk

    for name, mask in MASKS.items():
        for t in mask_form(spec(mask, tensors=("start", "first"))).bounds:
            for e in (t.lower_min, t.lower_max, t.upper_min, t.upper_max):
                assert sum(1 for _ in walk(e)) <= 20, (name, print_expr(e))
