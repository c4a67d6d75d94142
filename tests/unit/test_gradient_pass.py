"""gradient_form: slopes, coefficients and classes of known scores; what is shared, refused and bounded."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
from builders import CAUSAL, HKV, QP, B, D, H, K, O, Q, S, W, X, f, load, param, spec, x

from attngen.diag.diagnostic import AttnError
from attngen.emit.exprs import CutePrinter
from attngen.emit.straight import straight_line
from attngen.ir import functions
from attngen.ir.expr import Load, tensors_of, walk
from attngen.ir.gradient import Contribution, GradientForm, GradientKind, is_finite
from attngen.ir.types import DType, Type
from attngen.passes.algebra import plus, times
from attngen.passes.gradient import gradient_form, kind_of
from attngen.syntax import load_all, load_spec, print_expr

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CAP = param("cap", Type.FLOAT)
SLOPE, SINK = load("slopes", H, dtype=DType.F32), load("sinks", H, dtype=DType.F32)
BIAS, FLIPPED = load("bias", B, H, Q, K, dtype=DType.F32), load("bias", B, 0, K, Q, dtype=DType.F32)


def form(score: X, *tensors: str, **more: object) -> GradientForm:
    return gradient_form(spec(True, score, tensors=tensors, **more))


def text(declarations: str, score: str, **clauses: str) -> GradientForm:
    """The form of a spec as it is written."""
    lines = [*declarations.split(";"), f"score = {score}", *(f"{n} = {e}" for n, e in clauses.items())]
    body = "\n".join(f"  {line.strip()}" for line in lines)
    return gradient_form(load_spec(f'attn 1\ninclude "std.attn"\nattention a {{\n  head_dim = 64\n{body}\n}}\n'))


@pytest.mark.parametrize(
    ("score", "slope", "finite"),
    [
        (S, "1.0", True),
        (S + BIAS, "1.0", True),
        (S - SLOPE * (QP - K), "1.0", True),
        (f("where", K > QP, S + BIAS, S), "1.0", True),
        (f("where", K > QP, S * 2.0, S), "2.0 if kv_idx > q_pos else 1.0", True),
        (f("tanh", S / 50.0) * 50.0, "1.0 - tanh(s / 50.0) * tanh(s / 50.0)", True),
        (CAP * f("tanh", S / CAP), "1.0 - tanh(s / cap) * tanh(s / cap)", True),
        (S * SLOPE, "slopes[h]", False),
        (-(S / CAP), "-1.0 / cap", False),
        (S / 4.0, "0.25", True),
        (S * S, "2.0 * s", True),
        (S - S, "0.0", True),
        (f("exp", S * 0.5), "0.5 * exp(s * 0.5)", False),
        (f("log", S), "1.0 / s", False),
        (f("sqrt", S), "0.5 / sqrt(s)", False),
        (f("softplus", S), "sigmoid(s)", True),
        (f("floor", S) + x(1.0), "0.0", True),
        (f("max", S, 0.0), "1.0 if s >= 0.0 else 0.0", True),
        (f("clamp", S, -3.0, CAP), "1.0 if s >= -3.0 and s <= cap else 0.0", True),
        (f("float", f("int", S)), "0.0", True),
    ],
)  # fmt: skip
def test_slope(score: X, slope: str, finite: bool) -> None:
    found = form(score, "slopes", "bias")
    assert (print_expr(found.slope), found.is_finite) == (slope, finite)
    assert found.is_identity == (slope == "1.0")
    assert found.is_linear == ("s" not in {n.name for n in walk(found.slope) if n.kind == "atom"})


@pytest.mark.parametrize(
    ("declarations", "score", "want"),
    [
        ("tensor m: f32[heads_q] grad", "alibi(s, m[h])", [("m", "column", "h", "-float(q_pos - kv_idx)")]),
        ("tensor t: f32[heads_q] grad", "s * exp(t[h])", [("t", "column", "h", "s * exp(t[h])")]),
        (
            "tensor f: f32[batch, heads_q, seqlen_kv] grad",
            "forgetting(s, f)",
            [("f", "row", "b, h, q_pos", "1.0"), ("f", "column", "b, h, kv_idx", "-1.0")],
        ),
        (
            "tensor bias: bf16[1, heads_q, seqlen_q, seqlen_kv] grad",
            "softcap(biased(s, bias), 5.0)",
            [("bias", "element", "b, h, q_idx, kv_idx", "1.0 - tanh(X / 5.0) * tanh(X / 5.0)")],
        ),
        (
            "tensor w: f32[batch, seqlen_kv] grad",
            "s + log(max(w[b, kv_idx], 0.0))",
            [("w", "column", "b, kv_idx", "1.0 / max(w[b, kv_idx], 0.0) if w[b, kv_idx] >= 0.0 else 0.0")],
        ),
        # one variable read twice, and not the one inside an index or a condition
        ("tensor m: f32[heads_q] grad", "s * m[h] + m[h] * m[h]", [("m", "column", "h", "s + 2.0 * m[h]")]),
        (
            "tensor m: f32[heads_q] grad; tensor t: f32[32] grad",
            "s + t[int(m[h])] if m[0] > 0.0 else s",
            [("t", "column", "int(m[h])", "1.0 if m[0] > 0.0 else 0.0")],
        ),
        ("tensor m: f32[heads_q]", "s * m[h]", []),
    ],
)
def test_contributions(declarations: str, score: str, want: list[tuple[str, str, str, str]]) -> None:
    found = text(declarations, score)
    written = [
        (c.tensor, c.kind.value, ", ".join(map(print_expr, c.indices)), print_expr(c.coefficient))
        for c in found.contributions
    ]
    assert written == [(*w[:3], w[3].replace("X", "(s + bias[b, h, q_idx, kv_idx])")) for w in want]
    assert found.in_kernel == found.contributions


@pytest.mark.parametrize(
    ("indices", "kind"),
    [
        ((), "column"),
        ((x(3),), "column"),
        ((B, H), "column"),
        ((HKV, K), "column"),
        ((f("min", K, W),), "column"),
        ((load("doc", B, K), H), "column"),
        ((B, Q), "row"),
        ((QP,), "row"),
        ((load("doc", B, QP),), "row"),
        ((Q, K), "element"),
        ((QP - K,), "element"),
        ((load("doc", B, QP), load("doc", B, K)), "element"),
        ((f("int", S),), "element"),
    ],
)
def test_kinds(indices: tuple[X, ...], kind: str) -> None:
    read = load("anything", *indices, dtype=DType.F32).e
    assert isinstance(read, Load)
    assert kind_of(read) is GradientKind(kind)


def test_every_reader_is_accounted_for() -> None:
    """Score and sink both contribute; mask, epilogue and what nobody reads are told apart."""
    gate = load("gate", B, Q, H, D, dtype=DType.F32)
    s = spec(
        CAUSAL & (load("bias", B, H, Q, K, dtype=DType.F32) > 0.0), S - SLOPE * (QP - K), sink=SLOPE * SINK,
        epilogue=O * f("sigmoid", gate), tensors=("slopes", "sinks", "bias", "gate"),
    )  # fmt: skip
    found = gradient_form(s)
    sink = GradientKind.SINK
    assert found.contributions == (
        Contribution(tensor="slopes", kind=GradientKind.COLUMN, indices=(H.e,), coefficient=(-f("float", QP - K)).e),
        Contribution(tensor="slopes", kind=sink),
        Contribution(tensor="sinks", kind=sink),
    )
    assert found.zero == ("bias",)  # the gate has its gradient from the epilogue
    assert found.in_kernel == found.contributions[:1]
    # a sink that reads a tensor without its value, or twice
    assert form(S, "sinks", sink=f("floor", SINK)).zero == ("sinks",)
    assert len(form(S, "sinks", sink=SINK + SINK * SINK).contributions) == 1


def test_other_scores_of_a_spec() -> None:
    """A branch's or segment's score, with or without its own sink."""
    s = spec(True, S + BIAS, sink=SINK, tensors=("bias", "sinks"))
    assert [c.kind for c in gradient_form(s).contributions] == ["element", "sink"]
    assert gradient_form(s, S.e).contributions == ()
    assert [c.tensor for c in gradient_form(s, S.e, SINK.e).contributions] == ["sinks"]


def test_keeps_score() -> None:
    """`s` is needed after P where the slope or a coefficient reads it."""
    assert not form(S * SLOPE).keeps_score
    assert form(S * SLOPE, "slopes").keeps_score
    assert form(S * S).keeps_score
    assert not form(S + BIAS, "bias").keeps_score


def test_score_and_slope_share_what_the_printer_names() -> None:
    """Printed together, the tanh of softcap stands once, and so does everything a coefficient repeats."""
    found = text("param cap: float = 50.0; tensor m: f32[heads_q] grad", "softcap(s * exp(m[h] + 1.0), cap)")
    printer = CutePrinter()
    lines, values = straight_line(printer, found.formulas, frozenset(("s", "b", "h", "q_idx", "kv_idx")))
    written = "\n".join((*lines, *values))
    assert written.count("tanh(") == 1 and written.count("exp(") == 1
    assert len(values) == 3


def test_a_function_without_a_rule_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    row = functions.FUNCTIONS["tanh"]
    monkeypatch.setitem(functions.FUNCTIONS, "tanh", dataclasses.replace(row, derivative=None))
    s = load_spec("attn 1\nattention a {\n  head_dim = 64\n  score = s + tanh(s) + tanh(1.0)\n}\n")
    with pytest.raises(AttnError) as caught:
        gradient_form(s)
    (fault,) = caught.value.diagnostics
    assert fault.code == "E0402" and "`tanh`" in fault.message and fault.helps
    assert fault.primary is not None
    span = fault.primary.span
    assert span.source.text[span.start : span.end] == "tanh(s)"
    assert form(S + f("tanh", CAP)).is_identity  # where nothing passes none is needed


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        (CAP, f("tanh", S) / CAP, "tanh(s)"),
        (x(49.0), S / 49.0, "s"),
        (-S, -CAP, "s * cap"),
        (S / CAP, CAP / S, "1.0"),
        (f("where", K > Q, 1.0, 0.0), f("log", S), "log(s) if kv_idx > q_idx else 0.0"),
        (f("where", K > Q, 1.0, -1.0), S, "(1.0 if kv_idx > q_idx else -1.0) * s"),
        (x(0.0), f("log", S), "0.0"),
        (x(2.0), x(3.0) * S, "6.0 * s"),
        (x(1.0), x(1.0) / x(0.0), "1.0 / 0.0"),
    ],
)
def test_products(a: X, b: X, want: str) -> None:
    assert print_expr(times(a.e, b.e)) == want


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        (S, x(0.0), "s"),
        (S, S, "2.0 * s"),
        (S, -S, "0.0"),
        (-S, CAP, "cap - s"),
        (-S, -CAP, "-s - cap"),
        (x(2.0) * S - x(1.0), CAP + x(3.0) * S, "5.0 * s + cap - 1.0"),
        (f("where", K > Q, S, 0.0), f("where", K > Q, 0.0, CAP), "s if kv_idx > q_idx else cap"),
        (f("where", K > Q, S, 0.0), f("where", K > Q, 0.0, S), "s"),
    ],
)
def test_sums(a: X, b: X, want: str) -> None:
    assert print_expr(plus(a.e, b.e)) == want


def test_elements_may_be_infinite() -> None:
    """A coefficient that reads a float element is selected, one that reads ints or bools is not."""
    assert not is_finite((S * BIAS).e) and not is_finite((x(1.0) / S).e) and not is_finite(f("exp", S).e)
    assert is_finite((S * f("float", load("doc", B, K))).e)
    assert is_finite(f("where", load("flag", B, K, dtype=DType.BOOL), S, 1.0).e)
    assert is_finite(f("tanh", S / CAP).e) and not is_finite(f("tanh", S / CAP * 2.0).e)
    assert not is_finite((S / 0.0).e) and is_finite((S / 2.0).e)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.attn")), ids=lambda p: p.stem)
def test_examples(file: Path) -> None:
    """Every example has a form; their scores but softcap and temperatures add to s."""
    for s in load_all(file):
        found = gradient_form(s)
        assert found.score == s.score
        learned = {t.name for t in s.tensors if t.grad}
        in_epilogue = learned.intersection(tensors_of(s.epilogue))
        assert {c.tensor for c in found.contributions} | set(found.zero) | in_epilogue == learned
        assert found.zero == ()
        assert found.is_identity or "gemma" in s.name or s.name == "log_scaled"


def test_too_large() -> None:
    """Products of thousands of learned elements have derivatives of millions of nodes: refused, and soon."""
    level = [S + load("bias", B, H, i, K, dtype=DType.F32) for i in range(1024)]
    while len(level) > 1:
        level = [a * b for a, b in zip(level[::2], level[1::2], strict=True)]
    start = time.thread_time()
    with pytest.raises(AttnError, match=r"more than 100000 nodes") as caught:
        form(level[0], "bias")
    assert caught.value.code == "E0402" and time.thread_time() - start < 20


@pytest.mark.parametrize("shape", ["balanced", "chain", "powers", "sums", "elements"])
def test_hostile_scores_take_seconds_at_most(shape: str) -> None:
    """Scores at the bounds of the language: products and sums of thousands of factors, a chain as deep as allowed."""
    if shape == "chain":
        e = S
        for i in range(100):
            e = (e + x(float(i))) * f("tanh", S + x(i / 7))
    elif shape == "powers":
        e = S
        for _ in range(12):
            e = e * e
    else:
        level = [
            load("bias", B, H, i, K, dtype=DType.F32) if shape == "elements" else S + x(i / 7) for i in range(2048)
        ]
        while len(level) > 1:
            pairs = zip(level[::2], level[1::2], strict=True)
            level = [a * b if shape == "balanced" else a - b * SLOPE for a, b in pairs]
        e = level[0]
    start = time.thread_time()
    found = form(e, "slopes") if shape == "sums" else form(e, "bias")
    assert found.is_linear == (shape in ("sums", "elements"))
    assert len(found.contributions) == {"sums": 1, "elements": 2048}.get(shape, 0)
    assert time.thread_time() - start < 20
