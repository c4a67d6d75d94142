"""Packed and padded batches on the GPU: each sequence against its own dense meaning, whatever its neighbours hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness import no_waits, replayed

import attngen
from attngen.diag.diagnostic import AttnError
from attngen.ref import dense
from attngen.syntax import load_spec

BF16 = torch.bfloat16
LAYOUTS = ("varlen", "padded")
MASKS = {
    "full": "true",
    "causal": "kv_idx <= q_pos",
    "window": "kv_idx <= q_pos and q_pos - kv_idx < 100",
}
#: Rows and keys of each sequence: none, one, more rows than keys, fewer.
LENGTHS = ((300, 300), (0, 17), (1, 260), (129, 64), (77, 0), (200, 513))


def text(layout: str, mask: str, d: int, more: str = "") -> str:
    return f"attn 1\nattention one {{\n  head_dim = {d}\n  layout = {layout}\n  mask = {MASKS[mask]}\n{more}}}\n"


def random(*shape: int, seed: int) -> torch.Tensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=g, device="cuda").to(BF16)


def ends(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0).int()


class Batch:
    """Inputs of one call; padding of a padded batch holds NaN."""

    def __init__(self, layout: str, d: int, heads_q: int = 4, heads_kv: int = 2) -> None:
        self.layout = layout
        rows, keys = ([n[i] for n in LENGTHS] for i in (0, 1))
        self.parts = [
            [random(n, h, d, seed=7 * i + j) for j, (n, h) in enumerate(((m, heads_q), (k, heads_kv), (k, heads_kv)))]
            for i, (m, k) in enumerate(LENGTHS)
        ]
        if layout == "varlen":
            self.inputs = [torch.cat([p[j] for p in self.parts]) for j in range(3)]
            self.named = {"cu_seqlens_q": ends(rows), "cu_seqlens_kv": ends(keys)}
        else:
            self.inputs = []
            for j, longest in ((0, max(rows)), (1, max(keys)), (2, max(keys))):
                whole = self.parts[0][j].new_full((len(LENGTHS), longest, *self.parts[0][j].shape[1:]), float("nan"))
                for i, p in enumerate(self.parts):
                    whole[i, : p[j].shape[0]] = p[j]
                self.inputs.append(whole)
            self.named = {
                "seqused_q": torch.tensor(rows, dtype=torch.int32, device="cuda"),
                "seqused_kv": torch.tensor(keys, dtype=torch.int32, device="cuda"),
            }

    def sequence(self, x: torch.Tensor, i: int, which: int) -> torch.Tensor:
        """Sequence i of something laid out as q (0) or as k (1)."""
        n = LENGTHS[i][which]
        if self.layout == "padded":
            return x[i, :n]
        start = sum(m[which] for m in LENGTHS[:i])
        return x[start : start + n]

    def rows_of_lse(self, lse: torch.Tensor, i: int) -> torch.Tensor:
        start = sum(m[0] for m in LENGTHS[:i])
        return lse[i, :, : LENGTHS[i][0]] if self.layout == "padded" else lse[:, start : start + LENGTHS[i][0]]


def close(got: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    """The error rule: twice what torch errs in the same dtype, and two ulps."""
    assert got.shape == exact.shape and not got.isnan().any()
    if got.numel():
        allowed = 2 * float((plain.double() - exact).abs().max())
        allowed += 2 * torch.finfo(got.dtype).eps * float(exact.abs().max())
        assert float((got.double() - exact).abs().max()) <= allowed


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", sorted(MASKS))
@pytest.mark.parametrize("d", [64, 128])
def test_each_sequence_is_its_own_call(layout: str, mask: str, d: int) -> None:
    attn = attngen.build(text(layout, mask, d))
    single = load_spec(text("bshd", mask, d))
    batch = Batch(layout, d)
    o, lse = attn(*batch.inputs, **batch.named, return_lse=True)
    for i in range(len(LENGTHS)):
        alone = [x[None] for x in batch.parts[i]]
        exact, plain = dense.attention(single, *alone), dense.same_dtype(single, *alone)
        close(batch.sequence(o, i, 0), exact.o[0], plain.o[0])
        rows = batch.rows_of_lse(lse, i)
        finite = exact.lse[0].isfinite()
        assert torch.equal(rows.isfinite(), finite)
        assert torch.allclose(rows[finite].double(), exact.lse[0][finite], atol=2e-3)
    if layout == "padded":
        past = torch.arange(o.shape[1], device="cuda")[None] >= batch.named["seqused_q"][:, None]
        assert (o[past] == 0).all() and (lse.transpose(1, 2)[past] == -torch.inf).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", ["causal", "window"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(layout: str, mask: str, deterministic: bool) -> None:
    attn = attngen.build(text(layout, mask, 128, f"  backward {{ deterministic = {str(deterministic).lower()} }}\n"))
    try:
        attn.compile(backward=True)
    except AttnError as reason:
        if reason.code != "E0402":
            raise
        pytest.skip(str(reason).splitlines()[0])
    single = load_spec(text("bshd", mask, 128))
    batch = Batch(layout, 128)
    leaves = [x.clone().requires_grad_() for x in batch.inputs]
    o = attn(*leaves, **batch.named)
    do = random(*o.shape, seed=99)
    if layout == "padded":
        do = do.masked_fill(~_used(batch, 0)[..., None, None], float("nan"))
    found = torch.autograd.grad(o, leaves, do)
    again = torch.autograd.grad(attn(*leaves, **batch.named), leaves, do)
    if deterministic:
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    for i in range(len(LENGTHS)):
        wide: list[Any] = []
        for dtype, f in ((torch.float64, dense.attention), (BF16, dense.same_dtype)):
            alone = [x[None].to(dtype).requires_grad_() for x in batch.parts[i]]
            out = f(single, *alone).o
            gradient = batch.sequence(do, i, 0)[None].to(out.dtype)
            wide.append(torch.autograd.grad((out * gradient).sum(), alone, allow_unused=True, materialize_grads=True))
        for j, (exact, plain) in enumerate(zip(*wide, strict=True)):
            close(batch.sequence(found[j], i, min(j, 1)), exact[0], plain[0])
    if layout == "padded":
        for j, x in enumerate(found):
            assert (x[~_used(batch, min(j, 1))] == 0).all()


MORE = {
    "bias": """  tensor bias: f32[heads_q] grad
  tensor own: f32[batch, heads_q] grad
  score = s + bias[h] * float(kv_idx % 3)
  sink = own[b, h]
