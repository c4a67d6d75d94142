"""Ragged layouts in the references: a call a sequence, by the formula written out here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attngen.diag.diagnostic import AttnError
from attngen.ref import blockwise, dense, ragged
from attngen.syntax import load_spec

SPEC = """attn 1
"Sliding window with sinks, a bias over packed keys and rows, a temperature for each sequence."
attention ragged {{
  head_dim = 16, v = 8
  layout = {layout}
  param window: int >= 1 = 5
  tensor sinks: f32[heads_q] grad
  tensor bias: f32[heads_q, seqlen_kv] grad
  tensor gain: f32[batch] grad
  tensor shift: f32[batch, seqlen_q]
  score = s * gain[b] + bias[h, kv_idx] + shift[b, q_idx]
  mask = kv_idx <= q_pos and q_pos - kv_idx < window + b
  sink = sinks[h] + float(seqlen_kv)
}}
"""
LENGTHS = [(3, 7), (0, 4), (9, 5), (6, 0), (8, 8)]


def call(layout: str, seed: int = 0) -> dict[str, Any]:
    """Arguments of a call over LENGTHS; what belongs to no sequence is NaN."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    rows, keys = [m for m, _ in LENGTHS], [n for _, n in LENGTHS]
    if layout == "varlen":
        sq, skv = sum(rows) + 2, sum(keys) + 2
        q, k, v = rand(sq, 4, 16), rand(skv, 2, 16), rand(skv, 2, 8)
        q[-2:] = k[-2:] = v[-2:] = math.nan
        cu = [torch.tensor([0, *x]).cumsum(0).int() for x in (rows, keys)]
        lengths = {"cu_seqlens_q": cu[0], "cu_seqlens_kv": cu[1]}
        shift = rand(1, sq)
    else:
        sq, skv = 11, 10
        q, k, v = rand(5, sq, 4, 16), rand(5, skv, 2, 16), rand(5, skv, 2, 8)
        for b, (m, n) in enumerate(LENGTHS):
            q[b, m:] = k[b, n:] = v[b, n:] = math.nan
        lengths = {"seqused_q": torch.tensor(rows).int(), "seqused_kv": torch.tensor(keys).int()}
        shift = rand(5, sq)
    tensors = {"sinks": rand(4), "bias": rand(4, skv), "gain": rand(5), "shift": shift}
    return {"q": q, "k": k, "v": v, "lengths": lengths, "params": {"window": 5}, "tensors": tensors}


