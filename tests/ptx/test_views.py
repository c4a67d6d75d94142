"""Kernels on views: q, k and v as slices of one qkv, V as columns of K; gradients written into slices of one tensor."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from backward_calls import call, close, kernels, run
from ptxcheck.compile import compile_spec
from ptxcheck.launch import attngen_call

from attngen.passes.parts import kernel_spec
from attngen.ref.compare import assert_close
from attngen.samples import Shape
from attngen.syntax import load_spec

pytestmark = pytest.mark.dsl
PACKED = load_spec(
    "attn 1\nattention packed {\n  head_dim = 64\n  layout = packed_qkv\n  mask = kv_idx <= q_pos\n"
    "  backward { deterministic = true }\n}\n"
)
VIEW = load_spec("attn 1\nattention latent {\n  head_dim = 96\n  v = k[16:80]\n  mask = kv_idx <= q_pos\n}\n")


def test_packed() -> None:
    """Grouped heads in one tensor; all three gradients in another."""
    spec = kernel_spec(PACKED)
    c = call(spec, Shape(2, 2, 1, 70, 70))
    qkv = torch.cat((c.q, c.k, c.v), 2)
    q, k, v = qkv.split((2, 1, 1), 2)
    module, _ = compile_spec(spec)
    o, lse, report = attngen_call(module, 0, q, k, v)
    assert not report.faults
    assert_close(o, spec, q, k, v, lse=lse)
    made = kernels(spec)
    gradient = torch.full_like(qkv, math.nan)
    run(made, replace(c, q=q, k=k, v=v), outputs=gradient.split((2, 1, 1), 2))
    expected = c.expected(())
    for name, part in zip(("dq", "dk", "dv"), gradient.split((2, 1, 1), 2), strict=True):
        close(name, part, *expected[name])


def test_a_view_of_k() -> None:
    """Both operands from one memory: the second TMA descriptor starts inside the rows of the first."""
    spec = kernel_spec(VIEW)
    c = call(spec, Shape(1, 2, 1, 70, 90))
    v = c.k[..., 16:80]
    exact = replace(c, v=v)
    module, _ = compile_spec(spec)
    o, lse, report = attngen_call(module, 0, c.q, c.k, v)
    assert not report.faults
    assert_close(o, VIEW, c.q, c.k, None, lse=lse)
    exact = replace(exact, o=o, lse=lse)
    found, _ = run(kernels(spec), exact)
    expected = exact.expected(())
    for name in ("dq", "dk", "dv"):
        close(name, found[name], *expected[name])
