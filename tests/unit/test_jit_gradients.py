"""Differentiable calls on CPU tensors: gradients against float64 autograd of the dense meaning; autograd's manners."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import attngen
from attngen import samples
from attngen.diag.diagnostic import AttnError
from attngen.ir.types import DType, Layout
from attngen.jit.kernel import Attention
from attngen.ref import dense

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BF16 = torch.bfloat16
DTYPE = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16}
pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")
SINKS = """attn 1
attention sinks {
  head_dim = 64
  param window: int >= 1 = 9
  param gain: float = 1.0
  tensor sinks: f32[heads_q] grad
  tensor bias: f32[heads_q, seqlen_q, seqlen_kv] grad
  tensor fixed: f32[heads_q]
  score = s * gain + bias[h, q_idx, kv_idx] + fixed[h]
  mask  = kv_idx <= q_pos and q_pos - kv_idx < window
  sink  = sinks[h]
}
"""


@pytest.fixture(scope="module")
def plain() -> Attention:
    return attngen.build("attn 1\nattention plain {\n  head_dim = 64\n  mask = kv_idx <= q_pos\n}\n")


@pytest.fixture(scope="module")
def rich() -> Attention:
    return attngen.build(SINKS)


def qkv(b: int = 2, sq: int = 17, hq: int = 4, skv: int = 25, hkv: int = 2, d: int = 64, dtype: Any = BF16) -> Any:
    g = torch.Generator().manual_seed(0)
    shapes = ((sq, hq), (skv, hkv), (skv, hkv))
    return [torch.randn(b, s, h, d, generator=g).to(dtype).requires_grad_() for s, h in shapes]


def captured(sq: int = 17, skv: int = 25) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "sinks": torch.randn(4, generator=g).requires_grad_(),
        "bias": torch.randn(4, sq, skv, generator=g).requires_grad_(),
        "fixed": torch.randn(4, generator=g),
    }


def loss(o: Any, lse: Any = None) -> Any:
    weight = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape)
    total = (o.double() * weight).sum()
    return total if lse is None else total + torch.where(lse.isfinite(), lse, 0.0).double().sin().sum()


def exact(spec: Any, qkv: Any, params: dict[str, Any], tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients of `loss` by float64 autograd of the dense meaning."""
    leaves = [x.detach().double().requires_grad_() for x in qkv]
    wide = {n: x.detach().double().requires_grad_() if x.requires_grad else x.detach() for n, x in tensors.items()}
    swap = spec.layout is Layout.BHSD
    r = dense.attention(spec, *(x.transpose(1, 2) if swap else x for x in leaves), params, wide)
    loss(r.o.transpose(1, 2) if swap else r.o, r.lse).backward()
    return {
        **dict(zip("qkv", (x.grad for x in leaves), strict=True)),
        **{n: x.grad for n, x in wide.items() if x.requires_grad},
    }


def close(got: Any, want: Any) -> bool:
    """Within the roundings of o, and of the gradient, to 16 bits."""
    top = float(want.abs().max()) or 1.0
    return bool((got.double() - want).abs().max() <= 2e-2 * top)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.attn")), ids=lambda p: p.stem)
def test_every_example(path: Path) -> None:
    attn = attngen.build(path)
    spec = attn.spec
    shape = samples.Shape(batch=2, heads_q=4, heads_kv=2, seqlen_q=19, seqlen_kv=27)
    params = samples.params(spec)
    tensors = samples.tensors(spec, shape, seed=3)
    for t in spec.tensors:
        tensors[t.name].requires_grad_(t.grad)
    x = qkv(sq=19, skv=27, d=spec.head_dim_qk, dtype=DTYPE[spec.dtype])
    x[2] = torch.randn(2, 27, 2, spec.head_dim_v).to(x[0].dtype).requires_grad_()
    if spec.layout is Layout.BHSD:
        x = [t.detach().transpose(1, 2).requires_grad_() for t in x]
    loss(*attn(*x, **params, **tensors, return_lse=True)).backward()
    want = exact(spec, x, params, tensors)
    got = {**dict(zip("qkv", x, strict=True)), **{n: t for n, t in tensors.items() if t.requires_grad}}
    for name, t in got.items():
        assert t.grad.shape == t.shape and t.grad.dtype is t.dtype and close(t.grad, want[name]), name


