"""Packed qkv, V as a view of K, branches, segments and lists of keys on the GPU: values, gradients, no wait, graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import EXAMPLES, no_waits, replayed

import attngen
from attngen import samples
from attngen.ir.spec import AttentionSpec
from attngen.ref import dense
from attngen.samples import Shape
from attngen.syntax import load_spec

BF16 = torch.bfloat16
SHAPE = Shape(2, 4, 2, 333, 333)
HEAD = "attn 1\nattention one {\n  head_dim = 64\n  mask = kv_idx <= q_pos\n"
PLAIN = HEAD + "}\n"
ORDERED = "  backward { deterministic = true }\n"
PACKED = HEAD + "  layout = packed_qkv\n" + ORDERED + "}\n"
VIEW = HEAD.replace("64", "192") + "  v = k[0:128]\n" + ORDERED + "}\n"


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=g, device="cuda").to(BF16).requires_grad_()


def loss(o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Gradients that differ everywhere."""
    g = torch.Generator(device="cuda").manual_seed(9)
    do = torch.randn(o.shape, generator=g, device="cuda").to(BF16).to(o.dtype)
    dlse = torch.randn(lse.shape, generator=g, device="cuda").to(lse.dtype)
    return (o * do).sum(dtype=torch.float64) + (lse.masked_fill(lse.isinf(), 0.0) * dlse).sum(dtype=torch.float64)


def agree(results: Any, leaves: list[torch.Tensor], meaning: Callable[[Any, list[torch.Tensor]], Any]) -> None:
    """O and every gradient by the error rule: twice what torch errs in the same dtype, and two ulps."""
    o, lse = results
    found = [o, *torch.autograd.grad(loss(o, lse), leaves)]
    wide: list[list[torch.Tensor]] = []
    for dtype, function in ((torch.float64, dense.attention), (BF16, dense.same_dtype)):
        cast = [x.detach().to(dtype if x.dtype is BF16 else torch.promote_types(dtype, torch.float32)) for x in leaves]
        cast = [x.requires_grad_() for x in cast]
        out = meaning(function, cast)
        wide.append([out.o, *torch.autograd.grad(loss(out.o, out.lse), cast)])
    for got, exact, plain in zip(found, *wide, strict=True):
        ulp = torch.finfo(got.dtype).eps * float(exact.abs().max())
        allowed = 2 * float((plain.double() - exact).abs().max()) + 2 * ulp
        assert not got.isnan().any() and float((got.double() - exact).abs().max()) <= allowed


@pytest.mark.parametrize("grouped", [False, True])
def test_packed(grouped: bool) -> None:
    """The kernel writes dq, dk and dv into one gradient: the same bits as those of a call on three tensors."""
    attn, plain = attngen.build(PACKED), attngen.build(HEAD + ORDERED + "}\n")
    qkv = random(2, 333, 8, 64) if grouped else random(2, 333, 3, 4, 64)
    heads = {"heads_q": 4} if grouped else {}

    def parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.split((4, 2, 2), 2)) if grouped else tuple(x.unbind(2))

    agree(attn(qkv, **heads, return_lse=True), [qkv], lambda f, x: f(plain.spec, *parts(x[0])))
    (whole,) = torch.autograd.grad(loss(*attn(qkv, **heads, return_lse=True)), qkv)
    three = [x.detach().clone().requires_grad_() for x in parts(qkv)]
    apart = torch.autograd.grad(loss(*plain(*three, return_lse=True)), three)
    assert whole.is_contiguous() and all(torch.equal(a, b) for a, b in zip(parts(whole), apart, strict=True))


def test_a_view_of_k() -> None:
    attn = attngen.build(VIEW)
    q, k = random(2, 200, 4, 192), random(2, 333, 2, 192, seed=1)
    agree(attn(q, k, return_lse=True), [q, k], lambda f, x: f(attn.spec, *x, None))


@pytest.mark.parametrize("name", ["diffllama", "cascade"])
def test_examples(name: str) -> None:
    spec = load_spec(EXAMPLES / "calls" / f"{name}.attn")
    attn = attngen.build(spec)
    q, k, v = samples.qkv(spec, SHAPE, device="cuda")
    segments = samples.segments(spec, SHAPE, device="cuda") if spec.segments else {}
    tensors = {n: x.cuda() for n, x in samples.tensors(spec, SHAPE).items()}
    several = [*q, *k] if spec.branches else [q, k]
    leaves = [x.requires_grad_() for x in (*several, v, *(x for pair in segments.values() for x in pair))]
    leaves += [x.requires_grad_() for x in tensors.values()]

    def call(f: Any, x: list[torch.Tensor], **keywords: Any) -> Any:
        left = iter(x)
        qs, ks = (tuple(next(left) for _ in spec.branches) or next(left) for _ in "qk")
        vs = next(left)
        more = {n: (next(left), next(left)) for n in segments}
        named = {n: next(left) for n in tensors}
        if f is attn:
            return f(qs, ks, vs, **({"segments": more} if more else {}), **named, **keywords)
        return f(spec, qs, ks, vs, {}, named, segments=more or None)

    agree(call(attn, leaves, return_lse=True), leaves, call)
    alone = [x.detach() for x in leaves]  # by kernels that add to each other's O
    o, lse = call(attn, alone, return_lse=True)
    exact, plain = (
        call(how, [x.to(kind if x.dtype is BF16 else torch.promote_types(kind, torch.float32)) for x in alone])
        for kind, how in ((torch.float64, dense.attention), (BF16, dense.same_dtype))
    )
    allowed = 2 * (plain.o.double() - exact.o).abs().max() + 2 * torch.finfo(o.dtype).eps * exact.o.abs().max()
    assert (o.double() - exact.o).abs().max() <= allowed and torch.equal(lse.isinf(), exact.lse.isinf())
    assert (lse.double() - exact.lse).masked_fill(lse.isinf(), 0.0).abs().max() < 2e-3