def formula(layout: str, c: dict[str, Any], b: int, h: int, i: int) -> tuple[torch.Tensor, float]:
    """O and LSE of one row, term by term."""
    m, n = LENGTHS[b]
    first, key = (sum(x[0] for x in LENGTHS[:b]), sum(x[1] for x in LENGTHS[:b])) if layout == "varlen" else (0, 0)
    q, k, v = (c[x] if layout == "varlen" else c[x][b] for x in "qkv")
    t = c["tensors"]
    pos, scores, values = i + n - m, [], []
    for j in range(n):
        if j <= pos and pos - j < 5 + b:
            s = float(q[first + i, h] @ k[key + j, h // 2]) / 4 * float(t["gain"][b])
            s += float(t["bias"][h, key + j]) + float(t["shift"][0 if layout == "varlen" else b, first + i])
            scores.append(s)
            values.append(v[key + j, h // 2])
    total = sum(math.exp(s) for s in scores) + math.exp(float(t["sinks"][h]) + n)
    o = sum((math.exp(s) / total * x for s, x in zip(scores, values, strict=True)), torch.zeros(8).double())
    return o, math.log(total)


@pytest.mark.parametrize("layout", ["varlen", "padded"])
@pytest.mark.parametrize("how", [dense.attention, blockwise.attention])
def test_formula(layout: str, how: Any) -> None:
    spec, c = load_spec(SPEC.format(layout=layout)), call(layout)
    o, lse = ragged.attention(spec, **c, how=how)
    seen = torch.zeros(lse.shape, dtype=torch.bool)
    for b, (m, _) in enumerate(LENGTHS):
        for i in range(m):
            row = sum(x[0] for x in LENGTHS[:b]) + i
            for h in range(4):
                want_o, want_lse = formula(layout, c, b, h, i)
                at = (h, row) if layout == "varlen" else (b, h, i)
                got = o[row, h] if layout == "varlen" else o[b, i, h]
                assert torch.allclose(got, want_o, atol=1e-10) and abs(float(lse[at]) - want_lse) < 1e-5
                seen[at] = True
    assert (lse[~seen] == -math.inf).all() and int((~seen).sum()) == (8 if layout == "varlen" else 4 * (55 - 26))
    dead = o.transpose(0, 1)[~seen] if layout == "varlen" else o.transpose(1, 2)[~seen]
    assert (dead == 0).all()


def test_lengths_are_held_within_the_tensors() -> None:
    spec, c = load_spec(SPEC.format(layout="varlen")), call("varlen")
    broken = {"cu_seqlens_q": torch.tensor([-3, 9, 4, 999, 5, 20]), "cu_seqlens_kv": torch.tensor([0, 3, 3, 8, 99, -1])}
    parts = ragged.sequences(spec, c["q"], c["k"], broken)
    assert [(s.rows, s.keys) for s in parts] == [
        (slice(0, 9), slice(0, 3)), (slice(9, 9), slice(3, 3)), (slice(4, 28), slice(3, 8)),
        (slice(28, 28), slice(8, 26)), (slice(5, 20), slice(26, 26)),
    ]  # fmt: skip
    assert ragged.sequences(spec, c["q"], c["k"], {"cu_seqlens_q": torch.tensor([0, 4])})[0].keys == slice(0, 4)
    with pytest.raises(AttnError, match="cu_seqlens_q"):
        ragged.sequences(spec, c["q"], c["k"], {})


def test_missing_seqused_is_full() -> None:
    spec = load_spec(SPEC.format(layout="padded"))
    c = call("padded")
    parts = ragged.sequences(spec, c["q"], c["k"], {"seqused_kv": torch.tensor([1, 2, 3, 4, 50])})
    assert [s.rows for s in parts] == [slice(0, 11)] * 5
    assert [s.keys.stop for s in parts] == [1, 2, 3, 4, 10]


@pytest.mark.parametrize("layout", ["varlen", "padded"])
def test_gradients(layout: str) -> None:
    """Against autograd of the dense meaning; what belongs to no sequence gets zeros."""
    spec, c = load_spec(SPEC.format(layout=layout)), call(layout)
    leaves = {n: c[n].clone().requires_grad_() for n in "qkv"}
    learned = {n: c["tensors"][n].clone().requires_grad_() for n in ("sinks", "bias", "gain")}
    arguments = {**c, **leaves, "tensors": {**c["tensors"], **learned}}
    o, lse = ragged.attention(spec, **arguments)
    g = torch.Generator().manual_seed(9)
    do, dlse = (torch.randn(x.shape, generator=g, dtype=torch.float64) for x in (o, lse))
    there = lse != -math.inf
    loss = (o * do).sum() + (lse[there] * dlse[there]).sum()
    want = torch.autograd.grad(loss, [*leaves.values(), *learned.values()])
    found = ragged.attention_backward(
        spec, c["q"], c["k"], c["v"], o.detach(), lse.detach(), do, dlse, c["lengths"], c["params"], c["tensors"]
    )
    got = [found.dq, found.dk, found.dv, *(found.captured[n] for n in learned)]
    for name, x, y in zip([*leaves, *learned], got, want, strict=True):
        assert torch.allclose(x, y, atol=1e-9), name
    part = ragged.attention_backward(
        spec, c["q"], c["k"], c["v"], o.detach(), lse.detach(), do, None, c["lengths"], c["params"], c["tensors"],
        wanted={"k", "gain"},
    )  # fmt: skip
    assert part.dq is None and part.dv is None and set(part.captured) == {"gain"} and part.dk is not None
