"""Epilogues on the checker: forward, what a forward saves, and gradients through them; fp32 output, largest scores."""

from __future__ import annotations

import backward_calls as calls
import pytest
import torch
from ptxcheck.compile import compile_spec
from ptxcheck.launch import attngen_call
from test_gallery import verify

from attngen import samples
from attngen.ir.expr import atom
from attngen.ir.spec import AttentionSpec
from attngen.ref import dense
from attngen.ref.compare import assert_close
from attngen.samples import Shape
from attngen.syntax import make_spec

pytestmark = pytest.mark.dsl
CAUSAL = "kv_idx <= q_pos"
GATE = {"gate": {"dtype": "bf16", "dims": ("batch", "seqlen_q", "heads_q", "head_dim_v"), "grad": True}}
SPECS = {
    s.name: s
    for s in (
        make_spec("gated", head_dim=64, mask=CAUSAL, tensors=GATE, epilogue="o * sigmoid(gate[b, q_idx, h, d])"),
        # one gate a row and head, a weight a column, a sink, heads first
        make_spec(
            "headwise", head_dim=64, head_dim_v=40, mask=CAUSAL, layout="bhsd", sink="sinks[h]",
            epilogue="o * softplus(gate[b, h, q_idx]) + tanh(o) * w[d]",
            tensors={
                "gate": {"dims": ("batch", "heads_q", "seqlen_q"), "grad": True},
                "w": {"dims": ("head_dim_v",), "grad": True},
                "sinks": {"dims": ("heads_q",), "grad": True},
            },
        ),
        make_spec(
            "weighed", head_dim=256, mask=CAUSAL, normalizer="sigmoid", tensors=GATE, out_dtype="f32", max_logit=True,
            epilogue="o * gate[b, q_idx, h, d]",
        ),
        make_spec("wide_out", head_dim=64, score="2.0 * tanh(s / 2.0)", mask=CAUSAL, out_dtype="f32", max_logit=True),
        make_spec("other_out", head_dim=64, head_dim_v=24, mask=CAUSAL, out_dtype="fp16", max_logit=True),
    )
}  # fmt: skip
SHAPES = [Shape(1, 2, 1, 131, 131), Shape(2, 1, 1, 60, 203), Shape(1, 1, 1, 200, 77)]


def learned(spec: AttentionSpec) -> tuple[str, ...]:
    return tuple(t.name for t in spec.tensors if t.grad)


@pytest.mark.parametrize("name", SPECS)
def test_forward(name: str) -> None:
    spec = SPECS[name]
    module, _ = compile_spec(spec)
    for seed, shape in enumerate(SHAPES):
        verify(spec, module, 0, shape, seed, lse=spec.normalizer == "softmax")


@pytest.mark.parametrize("name", ["gated", "weighed"])
def test_what_is_saved(name: str) -> None:
    """O before the epilogue, where asked for; O itself is the same."""
    spec, shape = SPECS[name], SHAPES[0]
    module, _ = compile_spec(spec)
    q, k, v = samples.qkv(spec, shape)
    tensors = samples.tensors(spec, shape)
    o, _, _ = attngen_call(module, 0, q, k, v, tensors=tuple(tensors.values()))
    pre = torch.full_like(o, torch.nan)
    further = {"o_pre": pre, "saves_o": 1}
    again, _, _ = attngen_call(module, 0, q, k, v, tensors=tuple(tensors.values()), further=further)
    assert torch.equal(o, again)
    assert_close(pre, spec.replace(epilogue=atom("o")), q, k, v, tensors=tensors)


@pytest.mark.parametrize("name", [n for n, s in SPECS.items() if s.max_logit])
def test_max_logit(name: str) -> None:
    spec, shape = SPECS[name], SHAPES[2]
    module, _ = compile_spec(spec)
    q, k, v = samples.qkv(spec, shape)
    tensors = samples.tensors(spec, shape)
    top = torch.full((shape.batch, shape.heads_q, shape.seqlen_q), torch.nan)
    attngen_call(module, 0, q, k, v, tensors=tuple(tensors.values()), further={"max_logit": top})
    want = dense.attention(spec, q, k, v, None, tensors).max_logit
    assert want is not None and (want == -torch.inf).any()
    torch.testing.assert_close(top.double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", SPECS)
def test_backward(name: str) -> None:
    spec = SPECS[name]
    made = calls.kernels(spec, captured=learned(spec))
    for seed, shape in enumerate(SHAPES):
        calls.verify(made, calls.call(spec, shape, seed=seed, dlse=spec.normalizer == "softmax"), seeds=(seed,))


def test_deterministic() -> None:
    spec = SPECS["headwise"]
    spec = spec.replace(backward=spec.backward.replace(deterministic=True))
    made = calls.kernels(spec, captured=learned(spec))
    calls.verify(made, calls.call(spec, SHAPES[0]))