@pytest.mark.parametrize(("q", "kv"), [(64, 1), (128, 1), (1, 16), (1, 1)])
def test_lists(q: int, kv: int) -> None:
    attn, mapped, lists, seen = listed(q, kv)
    leaves = [random(2, n, h, 64, seed=n + h) for n, h in ((200, 4), (333, 2), (333, 2))]
    leaves[2] = random(2, 333, 2, 64, seed=5)
    agree(
        attn(*leaves, blocks=lists, return_lse=True), leaves, lambda f, x: f(mapped, *x, tensors={"seen": seen.cuda()})
    )


def test_lists_beside_a_segment() -> None:
    """Lists are of the call's own keys; what the gather gives back and the segment's gradients meet in dQ."""
    attn, mapped, lists, seen = listed(64, 1, "  segment past { }\n")
    leaves = [random(2, n, h, 64, seed=i) for i, (n, h) in enumerate(((200, 4), (333, 2), (333, 2), (70, 2), (70, 2)))]
    q, k, v, *past = leaves
    agree(
        attn(q, k, v, blocks=lists, segments={"past": tuple(past)}, return_lse=True),
        leaves,
        lambda f, x: f(mapped, *x[:3], tensors={"seen": seen.cuda()}, segments={"past": (x[3], x[4])}),
    )


def listed(q: int, kv: int, more: str = "") -> tuple[Any, AttentionSpec, torch.Tensor, torch.Tensor]:
    """The callable on lists, its meaning by a map, and both of 200 rows and 333 keys."""
    attn = attngen.build(HEAD + f"  block_sparse {{ q = {q}, kv = {kv}, lists = given }}\n{more}}}\n")
    read = f"q_pos and seen[b, h_kv, q_idx // {q}, kv_idx // {kv}]\n"
    mapped = load_spec(HEAD.replace("q_pos\n", read) + f"  tensor seen: bool[batch, heads_kv, rows, keys]\n{more}}}\n")
    rows, count = -(-200 // q), -(-333 // kv)
    lists = torch.randint(-1, count + 1, (2, 2, rows, 40), generator=torch.Generator().manual_seed(q + kv))
    places = torch.where((lists < 0) | (lists >= count), count, lists)
    seen = torch.zeros(2, 2, rows, count + 1, dtype=torch.bool).scatter_(-1, places, True)[..., :count]
    return attn, mapped, lists.int().cuda(), seen


def test_merge_of_a_ring() -> None:
    """Keys in three steps, position offsets by the spec of a ring step."""
    attn, step = attngen.build(PLAIN), attngen.build(EXAMPLES / "ring.attn", head_dim=64)
    q, k, v = (random(1, 300, 2, 64, seed=i).detach() for i in range(3))
    found = [
        step(q, k[:, a : a + 100], v[:, a : a + 100], q_offset=0, kv_offset=a, return_lse=True) for a in (0, 100, 200)
    ]
    o, lse = attngen.merge(*(x for pair in found for x in pair))
    want, want_lse = attn(q, k, v, return_lse=True)
    assert (o.float() - want.float()).abs().max() < 2e-2 and (lse - want_lse).abs().max() < 1e-3


def calls() -> dict[str, Callable[[], Any]]:
    """One call of each kind, warm."""
    packed, several = attngen.build(PACKED), attngen.build(EXAMPLES / "calls" / "cascade.attn", head_dim=64)
    by_lists, _, lists, _ = listed(64, 1)
    qkv = random(1, 200, 3, 2, 64).detach()
    q, k, v = (random(2, n, h, 64).detach() for n, h in ((200, 4), (333, 2), (333, 2)))
    return {
        "packed": lambda: packed(qkv),
        "segments": lambda: several(q, k, v, segments={"shared": (k, v)}),
        "lists": lambda: by_lists(q, k, v, blocks=lists),
    }


@pytest.mark.parametrize("name", ["packed", "segments", "lists"])
def test_no_wait_and_graphs(name: str) -> None:
    """No call waits for the GPU; a CUDA graph replays it."""
    call = calls()[name]
    want = call()
    with no_waits():
        again = call()
    assert torch.equal(again, want)
    replayed(call, want)
