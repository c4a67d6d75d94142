"""Gradients under torch.compile and through the operators themselves, on CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from large import TOO_LARGE, large
from test_jit_gradients import SINKS, captured, close, exact, loss, qkv
from torch.utils.checkpoint import checkpoint

import attngen
from attngen.diag.diagnostic import AttnError
from attngen.jit.kernel import Attention

BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def rich() -> Attention:
    return attngen.build(SINKS)


@pytest.fixture(scope="module")
def bhsd() -> Attention:
    return attngen.build("attn 1\nattention bhsd {\n  head_dim = 64\n  layout = bhsd\n}\n")


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()


def eager(attn: Attention, x: Any, named: Any, **more: Any) -> dict[str, Any]:
    """Gradients of `loss` of an eager call."""
    y = [t.detach().clone().requires_grad_(t.requires_grad) for t in x]
    fresh = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in named.items()}
    loss(*attn(*y, **fresh, **more, return_lse=True)).backward()
    return {n: t.grad for n, t in {**dict(zip("qkv", y, strict=True)), **fresh}.items()}


def same(x: Any, named: Any, want: dict[str, Any]) -> bool:
    """Equal bits, and nothing where eager gives nothing."""
    got = {**dict(zip("qkv", x, strict=True)), **named}
    return all(
        (t.grad is None and want[n] is None) or (t.grad is not None and torch.equal(t.grad, want[n]))
        for n, t in got.items()
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph(rich: Attention, dynamic: bool) -> None:
    def layer(q: Any, k: Any, v: Any, named: Any, window: int) -> Any:
        return loss(*rich(q, k, v, **named, window=window, return_lse=True))

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for sq, skv, window in ((17, 25, 9), (20, 33, 4), (31, 31, 40)):
        x, named = qkv(sq=sq, skv=skv), captured(sq, skv)
        compiled(*x, named, window).backward()
        assert same(x, named, eager(rich, x, named, window=window)), (sq, skv)


def test_only_what_is_wanted(rich: Attention) -> None:
    for frozen in (("q",), ("k", "v", "bias"), ("q", "k", "v", "sinks")):
        torch._dynamo.reset()
        x, named = qkv(), captured()
        for name, t in {**dict(zip("qkv", x, strict=True)), **named}.items():
            t.requires_grad_(t.requires_grad and name not in frozen)
        seen: list[Any] = []

        def backend(graph: Any, inputs: Any, seen: Any = seen) -> Any:
            from functorch.compile import make_boxed_func
            from torch._dynamo.backends.common import aot_autograd

            def keep(g: Any, _: Any) -> Any:
                seen.extend(n for n in g.graph.nodes if "attngen.backward" in str(n.target))
                return make_boxed_func(g.forward)

            return aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph, inputs)

        def call(*t: Any, named: Any = named) -> Any:
            return rich(*t, **named, return_lse=True)

        out = torch.compile(call, fullgraph=True, backend=backend)(*x)
        loss(*out).backward()
        assert same(x, named, eager(rich, x, named))
        (node,) = seen
        assert list(node.args[12]) == [n not in frozen for n in ("q", "k", "v", "sinks", "bias")]


def test_inductor(bhsd: Attention) -> None:
    """Layouts inside a compiled model: packed projections, transposed heads, a residual."""

    def layer(x: Any, w: Any) -> Any:
        q, k, v = ((x @ w).view(2, 24, 8, 64).split([4, 2, 2], 2)[i].transpose(1, 2) for i in range(3))
        o, lse = bhsd(q, k, v, return_lse=True)
        return (o.transpose(1, 2).reshape(2, 24, 256) * 1.5).float().pow(2).mean() + lse.mean()

    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 24, 96, generator=g).to(BF16), torch.randn(96, 512, generator=g).to(BF16) * 0.1
    a, b = ([t.clone().requires_grad_() for t in (x, w)] for _ in range(2))
    torch.compile(layer, fullgraph=True)(*a).backward()
    layer(*b).backward()
    assert all(close(s.grad, t.grad.double()) for s, t in zip(a, b, strict=True))


def test_autocast(bhsd: Attention) -> None:
    def layer(q: Any, k: Any, v: Any) -> Any:
        return loss(*bhsd(q, k, v, return_lse=True))

    x = [t.detach().transpose(1, 2).requires_grad_() for t in qkv(dtype=torch.float32)]
    with torch.autocast("cpu", dtype=BF16):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(*x).backward()
    assert all(t.grad.dtype is torch.float32 for t in x)
    want = exact(bhsd.spec, [t.to(BF16) for t in x], {}, {})
    assert all(close(t.grad, want[n]) for n, t in zip("qkv", x, strict=True))


def test_the_other_dtype() -> None:
    attn = attngen.build("attn 1\nattention twin {\n  head_dim = 64\n}\n")
    x, y = qkv(dtype=torch.float16), qkv(dtype=torch.float16)
    torch.compile(lambda *t: loss(*attn(*t, return_lse=True)), fullgraph=True, backend="aot_eager")(*x).backward()
    loss(*attn(*y, return_lse=True)).backward()
    assert all(a.grad.dtype is torch.float16 and torch.equal(a.grad, b.grad) for a, b in zip(x, y, strict=True))


def test_checkpointing_inside_and_around(rich: Attention) -> None:
    named = captured()

    def layer(q: Any, k: Any, v: Any) -> Any:
        return rich(q * 1.0, k, v, **named)

    def step(q: Any, k: Any, v: Any) -> Any:
        return loss(checkpoint(layer, q, k, v, use_reentrant=False))

    want = qkv()
    step(*want).backward()
    for call in (
        torch.compile(step, fullgraph=True, backend="aot_eager"),
        lambda *x: loss(checkpoint(torch.compile(layer, backend="aot_eager"), *x, use_reentrant=False)),
    ):
        x = qkv()
        call(*x).backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(x, want, strict=True))


def test_a_graph_break_on_the_way(bhsd: Attention) -> None:
    def layer(q: Any, k: Any, v: Any) -> Any:
        q = q * 2
        torch._dynamo.graph_break()
        return loss(bhsd(q, k, v))

    x = [t.detach().transpose(1, 2).requires_grad_() for t in qkv()]
    torch.compile(layer, backend="aot_eager")(*x).backward()
    got = [t.grad for t in x]
    y = [t.detach().clone().requires_grad_() for t in x]
    loss(bhsd(y[0] * 2, y[1], y[2])).backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(got, y, strict=True))


def test_faults_keep_their_words(rich: Attention) -> None:
    x, named = qkv(), captured()
    named["fixed"].requires_grad_()
    compiled = torch.compile(lambda *t, **n: rich(*t, **n), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="`fixed` requires gradients"):
        compiled(*x, **named)
    torch._dynamo.reset()
    with pytest.raises(AttnError, match="`fixed` requires gradients"):
        torch.compile(lambda *t, **n: rich(*t, **n), backend="aot_eager")(*x, **named)
    torch._dynamo.reset()
    named["fixed"].requires_grad_(False)
    with pytest.raises(Exception, match="E0619"):
        compiled(*x, **named, out=torch.empty_like(x[0]))


# -- the operators -----------------------------------------------------------------------------------------------------


def arguments(rich: Attention) -> tuple[Any, ...]:
    x, named = qkv(), captured()
    tensors = [named[t.name] for t in rich.spec.tensors]
    return (rich.handle, *x, tensors, [9], [1.0], None)


def test_opcheck(rich: Attention, bhsd: Attention) -> None:
    args = arguments(rich)
    torch.library.opcheck(torch.ops.attngen.forward.default, args)
    plain = [t.detach().transpose(1, 2).requires_grad_() for t in qkv()]
    torch.library.opcheck(torch.ops.attngen.forward.default, (bhsd.handle, *plain, [], [], [], None))
    handle, q, k, v, tensors, ints, floats, scale = args
    o, lse = rich(q, k, v, **dict(zip(("sinks", "bias", "fixed"), tensors, strict=True)), return_lse=True)
    rest = ([t.detach() for t in tensors], ints, floats, scale)
    flat = [t.detach() for t in (q, k, v, o, lse)]
    for do, dlse, wanted in (
        (torch.randn(o.shape).to(BF16), torch.randn(lse.shape), [True] * 5),
        (torch.ones(()).to(BF16).expand(o.shape), None, [True, False, False, False, True]),
        (None, torch.randn(lse.shape), [False, True, True, True, False]),
    ):
        torch.library.opcheck(torch.ops.attngen.backward.default, (handle, *flat, do, dlse, *rest, wanted))


def test_the_operator_differentiates(rich: Attention) -> None:
    args = arguments(rich)
    loss(*torch.ops.attngen.forward(*args)).backward()
    named = dict(zip(("sinks", "bias", "fixed"), args[4], strict=True))
    assert same(args[1:4], named, eager(rich, args[1:4], named))
    with torch.no_grad():
        assert not torch.ops.attngen.forward(*args)[0].requires_grad
    o, lse = torch.ops.attngen.forward(*args)
    for result in (o, lse):
        args[1].grad = None
        result.double().sum().backward(retain_graph=True)
        assert args[1].grad is not None
    out = torch.empty_like(o.detach())
    with pytest.raises(AttnError) as caught:
        torch.ops.attngen.forward_out(*args, out, lse.detach().clone())
    assert caught.value.code == "E0619"
    args[4][2].requires_grad_()
    with pytest.raises(AttnError) as caught:
        torch.ops.attngen.forward(*args)
    assert caught.value.code == "E0611"


def test_the_operator_has_no_second_derivative(rich: Attention) -> None:
    args = arguments(rich)
    (g,) = torch.autograd.grad(loss(*torch.ops.attngen.forward(*args)), args[1], create_graph=True)
    with pytest.raises(AttnError) as caught:
        g.double().pow(2).sum().backward()
    assert caught.value.code == "E0620"


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_fake_gradients_have_the_strides_of_real_ones(rich: Attention, bhsd: Attention, layout: str) -> None:
    """Dense inputs in any order of axes, slices of a packed tensor, expanded heads."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    attn = rich if layout == "bshd" else bhsd
    q, k, v = (t.detach() for t in qkv(skv=17))
    packed = torch.cat([q, k, v], 2)
    families = {
        "contiguous": (q, k, v),
        "swapped": tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)),
        "packed": packed.split([4, 2, 2], 2),
        "expanded": (q[:1].expand_as(q), k[:, :, :1].expand_as(k), v),
    }
    for name, x in families.items():
        x = [t if layout == "bshd" else t.transpose(1, 2) for t in x]
        tensors = [t.detach() for t in captured(skv=17).values()] if attn is rich else []
        numbers = ([9], [1.0]) if attn is rich else ([], [])
        wanted = [True] * len(attn.backward.names)

        def run(args: Any, attn: Any = attn, numbers: Any = numbers, wanted: Any = wanted) -> Any:
            *x, tensors = args
            o, lse = torch.ops.attngen.forward(attn.handle, *x, tensors, *numbers, None)
            return torch.ops.attngen.backward(attn.handle, *x, o, lse, o, None, tensors, *numbers, None, wanted)

        real = run((*x, tensors))
        with FakeTensorMode() as mode:
            fake = run((*(mode.from_tensor(t) for t in x), [mode.from_tensor(t) for t in tensors]))
        assert [(r.shape, r.stride(), r.dtype) for r in real] == [(f.shape, f.stride(), f.dtype) for f in fake], name


def test_a_spec_that_no_backward_serves_is_refused_while_tracing() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    attn = attngen.build(large())
    with FakeTensorMode():
        x = [torch.empty(1, 8, 2, 64, dtype=BF16, device="cuda") for _ in range(3)]
        rows, gate = torch.empty(1, 2, 8, device="cuda"), torch.empty(512, 2, device="cuda")
        rest = ([gate], [], [], None)
        assert torch.ops.attngen.forward(attn.handle, *x, *rest)[0].shape == x[0].shape
        with pytest.raises(AttnError, match=TOO_LARGE) as caught:
            torch.ops.attngen.backward(attn.handle, *x, x[0], rows, x[0], None, *rest, [True] * 4)
    assert caught.value.code == "E0402"
