"""simplify: what becomes what, and what must stay."""

from __future__ import annotations

import pytest
from builders import CAUSAL, FLAG_K, QP, SK, SQ, C, H, K, P, Q, S, W, X, f, param, x

from attngen.ir.simplify import negate, simplify
from attngen.ir.types import Type
from attngen.syntax import print_expr

CAP = param("cap", Type.FLOAT)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (K + 0, "kv_idx"),
        (2 + K + 3 - K, "5"),
        (Q + SK - SQ, "q_pos"),
        (QP - Q, "seqlen_kv - seqlen_q"),
        (QP - SK + SQ, "q_idx"),
        ((K * 4 + 6) // 4, "kv_idx + 1"),
        ((K * 4 + Q + 6) // 4, "kv_idx + (q_idx + 2) // 4 + 1"),
        ((K // 3) // 5, "kv_idx // 15"),
        (K // -2, "-kv_idx // 2"),
        ((K * 6 + 7) % 3, "1"),
        ((K + 300) % 256, "(kv_idx + 44) % 256"),
        (K - K % 16, "kv_idx // 16 * 16"),
        (K - K % C, "kv_idx // size * size"),
        (f("min", K + 1, f("min", K, Q)), "min(kv_idx, q_idx)"),
        (f("clamp", K, 0, 5), "min(max(kv_idx, 0), 5)"),
        (f("abs", x(-3)), "3"),
        (~(K < Q), "kv_idx >= q_idx"),
        (~~FLAG_K, "flag[b, kv_idx]"),
        (K < K + 1, "true"),
        (CAUSAL & ~CAUSAL, "false"),
        (CAUSAL | (K == K), "true"),
        (f("where", x(2) > 3, K, Q), "q_idx"),
        (f("where", FLAG_K, x(True), CAUSAL), "flag[b, kv_idx] or kv_idx <= q_pos"),
        (x(False) == FLAG_K, "not flag[b, kv_idx]"),
        (S * 1.0, "s"),
        (x(1) / 16, "0.0625"),
        (f("exp", x(0.0)), "1.0"),
        (f("neg", -S), "s"),
        (f("int", x(2.9)), "2"),
    ],
)
def test_becomes(before: X, after: str) -> None:
    assert print_expr(simplify(before.e)) == after


@pytest.mark.parametrize(
    "e",
    [
        S * 0.0,  # NaN and infinities
        S - S,
        ~(S < CAP),  # NaN
        f("log", x(0.0)),  # not finite
        x(1.0) / 0.0,
        x(2**31 - 1) + 1,  # not an int32
        f("int", f("float", K)),  # rounds above 2**24
        K // W * W,
        P * H,
        f("exp", x(1000.0)),
    ],
)
def test_stays(e: X) -> None:
    assert simplify(e.e) == e.e


def test_negate_int_and_float() -> None:
    assert print_expr(negate(CAUSAL.e)) == "kv_idx > q_pos"
    assert print_expr(negate((S < CAP).e)) == "not s < cap"


def test_spans_survive() -> None:
    """A rewritten node keeps the place of the one it replaces."""
    from attngen.diag.span import Source, Span

    span = Span(Source("<text>", "not kv_idx < q_idx"), 0, 18)
    assert simplify((~(K < Q)).e.replace(span=span)).span is not None
