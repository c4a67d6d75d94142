"""Calls of ragged layouts: what reaches the entry point, what is left out, wrong lengths, torch.compile, the CPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attngen
from attngen.diag.diagnostic import AttnError
from attngen.emit.backward import emit_backward
from attngen.emit.module import emit
from attngen.ir.tile_map import map_words
from attngen.jit import launch
from attngen.jit.cache import KernelCache
from attngen.jit.device import DeviceState
from attngen.jit.kernel import Attention
from attngen.jit.variants import Variant
from attngen.ref import blockwise, ragged
from attngen.search import plan
from attngen.search_backward import plan_backward
from attngen.syntax import load_spec

SPEC = """attn 1
"Causal, with a bias for each sequence."
attention ragged {{
  head_dim = 64
  layout = {layout}
  param scaled: float = 1.0
  tensor shift: f32[batch, heads_q]
  score = s * scaled + shift[b, h]
  mask = kv_idx <= q_pos
}}
"""
VARLEN, PADDED = (load_spec(SPEC.format(layout=x)) for x in ("varlen", "padded"))
BF16 = torch.bfloat16


def starts(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def varlen(rows: tuple[int, ...] = (3, 0, 5), keys: tuple[int, ...] = (4, 2, 5)) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(1)
    shapes = ((sum(rows), 4, 64), (sum(keys), 2, 64), (sum(keys), 2, 64))
    return tuple(torch.randn(s, generator=g).to(BF16) for s in shapes)


@pytest.fixture
def attach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """An Attention whose launches are recorded."""
    monkeypatch.setattr(launch, "_current_device", lambda: -1)
    monkeypatch.setattr(launch, "_raw_stream", lambda index: 7)
    monkeypatch.setattr(launch, "_capturing", lambda: False)

    def make(spec: Any) -> tuple[Attention, list[tuple[Any, ...]]]:
        calls: list[tuple[Any, ...]] = []
        attention = Attention(spec, emit(plan(spec)), "sm_90a", KernelCache(tmp_path))
        attention.launcher.functions = tuple(
            lambda *a, i=i: calls.append((i, *a)) for i in range(len(attention.launcher._limits) + 1)
        )
        attention.launcher.ready[-1] = (DeviceState(-1, 132), 132)
        return attention, calls

    return make


def test_varlen_launch(attach: Any) -> None:
    attention, calls = attach(VARLEN)
    q, k, v = varlen()
    cu_q, cu_kv, shift = starts(3, 0, 5), starts(4, 2, 5), torch.zeros(3, 1)
    o, lse = attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, shift=shift, return_lse=True)
    ((_, q_, _, _, o_, lse_, counter, scale, workers, order, scaled, a, b, bias),) = calls
    assert q_ is q and o_ is o and lse_ is lse and a is cu_q and b is cu_kv
    assert o.shape == q.shape and lse.shape == (4, 8) and lse.dtype == torch.float32
    assert (scale, workers, scaled) == (0.125, 132, 1.0) and counter.shape == (1,)
    assert order.shape == (2 * 4 + 1,) and order.dtype == torch.int32
    assert bias.shape == (3, 4) and bias.stride() == (1, 0)
    attention(q, k[:8], v[:8], cu_seqlens_q=cu_q, shift=shift)
    assert calls[1][12] is cu_q, "keys are packed as the rows are, unless said otherwise"


def test_padded_launch(attach: Any) -> None:
    attention, calls = attach(PADDED)
    q, k = torch.zeros(2, 6, 4, 64, dtype=BF16), torch.zeros(2, 9, 2, 64, dtype=BF16)
    used = torch.tensor([6, 1]).int()
    attention(q, k, k, seqused_kv=used, shift=torch.zeros(2, 4))
    rows, keys = calls[0][11:13]
    assert rows.tolist() == [6, 6] and keys is used and calls[0][9].shape == (2 * 2 + 1,)


def test_plan_follows_the_mean_length(attach: Any) -> None:
    attention, calls = attach(VARLEN)
    attention.launcher._limits, total = (16,), 40
    attention.launcher.functions = tuple(lambda *a, i=i: calls.append((i, *a)) for i in range(2))
    q, k, v = varlen((total,), (total,))
    for count, wanted in ((1, 1), (2, 1), (3, 0), (40, 0)):
        lengths = torch.linspace(0, total, count + 1).int()
        attention(q, k, v, cu_seqlens_q=lengths, shift=torch.zeros(count, 4))
        assert calls[-1][0] == wanted


def test_other_lengths_reach_the_same_function(attach: Any) -> None:
    """Nothing is compiled for a length: the entry point is the one that was there, and no length is read."""
    attention, calls = attach(VARLEN)
    functions = attention.launcher.functions
    for rows in ((3, 5), (8,), (1, 1, 6), (0, 8)):
        q, k, v = varlen(rows, rows)
        attention(q, k, v, cu_seqlens_q=starts(*rows), shift=torch.zeros(len(rows), 4))
    assert attention.launcher.functions is functions and len(calls) == 4


def test_wrong_calls(attach: Any) -> None:
    attention, _ = attach(VARLEN)
    q, k, v = varlen()
    shift, cu = torch.zeros(3, 4), starts(3, 0, 5)
    cases: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = [
        ("E0602", "cu_seqlens_q", (q, k, v), {"shift": shift}),
        ("E0607", r"batch \+ 1", (q, k, v), {"shift": torch.zeros(1, 4), "cu_seqlens_q": cu[None]}),
        ("E0607", "extent 2 along batch", (q, k, v), {"shift": torch.zeros(2, 4), "cu_seqlens_q": cu}),
        ("E0601", "seqused_q", (q, k, v), {"shift": shift, "cu_seqlens_q": cu, "seqused_q": cu}),
    ]
    for code, text, operands, named in cases:
        with pytest.raises(AttnError, match=text) as caught:
            attention(*operands, **named)
        assert caught.value.diagnostics[0].code == code
    attention.launcher.functions = tuple([_refuse] * 3)
    with pytest.raises(AttnError, match="pack the sequences"):
        attention(q[None], k[None], v[None], cu_seqlens_q=cu, shift=shift)
    with pytest.raises(AttnError, match=r"`cu_seqlens_q` is torch.int64.*i32") as caught:
        attention(q, k, v, cu_seqlens_q=cu.long(), shift=shift)
    with pytest.raises(AttnError, match="`cu_seqlens_kv` holds 2 starts"):
        attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=starts(5), shift=shift)


def _refuse(*_: Any) -> None:
    raise ValueError("Mismatched argument")


@pytest.mark.parametrize(
    ("cu", "text"),
    [([1, 3, 3, 8], "begins at 1"), ([0, 5, 3, 8], "decreases at 2: sequence 1 would run from 5 to 3"),
     ([0, 3, 3, 9], "ends at 9, and 8 rows are packed")],
)  # fmt: skip
def test_check_starts(cu: list[int], text: str) -> None:
    attention = attngen.build(VARLEN)
    q, k, v = varlen()
    with pytest.raises(AttnError, match=text) as caught:
        attention(
            q, k, v, cu_seqlens_q=torch.tensor(cu).int(), cu_seqlens_kv=starts(4, 2, 5), shift=torch.zeros(3, 4),
            check=True,
        )  # fmt: skip
    assert caught.value.diagnostics[0].code == "E0623"


@pytest.mark.parametrize("used", [[-1, 3], [2, 7]])
def test_check_lengths(used: list[int]) -> None:
    q = torch.zeros(2, 6, 4, 64, dtype=BF16)
    with pytest.raises(AttnError, match="outside 0 to 6"):
        attngen.build(PADDED)(q, q, q, seqused_kv=torch.tensor(used).int(), shift=torch.zeros(2, 4), check=True)


def test_check_looks_at_sequences_alone() -> None:
    """NaN behind the sequences is nobody's, NaN inside one is told."""
    attention = attngen.build(PADDED)
    q = torch.ones(2, 6, 4, 64, dtype=BF16)
    q[1, 4:] = math.nan
    used = torch.tensor([6, 4]).int()
    o, lse = attention(q, q, q, seqused_q=used, seqused_kv=used, shift=torch.zeros(2, 4), check=True, return_lse=True)
    assert o.isfinite().all() and (o[1, 4:] == 0).all() and (lse[1, :, 4:] == -math.inf).all()
    q[1, 3] = math.nan
    with pytest.raises(AttnError, match="NaN"):
        attention(q, q, q, seqused_q=used, seqused_kv=used, shift=torch.zeros(2, 4), check=True)