def test_o_alone_and_lse_alone(rich: Attention) -> None:
    for which in (0, 1):
        x, named = qkv(), captured()
        got = rich(*x, **named, return_lse=True)[which]
        got.double().sin().sum().backward()
        leaves = [t.detach().double().requires_grad_() for t in x]
        wide = {n: t.detach().double() for n, t in named.items()}
        dense.attention(rich.spec, *leaves, {}, wide)[which].sin().sum().backward()
        for mine, theirs in zip(x, leaves, strict=True):
            if theirs.grad is None:
                assert not mine.grad.any(), "v does not move the LSE"
            else:
                assert close(mine.grad, theirs.grad)


def test_only_a_captured_tensor(rich: Attention) -> None:
    x, named = [t.detach() for t in qkv()], captured()
    named["bias"].requires_grad_(False)
    o = rich(*x, **named)
    assert o.requires_grad
    loss(o).backward()
    assert named["sinks"].grad.any() and named["bias"].grad is None and x[0].grad is None


def test_a_lost_gradient_is_refused(rich: Attention) -> None:
    """Also beside gradients that are not lost."""
    x, named = qkv(), captured()
    named["fixed"].requires_grad_()
    with pytest.raises(AttnError, match="`fixed` requires gradients, and `sinks` does not declare it `grad`") as caught:
        rich(*x, **named)
    assert caught.value.code == "E0611"
    with torch.no_grad():
        rich(*x, **named)


def test_broadcast_and_expanded_tensors(rich: Attention) -> None:
    """Extent-1 axes are summed by the call; axes that torch expanded, by torch."""
    x, named = qkv(), captured()
    one = named["bias"].detach()[:1].clone().requires_grad_()
    for given in (one, one.expand(4, -1, -1)):
        one.grad = None
        loss(rich(*x, **{**named, "bias": given})).backward()
        wide = {**named, "bias": one.detach().expand(4, -1, -1).clone().requires_grad_()}
        loss(rich(*x, **wide)).backward()
        assert one.grad.shape == (1, 17, 25)
        assert torch.allclose(one.grad, wide["bias"].grad.sum(0, keepdim=True), rtol=1e-3, atol=1e-3)


def test_expanded_keys(plain: Attention) -> None:
    q, k, v = qkv()
    one_k, one_v = (t.detach()[:, :, :1].clone().requires_grad_() for t in (k, v))
    loss(plain(q, one_k.expand(-1, -1, 2, -1), one_v.expand(-1, -1, 2, -1))).backward()
    want, q.grad = q.grad, None
    k2, v2 = (t.detach().expand(-1, -1, 2, -1).clone().requires_grad_() for t in (one_k, one_v))
    loss(plain(q, k2, v2)).backward()
    assert torch.equal(q.grad, want)
    for one, two in ((one_k, k2), (one_v, v2)):
        assert close(one.grad, two.grad.double().sum(2, keepdim=True))


@pytest.mark.parametrize("empty", [{"sq": 0}, {"b": 0}, {"skv": 0}, {"hq": 0, "hkv": 0}])
def test_empty_shapes(plain: Attention, empty: dict[str, int]) -> None:
    x = qkv(**empty)
    plain(*x).sum().backward()
    assert all(t.grad.shape == t.shape and not t.grad.any() for t in x)


# -- autograd ----------------------------------------------------------------------------------------------------------


def test_autograd_grad_retain_graph_and_double_use(plain: Attention) -> None:
    q, k, v = qkv()
    o = plain(q, k, v)
    (first,) = torch.autograd.grad(loss(o), q, retain_graph=True)
    (second,) = torch.autograd.grad(loss(o), q, retain_graph=True)
    assert torch.equal(first, second) and q.grad is None
    (loss(o) + loss(o)).backward()
    assert close(q.grad, 2 * first.double())
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss(o).backward()


def test_two_calls_accumulate(plain: Attention) -> None:
    q, k, v = qkv()
    loss(plain(q, k, v)).backward()
    once = k.grad.clone()
    loss(plain(q, k, v)).backward()
    assert torch.equal(k.grad, once + once)


def test_one_tensor_in_several_roles(plain: Attention) -> None:
    x = torch.randn(1, 9, 2, 64).to(BF16).requires_grad_()
    loss(plain(x, x, x)).backward()
    q, k, v = (x.detach().clone().requires_grad_() for _ in range(3))
    loss(plain(q, k, v)).backward()
    assert close(x.grad, q.grad.double() + k.grad.double() + v.grad.double())


def test_hooks(plain: Attention) -> None:
    q, k, v = qkv()
    seen = []
    o = plain(q, k, v)
    o.register_hook(lambda g: seen.append(g.shape) or g * 2)
    k.register_hook(lambda g: g * 0 + 1)
    loss(o).backward()
    want, q.grad = q.grad, None
    loss(plain(q, k, v)).backward()
    assert seen == [o.shape] and close(want, 2 * q.grad.double())
    assert (k.grad - 2).abs().max() == 0


