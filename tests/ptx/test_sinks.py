"""Sinks by head, by token and constant, and scores far from 0, on the checker: forward, LSE and gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import backward_calls as calls
import pytest
import torch
from ptxcheck.compile import compile_spec
from ptxcheck.launch import attngen_call
from test_gallery import verify

from attngen import samples
from attngen.ir.spec import AttentionSpec
from attngen.samples import Shape
from attngen.syntax import make_spec

pytestmark = pytest.mark.dsl
CAUSAL = "kv_idx <= q_pos"
HEAD, TOKEN = ("heads_q",), ("heads_q", "seqlen_q")


def sinks(name: str, sink: str, dims: tuple[str, ...], **more: object) -> AttentionSpec:
    tensors = {"sinks": {"dims": dims, "grad": True}} if dims else None
    return make_spec(name, head_dim=64, mask=CAUSAL, sink=sink, tensors=tensors, **more)  # type: ignore[arg-type]


SPECS = {
    s.name: s
    for s in (
        sinks("by_head", "sinks[h]", HEAD),
        sinks("by_token", "sinks[h, q_idx]", TOKEN, layout="bhsd"),
        sinks("constant", "0.0", ()),
        sinks("computed", "2.0 * tanh(sinks[h]) - log(float(q_pos + 31))", HEAD),
    )
}
#: Rows that keep no key: their LSE is the sink.
TALL, SQUARE = Shape(1, 2, 1, 90, 60), Shape(1, 2, 1, 70, 70)


@pytest.mark.parametrize("name", SPECS)
def test_forward(name: str) -> None:
    module, _ = compile_spec(SPECS[name])
    for seed, shape in enumerate((TALL, SQUARE)):
        verify(SPECS[name], module, 0, shape, seed)


@pytest.mark.parametrize("name", SPECS)
def test_backward(name: str) -> None:
    spec = SPECS[name]
    captured = tuple(t.name for t in spec.tensors)
    made = calls.kernels(spec, captured=captured)
    calls.verify(made, calls.call(spec, TALL, seed=1))


@pytest.mark.parametrize("z", [90.0, -90.0, -math.inf])
def test_far_sinks(z: float) -> None:
    """A sink that takes all, one that takes nothing, and one that is not there."""
    spec, shape = SPECS["by_head"], Shape(1, 2, 1, 40, 30)
    given = {"sinks": torch.tensor([z, 0.5])}
    module, _ = compile_spec(spec)
    q, k, v = samples.qkv(spec, shape)
    o, lse, _ = attngen_call(module, 0, q, k, v, tensors=(given["sinks"],))
    made = calls.kernels(spec, captured=("sinks",))
    c = calls.call(spec, shape, tensors=given)
    calls.close("o", o, c.o, 2e-2)
    assert torch.equal(lse.isinf(), c.lse.isinf())
    finite = c.lse.isfinite()
    calls.close("lse", lse[finite], c.lse[finite].double(), 2e-3)
    if z > -math.inf:
        calls.verify(made, c)
    else:  # exp(-inf) has no derivative that autograd takes; the kernel's is 0
        found, _ = calls.run(made, replace(c, dlse=torch.zeros_like(c.dlse)))
        assert (found["extra 0"][:, 0] == 0).all() and not any(found[n].isnan().any() for n in ("dq", "dk", "dv"))


@pytest.mark.parametrize("shift", [100.0, -100.0])
def test_scores_far_from_zero(shift: float) -> None:
    """A constant on every score leaves O and the gradients, and shifts LSE by it."""
    spec = make_spec("shifted", head_dim=64, mask=CAUSAL, score=f"s + {shift}")
    module, _ = compile_spec(spec)
    verify(spec, module, 0, TALL, 3)
    calls.verify(calls.kernels(spec), calls.call(spec, TALL, seed=3))


def test_one_key_and_a_sink() -> None:
    """(a) of closed forms: O = v sigmoid(s - z), LSE = log(e^s + e^z)."""
    spec = SPECS["by_head"]
    module, _ = compile_spec(spec)
    q, k, v = samples.qkv(spec, Shape(1, 2, 1, 1, 1))
    z = torch.tensor([0.3, -1.0])
    o, lse, _ = attngen_call(module, 0, q, k, v, tensors=(z,))
    s = (q.double() * k.double()).sum(-1)[0, 0] / 8
    torch.testing.assert_close(lse[0, :, 0].double(), torch.logaddexp(s, z.double()), rtol=1e-5, atol=1e-5)
    want = torch.sigmoid(s - z)[:, None] * v[0, 0].double()
    torch.testing.assert_close(o[0, 0].double(), want, rtol=1e-2, atol=1e-2)