def test_cpu_calls_are_the_reference() -> None:
    attention = attngen.build(VARLEN)
    q, k, v = varlen()
    lengths = {"cu_seqlens_q": starts(3, 0, 5), "cu_seqlens_kv": starts(4, 2, 5)}
    shift = torch.randn(3, 4)
    o, lse = attention(q, k, v, **lengths, shift=shift, return_lse=True)
    want, rows = ragged.attention(VARLEN, q, k, v, lengths, {"scaled": 1.0}, {"shift": shift}, how=blockwise.attention)
    assert torch.equal(o, want.to(BF16)) and torch.equal(lse, rows)
    empty = attention(q[:0], k, v, cu_seqlens_q=starts(0, 0, 0), cu_seqlens_kv=lengths["cu_seqlens_kv"], shift=shift)
    assert empty.shape == (0, 4, 64)


def test_traced() -> None:
    """Under torch.compile and fake tensors a call is one operator with the shapes of its results."""
    attention = attngen.build(VARLEN)
    q, k, v = varlen()
    named = {"cu_seqlens_q": starts(3, 0, 5), "cu_seqlens_kv": starts(4, 2, 5), "shift": torch.randn(3, 4)}
    compiled = torch.compile(lambda *x: attention(*x, **named, return_lse=True), backend="eager", fullgraph=True)
    for got, want in zip(compiled(q, k, v), attention(q, k, v, **named, return_lse=True), strict=True):
        assert torch.equal(got, want)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        o, lse = attention(*fake, **{n: mode.from_tensor(x) for n, x in named.items()}, return_lse=True)
        assert o.shape == (8, 4, 64) and lse.shape == (4, 8)
    padded = attngen.build(PADDED)
    q4 = torch.randn(2, 6, 4, 64).to(BF16)
    compiled = torch.compile(lambda x: padded(x, x, x, shift=torch.zeros(2, 4)), backend="eager", fullgraph=True)
    assert torch.equal(compiled(q4), padded(q4, q4, q4, shift=torch.zeros(2, 4)))