def test_saved_tensors(plain: Attention, rich: Attention) -> None:
    """q, k, v, o, lse and captured tensors, nothing of the size of the scores; all of them visible to hooks."""
    x, named = qkv(), captured()
    seen: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t.clone(), lambda t: t):
        o, lse = rich(*x, **named, return_lse=True)
    want = [*x, o, lse, named["sinks"], named["bias"], named["fixed"]]
    assert [t.data_ptr() for t in seen] == [t.data_ptr() for t in want]
    loss(o, lse).backward()
    assert x[0].grad.any()


@pytest.mark.parametrize("name", ["q", "v", "o", "fixed", "sinks"])
def test_saved_tensors_that_are_written_over(rich: Attention, name: str) -> None:
    x, named = qkv(), captured()
    everything = {**dict(zip("qkv", x, strict=True)), **named}
    leaf = {n: t * 1 for n, t in everything.items()}
    o = rich(**leaf)
    target = o if name == "o" else leaf[name]
    with torch.no_grad():
        target.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss(o).backward()


def test_nothing_is_kept_alive(plain: Attention) -> None:
    q, k, v = qkv()
    o = plain(q, k, v)
    kept = [weakref.ref(x) for x in (q, o)]
    loss(o).backward()
    del q, o
    gc.collect()
    assert [r() for r in kept] == [None, None]


def test_second_derivatives_are_refused(rich: Attention) -> None:
    """By an error of ours, where it happens: in the second backward."""
    x, named = qkv(), captured()
    o, lse = rich(*x, **named, return_lse=True)
    grads = torch.autograd.grad(loss(o, lse), [*x, named["sinks"]], create_graph=True)
    assert all(g.requires_grad for g in grads)
    for g in grads:
        with pytest.raises(AttnError, match="no second derivative") as caught:
            g.double().pow(2).sum().backward(retain_graph=True)
        assert caught.value.code == "E0620"
    plainly = torch.autograd.grad(loss(*rich(*x, **named, return_lse=True)), [*x, named["sinks"]])
    assert all(torch.equal(a, b) for a, b in zip(grads, plainly, strict=True))


def test_create_graph_beside_something_else(plain: Attention) -> None:
    """create_graph=True is harmless where the second derivative does not go through attention."""
    q, k, v = qkv()
    x = torch.randn(3, requires_grad=True)
    g_x, _ = torch.autograd.grad(loss(plain(q, k, v)) + x.pow(3).sum(), (x, q), create_graph=True)
    g_x.sum().backward()
    assert torch.allclose(x.grad, 6 * x.detach())


def test_anomaly_mode_and_threads(plain: Attention) -> None:
    import threading

    q, k, v = qkv()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            loss(plain(q, k, v)).backward()
    want, got = q.grad, []

    def work() -> None:
        x = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        loss(plain(*x)).backward()
        got.append(x[0].grad)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(got) == 3 and all(torch.equal(g, want) for g in got)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(rich: Attention, reentrant: bool) -> None:
    """Recomputation gives equal bits."""
    x, named = qkv(), captured()
    loss(*rich(*x, **named, return_lse=True)).backward()
    want = [t.grad for t in (*x, named["sinks"], named["bias"])]
    y, fresh = qkv(), captured()
    seen: list[Any] = []

    def layer(q: Any, k: Any, v: Any) -> Any:
        o, lse = rich(q, k, v, **fresh, return_lse=True)
        seen.append(o.detach().clone())
        return o, lse

    with set_checkpoint_early_stop(False):  # so that the recomputation comes to its end, for the comparison
        loss(*checkpoint(layer, *y, use_reentrant=reentrant)).backward()
    assert len(seen) == 2 and torch.equal(*seen)
    assert all(torch.equal(a, t.grad) for a, t in zip(want, (*y, fresh["sinks"], fresh["bias"]), strict=True))


def test_selective_checkpointing(plain: Attention) -> None:
    """The policy sees one operator, and may keep its results: the backward does not run attention again."""
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    x = qkv()
    loss(plain(*x)).backward()
    names: list[str] = []

    def policy(ctx: Any, op: Any, *args: Any, **keywords: Any) -> Any:
        names.append(str(op))
        kept = op is torch.ops.attngen.forward.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    y = qkv()
    contexts = partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(lambda *t: plain(*t) * 1, *y, use_reentrant=False, context_fn=contexts)
    loss(out).backward()
    assert "attngen.forward.default" in names
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(x, y, strict=True))


