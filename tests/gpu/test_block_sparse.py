"""Block sparsity on the GPU: maps made of the mask, maps of the caller, forward, backward, equal bits when asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import no_waits

import attngen
from attngen.ref import dense
from attngen.syntax import load_spec

BF16 = torch.bfloat16
#: Masks that no interval says: an unsorted document, a neighbourhood, every third key and all that equal nothing.
MASKS = {
    "documents": "doc[b, q_pos] == doc[b, kv_idx]",
    "grid": "abs(q_idx % 20 - kv_idx % 20) <= 3 and abs(q_idx // 20 - kv_idx // 20) <= 3",
    "dilated": "kv_idx <= q_pos and (q_pos - kv_idx) % 3 == 0",
    "heads": "(q_idx // 50 + kv_idx // 70 + h) % 4 == 0",
    "nothing": "kv_idx // 1000 > q_idx // 1000 + 7",
}


def text(mask: str, d: int, more: str, clause: str = "block_sparse { q = 128, kv = 128 }") -> str:
    tensor = "  tensor doc: i32[batch, seqlen_kv]\n" if "doc[" in mask else ""
    return f"attn 1\nattention one {{\n  head_dim = {d}\n{tensor}  mask = {mask}\n  {clause}\n{more}}}\n"


def random(*shape: int, seed: int) -> torch.Tensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=g, device="cuda").to(BF16).requires_grad_()


def agree(attn: Any, spec: Any, leaves: list[torch.Tensor], named: dict[str, Any], tensors: dict[str, Any]) -> None:
    o, lse = attn(*leaves, **named, return_lse=True)
    do = random(*o.shape, seed=99).detach()
    found = [o, *torch.autograd.grad(o, leaves, do)]
    wide: list[Any] = []
    for dtype, f in ((torch.float64, dense.attention), (BF16, dense.same_dtype)):
        alone = [x.detach().to(dtype).requires_grad_() for x in leaves]
        out = f(spec, *alone, tensors=tensors)
        wide.append([out.o, *torch.autograd.grad((out.o * do.to(out.o.dtype)).sum(), alone)])
        kept = out.lse
    assert torch.equal(lse.isfinite(), kept.isfinite())
    for got, exact, plain in zip(found, *wide, strict=True):
        allowed = 2 * float((plain.double() - exact).abs().max())
        allowed += 2 * torch.finfo(got.dtype).eps * float(exact.abs().max())
        assert not got.isnan().any() and float((got.double() - exact).abs().max()) <= allowed


@pytest.mark.parametrize("mask", sorted(MASKS))
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_maps_of_a_mask(mask: str, deterministic: bool, d: int) -> None:
    more = f"  backward {{ deterministic = {str(deterministic).lower()} }}\n"
    attn = attngen.build(text(MASKS[mask], d, more))
    plain = load_spec(text(MASKS[mask], d, "", ""))
    leaves = [random(2, 700, h, d, seed=i) for i, h in enumerate((4, 2, 2))]
    doc = torch.randint(0, 5, (2, 700), generator=torch.Generator().manual_seed(3), dtype=torch.int32).cuda()
    tensors = {"doc": doc} if plain.tensors else {}
    agree(attn, plain, leaves, tensors, tensors)
    if deterministic:
        do = random(2, 700, 4, d, seed=5).detach()
        runs = [torch.autograd.grad(attn(*leaves, **tensors), leaves, do) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(("q", "kv"), [(128, 128), (64, 48), (200, 96)])
def test_given_maps(q: int, kv: int) -> None:
    """Blocks of any size beside the kernel's own tiles; empty rows and an empty map among them."""
    attn = attngen.build(text("kv_idx <= q_pos", 64, "", f"block_sparse {{ q = {q}, kv = {kv}, lists = given }}"))
    read = f"kv_idx <= q_pos and seen[b, h, q_idx // {q}, kv_idx // {kv}]"
    spec = load_spec(text(read, 64, "  tensor seen: bool[batch, heads_q, rows, keys]\n", ""))
    leaves = [random(2, n, h, 64, seed=i) for i, (n, h) in enumerate(((600, 4), (700, 2), (700, 2)))]
    shape = (2, 4, -(-600 // q), -(-700 // kv))
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(q)).cuda() < 0.4
    seen[0, 1] = False
    agree(attn, spec, leaves, {"blocks": seen}, {"seen": seen})
    o = attn(*leaves, blocks=torch.zeros_like(seen))
    assert (o == 0).all()
    with no_waits():
        attn(*(x.detach() for x in leaves), blocks=seen)