LEARNED = load_spec(SPEC.format(layout="varlen").replace("[batch, heads_q]", "[batch, heads_q] grad"))


def test_cpu_gradients() -> None:
    attention = attngen.build(LEARNED)
    q, k, v = (x.requires_grad_() for x in varlen())
    lengths = {"cu_seqlens_q": starts(3, 0, 5), "cu_seqlens_kv": starts(4, 2, 5)}
    shift = torch.randn(3, 4, requires_grad=True)
    o, lse = attention(q, k, v, **lengths, shift=shift, return_lse=True)
    (o.float().sum() + lse.sum()).backward()
    dense = [x.detach().double().requires_grad_() for x in (q, k, v, shift)]
    o, lse = ragged.attention(LEARNED, *dense[:3], lengths, {"scaled": 1.0}, {"shift": dense[3]})
    (o.sum() + lse.sum()).backward()
    for got, want in zip((q, k, v, shift), dense, strict=True):
        assert (got.grad.double() - want.grad).abs().max() < 0.05 * want.grad.abs().max()
    compiled = torch.compile(lambda *x: attention(*x, **lengths, shift=shift), backend="aot_eager", fullgraph=True)
    again = [x.detach().requires_grad_() for x in (q, k, v)]
    compiled(*again).float().sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in again)