def test_autocast(plain: Attention) -> None:
    """q, k, v are converted; gradients have the inputs' dtypes."""
    q, k, v = qkv(dtype=torch.float32)
    k = k.detach().to(BF16).requires_grad_()
    with torch.autocast("cpu", dtype=BF16):
        o, lse = plain(q, k, v, return_lse=True)
        loss(o, lse).backward()
    assert o.dtype is BF16 and q.grad.dtype is v.grad.dtype is torch.float32 and k.grad.dtype is BF16
    want = exact(plain.spec, [t.to(BF16) for t in (q, k, v)], {}, {})
    assert all(close(t.grad, want[n]) for n, t in zip("qkv", (q, k, v), strict=True))


def test_the_other_dtype(plain: Attention) -> None:
    x = qkv(dtype=torch.float16)
    loss(*plain(*x, return_lse=True)).backward()
    want = exact(plain.spec, x, {}, {})
    assert all(t.grad.dtype is torch.float16 and close(t.grad, want[n]) for n, t in zip("qkv", x, strict=True))


def test_modes_without_gradients(plain: Attention) -> None:
    q, k, v = qkv()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            o, lse = plain(q, k, v, return_lse=True)
            assert not o.requires_grad and not lse.requires_grad
            plain(q, k, v, out=torch.empty_like(q))


def test_scale_and_params_reach_the_backward(rich: Attention) -> None:
    x, named = qkv(), captured()
    loss(*rich(*x, **named, window=3, gain=0.5, scale=0.3, return_lse=True)).backward()
    leaves = [t.detach().double().requires_grad_() for t in x]
    wide = {n: t.detach().double() for n, t in named.items()}
    r = dense.attention(rich.spec, *leaves, {"window": 3, "gain": 0.5}, wide, 0.3)
    loss(r.o, r.lse).backward()
    assert all(close(a.grad, b.grad) for a, b in zip(x, leaves, strict=True))


def test_check_with_gradients(rich: Attention) -> None:
    x, named = qkv(), captured()
    loss(rich(*x, **named, check=True)).backward()
    assert x[0].grad.any()
    with torch.no_grad():
        x[1][0, 3] = float("nan")
    with pytest.raises(AttnError, match="`k` holds"):
        rich(*x, **named, check=True)


def test_bad_arguments_are_explained_with_gradients_too(rich: Attention) -> None:
    x, named = qkv(), captured()
    for given, code in (
        ({**named, "bias": None}, "E0602"),
        ({**named, "bias": 3.0}, "E0604"),
        ({**named, "window": 0}, "E0603"),
        ({**named, "colour": 1}, "E0601"),
        ({**named, "sinks": torch.zeros(7, requires_grad=True)}, "E0607"),
    ):
        with pytest.raises(AttnError) as caught:
            rich(*x, **given)
        assert caught.value.code == code
    with pytest.raises(AttnError) as caught:
        rich(x[0], [1], x[2], **named)
    assert caught.value.code == "E0604"


def test_parameters_of_a_module(rich: Attention) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinks = torch.nn.Parameter(torch.zeros(4))
            self.k = torch.nn.Parameter(qkv()[1].detach())

        def forward(self, q: Any, v: Any) -> Any:
            rest = {n: t.detach() for n, t in captured().items() if n != "sinks"}
            return rich(q, self.k, v, sinks=self.sinks, **rest)

    layer = Layer()
    q, _, v = qkv()
    loss(layer(q.detach(), v.detach())).backward()
    assert layer.sinks.grad.any() and layer.k.grad.any()


def test_functorch_is_refused(plain: Attention) -> None:
    q, k, v = (t.detach() for t in qkv())
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(AttnError, match=r"torch\.func") as caught:
            transform(lambda t: plain(t, k, v).sum())(q)
        assert caught.value.code == "E0612"


def test_forward_mode_and_batched_gradients_are_refused(plain: Attention) -> None:
    """On a GPU a tangent would be dropped in silence."""
    import torch.autograd.forward_ad as forward_ad

    q, k, v = qkv()
    with forward_ad.dual_level():
        for given in ((q, k, v), [t.detach() for t in (q, k, v)]):
            for i in range(3):
                x = [forward_ad.make_dual(t, torch.ones_like(t)) if i == j else t for j, t in enumerate(given)]
                with pytest.raises(AttnError, match="forward-mode") as caught:
                    plain(*x)
                assert caught.value.code == "E0612"
        plain(q, k, v)
    o = plain(q, k, v)
    with pytest.raises(AttnError, match="one result at a time") as caught:
        torch.autograd.grad(o, q, torch.stack([torch.ones_like(o)] * 2), is_grads_batched=True)
    assert caught.value.code == "E0612"
