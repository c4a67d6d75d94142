"""Chains: kernels that add to what the one before gave mean what the spec does; which calls they serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_jit_several import CACHE, DIFF, NO_SINK, arguments, each

import attngen
from attngen.jit.chained import Chain
from attngen.passes.chained import PRIOR, PRIOR_LSE, chained
from attngen.ref import dense
from attngen.syntax import load_spec

pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")
SIGMOID = NO_SINK.replace("LAYOUT", "LAYOUT\n  normalizer = sigmoid")
THREE = NO_SINK.rstrip().removesuffix("}") + "  segment more {\n    mask = kv_idx < 4 and q_idx % 2 == 0\n  }\n}\n"
SPECS = {"diff": DIFF, "cache": CACHE, "no sink": NO_SINK, "sigmoid": SIGMOID, "three": THREE}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def spec_of(name: str, layout: str = "bshd") -> Any:
    return load_spec(SPECS[name].replace("LAYOUT", f"layout = {layout}"))


def call_of(name: str) -> tuple[Any, Any, Any, dict[str, Any], dict[str, Any]]:
    q, k, v, segments, named = each(
        lambda x: x.detach(), arguments("no sink" if name in ("sigmoid", "three") else name)
    )
    if name == "three":
        segments["more"] = tuple(torch.randn(2, 5, 2, 64).bfloat16() for _ in range(2))
    return q, k, v, segments, named


@pytest.mark.parametrize("name", SPECS)
def test_kernels_in_turn_mean_the_spec(name: str) -> None:
    """Exactly, by the dense meaning of each kernel."""
    spec = spec_of(name)
    q, k, v, segments, named = each(lambda x: x.double(), call_of(name))
    exact = dense.attention(spec, q, k, v, {}, named, segments=segments or None)
    keys = list(zip(k, (v, v), strict=True)) if spec.branches else [(k, v), *segments.values()]
    o = lse = torch.empty(0)
    lses = []
    for i, part in enumerate(chained(spec)):
        given = {**named, PRIOR: o, PRIOR_LSE: lse}
        own = {t.name: given[t.name] for t in part.spec.tensors}
        o, lse, _ = dense.attention(part.spec, q[i] if spec.branches else q, *keys[i], {}, own)
        lses.append(lse)
    assert (o - exact.o).abs().max() < 1e-12
    if spec.normalizer == "softmax":
        found = torch.stack(lses) if spec.branches else lse
        assert torch.equal(found.isinf(), exact.lse.isinf())
        assert torch.where(found.isinf(), 0.0, found - exact.lse).abs().max() < 1e-12


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", SPECS)
def test_calls(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call gives is what it gives by parts put together, within the roundings of either; here by references."""
    attn: Any = attngen.build(spec_of(name, layout))
    swap = (lambda x: x.transpose(1, 2)) if layout == "bhsd" else lambda x: x
    q, k, v, segments, named = call_of(name)
    more = {"segments": each(swap, segments)} if segments else {}
    parted = attn(*each(swap, (q, k, v)), **named, **more, return_lse=True)
    monkeypatch.setattr(Chain, "serves", lambda *_: name != "sigmoid" or not _[-1])
    o, lse = attn(*each(swap, (q, k, v)), **named, **more, return_lse=True)
    assert o.shape == parted[0].shape and o.dtype is parted[0].dtype and lse.shape == parted[1].shape
    assert (o.float() - parted[0].float()).abs().max() < 2e-2
    assert torch.allclose(lse, parted[1], atol=1e-5)
    alone = attn(*each(swap, (q, k, v)), **named, **more)
    assert torch.equal(alone, o) or (name == "sigmoid" and torch.allclose(alone, o, 2**-6, 2**-6))
    given, rows = torch.empty_like(o), torch.empty_like(lse)
    assert attn(*each(swap, (q, k, v)), **named, **more, out=given) is given and torch.equal(given, alone)
    if name != "sigmoid":
        attn(*each(swap, (q, k, v)), **named, **more, lse=rows)
        assert torch.equal(rows, lse)


def test_what_has_no_chain() -> None:
    """An epilogue that reads what is the call's own keys'; names that are taken; one kernel."""
    text = CACHE.replace("LAYOUT", "").replace(
        "  mask  = kv_idx", "  epilogue = o * float(EXTENT)\n  mask  = kv_idx", 1
    )
    assert not chained(load_spec(text.replace("EXTENT", "seqlen_kv")))
    assert not chained(load_spec(text.replace("EXTENT", "q_pos")))
    assert len(chained(load_spec(text.replace("EXTENT", "seqlen_q")))) == 2
    assert not chained(load_spec(CACHE.replace("LAYOUT", "").replace("window", "prior")))
    assert not chained(load_spec("attn 1\nattention a {\n  head_dim = 64\n}\n"))


def test_which_calls_it_serves() -> None:
    """Eager ones of the spec's dtype, without gradients, on a device that its kernels are ready on."""
    chain = attngen.build(spec_of("cache")).chain
    q, k, v, segments, named = call_of("cache")
    calls = attngen.build(spec_of("cache"))._calls(q, k, v, segments)
    assert not chain.serves(calls, named, False)  # CPU tensors run the reference of each part
    for kernel in chain.kernels:
        kernel.launcher.ready[-1] = (None, 1)
    assert chain.serves(calls, named, True)
    learns = {"sinks": named["sinks"].clone().requires_grad_()}
    assert not chain.serves(calls, learns, False)
    with torch.no_grad():
        assert chain.serves(calls, learns, False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not chain.serves(calls, named, False)
    half = attngen.build(spec_of("cache"))._calls(*(x.half() for x in (q, k, v)), segments)
    assert not chain.serves(half, named, False)
