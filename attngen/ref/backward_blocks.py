"""The inner loop of the blockwise gradients: one block of rows against every live block of keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from attngen.ir.expr import Atom
from attngen.ir.gradient import GradientForm
from attngen.ir.types import Normalizer
from attngen.ref import blockwise
from attngen.ref.binding import Binding, Part
from attngen.ref.captured import Captured
from attngen.ref.evaluate import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """What is known of each row of one score set: do (B, Hq, Sq, Dv), the others (B, Hq, Sq, 1)."""

    do: Tensor
    #: +inf where LSE is -inf, so that P is 0 there.
    lse: Tensor
    delta: Tensor
    dlse: Tensor

    @staticmethod
    def of(o: Tensor, do: Tensor, lse: Tensor, dlse: Tensor) -> Rows:
        """From o and do (B, Hq, Sq, Dv), lse and dlse (B, Hq, Sq)."""
        empty = lse == -torch.inf
        dlse = dlse.masked_fill(empty, 0.0)
        delta = ((o * do).sum(-1) - dlse).masked_fill(empty, 0.0)
        lse = lse.masked_fill(empty, torch.inf)
        return Rows(do, lse.unsqueeze(-1), delta.unsqueeze(-1), dlse.unsqueeze(-1))


@dataclass(frozen=True, slots=True)
class Totals:
    """Accumulators; absent where not wanted.

    dq by number of the score set, dk by that and number of the part, dv by number of the part alone: branches share
    their V. Never by identity, as one tensor may be given twice.
    """

    dq: Mapping[int, Tensor]
    dk: Mapping[tuple[int, int], Tensor]
    dv: Mapping[int, Tensor]
    captured: Captured


def lanes(bound: Binding) -> Iterator[tuple[blockwise._Lane, int]]:
    """Batch elements and KV heads that share every block, and the rows of a block."""
    b, sq, hq, hkv = bound.sizes
    forms = {p.mask: blockwise._form(bound.spec, p.mask) for s in bound.sets for p in s.parts}
    group = max(hq // max(hkv, 1), 1)
    rows = max(1, min(sq, blockwise.ROWS, max(16, blockwise.SCORES // (group * blockwise.KEYS))))
    room = max(1, blockwise.SCORES // (group * rows * blockwise.KEYS))
    heads = max(1, min(hkv, room))
    batch = max(1, min(b, room // heads))
    scores = bound.q.new_empty(batch * heads * group * rows * blockwise.KEYS)
    for b0 in range(0, b, batch):
        for h0 in range(0, hkv, heads):
            own = slice(b0, min(b0 + batch, b)), slice(h0, min(h0 + heads, hkv))
            yield blockwise._Lane(bound, forms, *own, scores), rows


def add_rows(
    totals: Totals, lane: blockwise._Lane, at: tuple[int, int], form: GradientForm, rows: Rows, block: slice
) -> None:
    """Add what rows `block` and the keys of one part contribute; dq and dk without the scale.

    `at`: number of the score set, and of the part in it.
    """
    bound, spec = lane.bound, lane.bound.spec
    part: Part = bound.sets[at[0]].parts[at[1]]
    q_idx = torch.arange(block.start, block.stop, device=bound.q.device)
    b, hkv = lane.sizes
    n, m = b * hkv, lane.group * len(q_idx)

    def of_block(x: Tensor) -> Tensor:
        return x[lane.batch, lane.heads, block].reshape(n, m, x.shape[-1])

    q = lane.q[at[0]][:, :, block].reshape(n, m, -1)
    do, lse, delta, dlse = (of_block(x) for x in (rows.do, rows.lse, rows.delta, rows.dlse))
    k, v = lane.kv[id(part)]
    dq, dk, dv = totals.dq.get(at[0]), totals.dk.get(at), totals.dv.get(at[1])
    captured = [c for c in form.in_kernel if c.tensor in totals.captured.totals]
    plain = isinstance(part.score, Atom)
    dq_block = q.new_zeros(n, m, q.shape[-1])
    for start, stop, full in blockwise._blocks(lane, part, q_idx):
        s = lane.blockwise_scores(q, k[:, start:stop])
        shape, keep, env = (b, hkv * lane.group, len(q_idx), stop - start), None, {}
        if not (full and plain):
            env = lane.env(part.k.shape[1], q_idx, torch.arange(start, stop, device=q.device)) | {"s": s.view(shape)}
            keep = None if full else bound.value(part.mask, env)
        z = s if plain else torch.broadcast_to(bound.value(part.score, env, active=keep), shape).reshape(s.shape)
        if keep is not None:
            z = z.view(shape).masked_fill(~keep, -torch.inf).view(s.shape)
        p = (z - lse).exp_()
        w, w_slope = (p, None) if spec.normalizer is Normalizer.SOFTMAX else _weights(z, spec.normalizer)
        if dv is not None:
            _add(dv, lane, start, stop, w.transpose(1, 2) @ do)
        if dq is None and dk is None and not captured:
            continue
        dz = do @ v[:, start:stop].transpose(1, 2)
        dz = dz.sub_(delta).mul_(p) if w_slope is None else dz.mul_(w_slope).add_(p * dlse)
        for c in captured:
            coefficient = bound.value(c.coefficient, env, active=keep)
            totals.captured.contribute(c, _product(dz.view(shape), coefficient), env, keep)
        ds = dz
        if not form.is_identity:
            ds = _product(dz.view(shape), bound.value(form.slope, env, active=keep)).view(dz.shape)
        if dq is not None:
            dq_block.baddbmm_(ds, k[:, start:stop])
        if dk is not None:
            _add(dk, lane, start, stop, ds.transpose(1, 2) @ q)
    if dq is not None:
        dq[lane.batch, block, lane.heads] += dq_block.view(b, hkv * lane.group, len(q_idx), -1).transpose(1, 2)


def _product(dz: Tensor, factor: Tensor) -> Tensor:
    """dz * factor, 0 where dz is: the factor may be infinite where nothing passes."""
    return torch.where(dz == 0, torch.zeros_like(dz), dz * factor)


def _weights(z: Tensor, normalizer: Normalizer) -> tuple[Tensor, Tensor]:
    """Weights of the sigmoid and relu normalisers, and their slopes; 0 at dropped keys."""
    dropped = z == -torch.inf
    finite = z.masked_fill(dropped, 0.0)
    if normalizer is Normalizer.SIGMOID:
        w = finite.sigmoid()
        return w.masked_fill(dropped, 0.0), (w * (1 - w)).masked_fill(dropped, 0.0)
    return finite.relu(), (finite > 0).to(z.dtype)


def _add(total: Tensor, lane: blockwise._Lane, start: int, stop: int, block: Tensor) -> None:
    """Add (batch * KV heads, keys, columns) to keys [start, stop) of (B, Skv, Hkv, columns)."""
    b, hkv = lane.sizes
    first = lane.heads.start // max(lane.group, 1)
    keys = total[lane.batch, start:stop, first : first + hkv]
    keys += block.view(b, hkv, stop - start, -1).transpose(1, 2)