def test_backward_launch(attach: Any) -> None:
    """Workspace by whole tiles of each sequence; lengths among the arguments; a sum by key, by sequence in the end."""
    attention, _ = attach(LEARNED)
    asked: list[tuple[str, ...]] = []
    make = attention.backward._make
    assert make is None

    def made(names: tuple[str, ...]) -> Any:
        asked.append(names)
        return emit_backward(plan_backward(LEARNED, captured=names))

    attention.backward._make = made
    meta = attention.backward.source_of(("shift",)).meta["backward"]
    plan_ = meta["plans"][0]
    calls: list[tuple[Any, ...]] = []
    sums = torch.arange(44.0).view(4, 11)

    def launched(*given: Any) -> None:
        calls.append(given)
        given[-1].copy_(sums)

    variant = Variant(
        functions=(launched,), tile_m=(plan_["tile_m"],), tile_n=plan_["tile_n"], cluster=1,
        workspace=(plan_["workspace_per_tile"],), parts=(0,), limits=(), rows=tuple(meta["gradients"]),
        learned=("shift",), referenced=(), varies=False,
    )  # fmt: skip
    attention.backward.variants[(True, True, True, True)] = variant
    q, k, v = varlen()
    cu_q, cu_kv, shift = starts(3, 0, 5), starts(4, 2, 5), torch.zeros(3, 4)
    o, lse = torch.randn(8, 4, 64).to(BF16), torch.zeros(4, 8)
    ready = attention.launcher.ready[-1]
    found = attention.backward.run(
        ready, (True,) * 4, q, k, v, o, lse, torch.ones_like(o), None, (1.0,), (cu_q, cu_kv, shift), None
    )
    (given,) = calls
    workspace, _, workers, scaled, a, b, bias, _ = given[10:]
    assert workspace.numel() == 4 * (8 // plan_["tile_m"] + 4) * plan_["workspace_per_tile"]
    assert (workers, scaled) == (132, 1.0) and a is cu_q and b is cu_kv and bias is shift
    assert given[7].shape == q.shape and asked == [("shift",)]
    assert torch.equal(found[3], torch.stack([sums[:, :4].sum(1), sums[:, 4:6].sum(1), sums[:, 6:].sum(1)]))
    assert not attention.backward.reduced()


MORE = """attn 1
attention more {{
  head_dim = 64
  layout = {layout}
  tensor gate: f32[batch]
  epilogue = o * gate[b]
  output {{ dtype = f32, max_logit = true }}
}}
"""


@pytest.mark.parametrize("layout", ["varlen", "padded"])
def test_further_results(attach: Any, layout: str) -> None:
    """O before the epilogue where a backward follows, the largest scores; with and without a launch."""
    attention, calls = attach(load_spec(MORE.format(layout=layout)))
    q, k, v = varlen((8,), (8,)) if layout == "varlen" else (torch.zeros(3, 8, h, 64, dtype=BF16) for h in (4, 2, 2))
    lengths = {"cu_seqlens_q": starts(3, 0, 5)} if layout == "varlen" else {}
    rows = (4, 8) if layout == "varlen" else (3, 4, 8)
    named = attention.binder.filled({**lengths, "gate": torch.ones(3)}, q, k)  # type: ignore[attr-defined]
    tail = attention.binder.bind(named, q, k)
    ready = attention.launcher.ready[-1]
    o, lse, kept = attention.launcher.launch_saving(ready, q, k, v, tail, None)
    pre, saves, top = calls[-1][-3:]
    assert pre is kept and saves == 1 and o.dtype == pre.dtype == torch.float32 and o.shape == q.shape
    assert lse.shape == top.shape == rows
    attention.launcher.launch(ready, q, k, v, tail, None, None, None, False)
    assert calls[-1][-2] == 0
    whole = attention.launcher.launch_whole(ready, q[:, :0], k, v, tail, None, True)  # type: ignore[attr-defined]
    assert len(calls) == 2 and whole[3].numel() == 0


DOCUMENTS = """attn 1
attention packed {{
  head_dim = 64
  layout = {layout}
  tensor doc: i32[{batch}seqlen_kv] sorted
  mask = kv_idx <= q_pos and doc[{b}max(q_pos, 0)] == doc[{b}kv_idx]
  {more}
}}
"""


@pytest.mark.parametrize("more", ["", "output { max_logit = true }"])
@pytest.mark.parametrize("layout", ["varlen", "padded"])
def test_tables(attach: Any, layout: str, more: str) -> None:
    """A word for each row of memory; a handle keeps them while tensors and lengths are the same."""
    batch, b = ("", "") if layout == "varlen" else ("batch, ", "b, ")
    attention, calls = attach(load_spec(DOCUMENTS.format(layout=layout, batch=batch, b=b, more=more)))
    shape = (8,) if layout == "varlen" else (3, 8)
    q, k, v = (torch.zeros(*shape, h, 64, dtype=BF16) for h in (4, 2, 2))
    name = "cu_seqlens_q" if layout == "varlen" else "seqused_kv"
    lengths = starts(3, 0, 5) if layout == "varlen" else torch.tensor([3, 0, 5]).int()
    doc, kept, seen = torch.zeros(shape, dtype=torch.int32), attention.tables(), []
    place = -3 if more else -2
    for change in (None, None, "lengths", None, "doc"):
        lengths = lengths.clone() if change == "lengths" else lengths
        if change == "doc":
            doc += 1
        used = {"seqused_q": lengths} if layout == "padded" else {"cu_seqlens_kv": lengths}
        attention(q, k, v, **{name: lengths}, **used, doc=doc, tables=kept)
        words, build = calls[-1][place], calls[-1][place + 1]
        seen.append(build)
        assert words.numel() == doc.numel() and len(attention.source.meta["tables"]) == 1
    assert seen == [1, 0, 1, 0, 1]
    attention(q, k, v, **{name: lengths}, doc=doc)
    assert calls[-1][place + 1] == 1


@pytest.mark.parametrize("layout", ["varlen", "padded"])
def test_tile_maps(attach: Any, layout: str) -> None:
    """Words for the plan that the mean length takes; a handle keeps them while the lengths are the same."""
    text = DOCUMENTS.format(layout=layout, batch="", b="", more="block_sparse { q = 64, kv = 64 }")
    spec = load_spec(text.replace(" sorted", ""))
    attention, calls = attach(spec)
    meta, kept = attention.source.meta, attention.tables()
    shape = (5000,) if layout == "varlen" else (3, 5000)
    q, k, v = (torch.zeros(*shape, h, 64, dtype=BF16) for h in (4, 2, 2))
    doc = torch.zeros(5000, dtype=torch.int32)
    for count in (1, 3) if layout == "varlen" else (3,):
        lengths = torch.linspace(0, 5000, count + 1).int()
        used = dict.fromkeys(("seqused_q", "seqused_kv"), lengths[1:])
        named = {"cu_seqlens_q": lengths} if layout == "varlen" else used
        for build in (1, 0):
            attention(q, k, v, **named, doc=doc, tables=kept)
            index, *_, tile_map, made = calls[-1]
            sizes = {"batch": count, "heads_q": 4, "seqlen_q": 5000, "seqlen_kv": 5000}
            assert made == build and tile_map.numel() == map_words(meta["map"], meta["plans"][index], sizes)


def test_largest_scores_on_the_cpu() -> None:
    attention = attngen.build(load_spec(MORE.format(layout="varlen")))
    q, k, v = varlen((3, 0, 5), (4, 2, 5))
    lengths = {"cu_seqlens_q": starts(3, 0, 5), "cu_seqlens_kv": starts(4, 2, 5)}
    o, top = attention(q, k, v, **lengths, gate=torch.ones(3), return_max_logit=True)
    for rows, keys in ((slice(0, 3), slice(0, 4)), (slice(3, 8), slice(6, 11))):
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k[keys].float().repeat_interleave(2, 1)) / 8
        assert torch.allclose(top[:, rows], scores.amax(-1), atol=1e-3) and o.dtype == torch.float32