""",
    "gate": """  tensor bias: f32[heads_q] grad
  tensor own: f32[batch, heads_q] grad
  epilogue = o * sigmoid(own[b, h]) + bias[h]
  output { dtype = f32, max_logit = true }
""",
    "sigmoid": """  normalizer = sigmoid
  tensor bias: f32[heads_q] grad
  tensor own: f32[batch, heads_q] grad
  score = s + bias[h] - own[b, h]
""",
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", sorted(MORE))
def test_captured_tensors_and_outputs(layout: str, name: str) -> None:
    """Gradients of captured tensors, by kernels and without waiting; O in fp32, the largest scores."""
    attn = attngen.build(text(layout, "causal", 64, MORE[name]))
    single = load_spec(text("bshd", "causal", 64, MORE[name]))
    batch = Batch(layout, 64)
    learned = [torch.randn(4, device="cuda"), torch.randn(len(LENGTHS), 4, device="cuda")]
    leaves = [x.requires_grad_() for x in (*(x.clone() for x in batch.inputs), *learned)]

    def call() -> Any:
        return attn(*leaves[:3], **batch.named, bias=leaves[3], own=leaves[4])

    o = call()
    do = random(*o.shape, seed=99).to(o.dtype)
    if layout == "padded":
        do = do.masked_fill(~_used(batch, 0)[..., None, None], float("nan"))
    found = torch.autograd.grad(o, leaves, do)
    with no_waits():
        torch.autograd.grad(call(), leaves, do)
    totals: list[list[torch.Tensor]] = []
    for dtype, f in ((torch.float64, dense.attention), (BF16, dense.same_dtype)):
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        bias, own = (x.detach().to(wide).requires_grad_() for x in learned)
        total: Any = 0.0
        for i in range(len(LENGTHS)):
            alone = [x[None].to(dtype) for x in batch.parts[i]]
            out = f(single, *alone, tensors={"bias": bias, "own": own[i : i + 1]}).o
            total = total + (out * batch.sequence(do, i, 0)[None].to(out.dtype)).sum().double()
            if dtype is torch.float64:
                off = (batch.sequence(o, i, 0).double() - out[0]).abs()
                top = float(out.detach().abs().max()) if out.numel() else 0.0
                assert not off.isnan().any() and not (off > 0.02 * max(1.0, top)).any()
        totals.append(list(torch.autograd.grad(total, [bias, own])))
    for got, exact, plain in zip(found[3:], *totals, strict=True):
        error, top = float((got.double() - exact).abs().max()), float(exact.abs().max())
        assert error <= 4 * float((plain.double() - exact).abs().max()) + 1e-3 * top
    if attn.spec.max_logit:
        _, top_scores = attn(*batch.inputs, **batch.named, bias=learned[0], own=learned[1], return_max_logit=True)
        assert not top_scores.isnan().any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_inside_sequences(layout: str) -> None:
    """Positions in a sorted tensor, from a table with a word for each row; ids begin anew in each sequence."""
    batch_axis, b = ("", "") if layout == "varlen" else ("batch, ", "b, ")
    body = "kv_idx <= q_pos and doc[{0}max(q_pos, 0)] == doc[{0}kv_idx]"
    tensor = "  tensor doc: i32[{0}seqlen_kv] sorted\n"
    attn = attngen.build(
        f"attn 1\nattention one {{\n  head_dim = 64\n  layout = {layout}\n{tensor.format(batch_axis)}"
        f"  mask = {body.format(b)}\n}}\n"
    )
    single = load_spec(
        f"attn 1\nattention one {{\n  head_dim = 64\n{tensor.format('batch, ')}  mask = {body.format('b, ')}\n}}\n"
    )
    batch = Batch(layout, 64)
    docs = [torch.arange(n, dtype=torch.int32, device="cuda") // 50 for _, n in LENGTHS]
    if layout == "varlen":
        doc = torch.cat(docs)
    else:
        doc = torch.full(batch.inputs[1].shape[:2], 2**30, dtype=torch.int32, device="cuda")
        for i, x in enumerate(docs):
            doc[i, : len(x)] = x
    leaves, kept = [x.clone().requires_grad_() for x in batch.inputs], attn.tables()
    o = attn(*leaves, **batch.named, doc=doc, tables=kept)
    do = random(*o.shape, seed=99)
    if layout == "padded":
        do = do.masked_fill(~_used(batch, 0)[..., None, None], float("nan"))
    found = torch.autograd.grad(o, leaves, do)
    assert torch.equal(o, attn(*batch.inputs, **batch.named, doc=doc))
    for i in range(len(LENGTHS)):
        wide: list[Any] = []
        for dtype, f in ((torch.float64, dense.attention), (BF16, dense.same_dtype)):
            alone = [x[None].to(dtype).requires_grad_() for x in batch.parts[i]]
            out = f(single, *alone, tensors={"doc": docs[i][None]}).o
            gradient = batch.sequence(do, i, 0)[None].to(out.dtype)
            grads = torch.autograd.grad((out * gradient).sum(), alone, allow_unused=True, materialize_grads=True)
            wide.append([out, *grads])
        close(batch.sequence(o, i, 0), wide[0][0][0], wide[1][0][0])
        for j, (exact, plain) in enumerate(zip(wide[0][1:], wide[1][1:], strict=True)):
            close(batch.sequence(found[j], i, min(j, 1)), exact[0], plain[0])


def _used(batch: Batch, which: int) -> torch.Tensor:
    used = batch.named["seqused_kv" if which else "seqused_q"]
    return torch.arange(batch.inputs[which].shape[1], device="cuda")[None] < used[:, None]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_wait_no_compile_and_graphs(layout: str) -> None:
    """Other lengths neither wait for the GPU nor compile; a CUDA graph replays a call with new lengths."""
    attn = attngen.build(text(layout, "causal", 64))
    batch = Batch(layout, 64)
    attn(*batch.inputs, **batch.named)
    with no_waits():
        want = attn(*batch.inputs, **batch.named)
    replayed(lambda: attn(*batch.inputs, **batch.named), want)
