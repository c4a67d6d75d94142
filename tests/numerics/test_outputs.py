"""Epilogues, output dtypes and largest scores: plans against autograd of the dense meaning, callables on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backward_plans import check

import attngen
from attngen import samples
from attngen.diag.diagnostic import AttnError
from attngen.ir.gradient import GradientKind
from attngen.ir.spec import AttentionSpec
from attngen.ref import blockwise, dense
from attngen.samples import Shape
from attngen.search import plan
from attngen.search_backward import plan_backward
from attngen.syntax import make_spec

pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice", "ignore::DeprecationWarning")
CAUSAL = "kv_idx <= q_pos"
GATE = {"gate": {"dtype": "bf16", "dims": ("batch", "seqlen_q", "heads_q", "head_dim_v"), "grad": True}}
SPECS = {
    s.name: s
    for s in (
        make_spec("gated", head_dim=16, mask=CAUSAL, tensors=GATE, epilogue="o * sigmoid(gate[b, q_idx, h, d])"),
        make_spec(
            "mixed", head_dim=16, head_dim_v=8, mask=CAUSAL, sink="sinks[h]", normalizer="softmax",
            score="s + w[kv_idx % 8]", epilogue="softplus(o) * rows[b, h, q_idx] + w[d] * o + w[(d + q_idx) % 8]",
            tensors={
                "rows": {"dims": ("batch", "heads_q", "seqlen_q"), "grad": True},
                "w": {"dims": ("head_dim_v",), "grad": True},
                "sinks": {"dims": ("heads_q",), "grad": True},
            },
        ),
        make_spec("constant", head_dim=16, mask=CAUSAL, epilogue="2.0 * o + 1.0"),
        make_spec("ignoring", head_dim=16, tensors=GATE, epilogue="gate[b, q_idx, h, d]"),
        make_spec("weighed", head_dim=16, mask=CAUSAL, normalizer="sigmoid", tensors=GATE, out_dtype="f32",
                  epilogue="o * gate[b, q_idx, h, d]"),
    )
}  # fmt: skip


def learned(spec: AttentionSpec) -> tuple[str, ...]:
    return tuple(t.name for t in spec.tensors if t.grad)


@pytest.mark.parametrize("size", [(70, 70), (33, 150), (150, 33)], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_backward_plans(name: str, size: tuple[int, int]) -> None:
    spec = SPECS[name]
    shape = Shape(batch=2, heads_q=2, heads_kv=1, seqlen_q=size[0], seqlen_kv=size[1])
    qkv = [x.double() for x in samples.qkv(spec, shape)]
    plans = plan_backward(spec, captured=learned(spec))
    for deterministic in (False, True):
        check(plans.replace(deterministic=deterministic), *qkv, samples.params(spec), samples.tensors(spec, shape))


def test_kinds() -> None:
    form = plan_backward(SPECS["mixed"], captured=learned(SPECS["mixed"])).gradient
    kinds = {(c.tensor, c.kind) for c in form.contributions}
    assert kinds == {
        ("rows", GradientKind.OUTPUT_ROW), ("w", GradientKind.OUTPUT), ("w", GradientKind.COLUMN),
        ("sinks", GradientKind.SINK),
    }  # fmt: skip


def test_an_fp32_output_takes_no_shared_memory() -> None:
    narrow, wide = (plan(make_spec("x", head_dim=128, out_dtype=kind)) for kind in ("bf16", "f32"))
    for a, b in ((narrow, True), (wide, False)):
        assert all(p.memory.stages_o is b and ("sO" in {x.name for x in p.memory.buffers}) is b for p in a.plans)
        assert any(n.name.startswith("store") for n in a.plans[0].schedule.named_barriers) is b


def call(spec: AttentionSpec, shape: Shape) -> tuple[Any, list[torch.Tensor], dict[str, torch.Tensor]]:
    qkv = [x.requires_grad_() for x in samples.qkv(spec, shape)]
    tensors = {n: x.requires_grad_(n in learned(spec)) for n, x in samples.tensors(spec, shape).items()}
    return attngen.build(spec), qkv, tensors


def test_gradients_while_traced() -> None:
    """Through the operator that also gives O before the epilogue: as eager ones, on CPU tensors."""
    attn, qkv, tensors = call(SPECS["gated"], Shape(2, 4, 2, 17, 25))
    inputs = [*qkv, *tensors.values()]
    want = torch.autograd.grad(attn(*qkv, **tensors).float().square().sum(), inputs)

    def loss(q: Any, k: Any, v: Any, t: Any) -> Any:
        return attn(q, k, v, **t).float().square().sum()

    traced = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(traced(*qkv, tensors), inputs), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("normalizer", ["softmax", "sigmoid"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_max_logit(layout: str, normalizer: str) -> None:
    spec = make_spec(
        "top", head_dim=16, score="s * 3.0", mask="kv_idx <= q_pos and kv_idx > 2", layout=layout,
        normalizer=normalizer, out_dtype="f32", max_logit=True,
    )  # fmt: skip
    shape = Shape(2, 4, 2, 40, 33)
    q, k, v = samples.qkv(spec, shape)
    exact = dense.attention(spec, q, k, v)
    torch.testing.assert_close(blockwise.largest(spec, q, k, v).double(), exact.max_logit, rtol=1e-5, atol=1e-5)
    q, k, v = (x.transpose(1, 2).contiguous() if layout == "bhsd" else x for x in (q, k, v))
    attn = attngen.build(spec)
    o, lse, top = attn(q.requires_grad_(), k, v, return_lse=True, return_max_logit=True)
    assert o.dtype is torch.float32 and top.shape == lse.shape == (2, 4, 40)
    assert o.requires_grad and lse.requires_grad and not top.requires_grad
    torch.testing.assert_close(top.double(), exact.max_logit, rtol=1e-5, atol=1e-5)
    assert (top == -torch.inf).any() and (top.isinf() == (exact.max_logit == -torch.inf)).all()
    again, alone = attn(q, k, v, return_max_logit=True)
    assert torch.equal(again, o) and torch.equal(alone, top)
    assert isinstance(attn(q, k, v), torch.Tensor)
    meta = [torch.empty_like(x, device="meta") for x in (q, k, v)]
    assert [tuple(x.shape) for x in attn(*meta, return_max_logit=True)] == [tuple(o.shape), (2, 4, 40)]


def test_max_logit_under_dynamo() -> None:
    spec = make_spec("top", head_dim=16, mask=CAUSAL, max_logit=True)
    attn, (q, k, v), _ = call(spec, Shape(1, 2, 1, 9, 9))
    traced = torch.compile(lambda q, k, v: attn(q, k, v, return_max_logit=True), fullgraph=True, backend="aot_eager")
    for a, b in zip(traced(q, k, v), attn(q, k, v, return_max_logit=True), strict=True):
        assert torch.equal(a, b)


def test_max_logit_is_asked_of_the_spec() -> None:
    attn, qkv, _ = call(make_spec("plain", head_dim=16), Shape(1, 1, 1, 3, 3))
    with pytest.raises(AttnError, match=r"max_logit = true"):
        attn(*qkv, return_max_logit=True)
    attn, qkv, _ = call(make_spec("top", head_dim=16, max_logit=True), Shape(1, 1, 1, 3, 3))
    with pytest.raises(AttnError, match=r"E0616"):
        attn(*(x.detach() for x in qkv), return_max_logit=True, out=torch.empty(1, 3, 1, 16))


def test_no_derivative_through_an_epilogue() -> None:
    """A step has none: its slope is zero, and so are the gradients, said without a refusal."""
    spec = make_spec("stepped", head_dim=16, epilogue="floor(o)")
    assert plan_backward(spec).gradient.contributions == ()