def test_sequences_that_begin_between_rows_are_refused() -> None:
    """A padded kernel counts whole rows from sequence to sequence; others would read elsewhere without a word."""
    from attngen.jit import contract

    spec = load_spec("attn 1\nattention one {\n  head_dim = 64\n  layout = padded\n}\n")
    memory = torch.zeros(4096, dtype=torch.bfloat16)
    q = k = torch.zeros(2, 5, 2, 64, dtype=torch.bfloat16)
    lengths = {"seqused_q": torch.tensor([5, 3]).int(), "seqused_kv": torch.tensor([5, 3]).int()}
    askew = memory.as_strided((2, 5, 2, 64), (5 * 128 + 8, 128, 64, 1))
    assert not contract.has_row_steps(askew)
    with pytest.raises(AttnError) as raised:
        contract.validate(spec, q, k, askew, lengths)
    assert raised.value.code == "E0609" and "no multiple of its stride 128 along seqlen" in str(raised.value)
    cache = memory.as_strided((2, 5, 2, 64), (7 * 128, 128, 64, 1))  # a longer cache, cut
    shared = memory.as_strided((2, 5, 2, 64), (0, 128, 64, 1))
    single = memory.as_strided((1, 5, 2, 64), (1, 128, 64, 1))
    assert all(map(contract.has_row_steps, (q, cache, shared, single)))
    one = contract.normalized(memory.as_strided((2, 1, 2, 64), (128, 24, 64, 1)))
    assert contract.has_row_steps(one)
