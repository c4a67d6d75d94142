"""The options of cuDNN's sdpa node to a spec."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attngen.importers.draft import Draft, no_dropout, vector
from attngen.importers.imported import Imported, number, refused

if TYPE_CHECKING:
    import torch


def from_cudnn(
    *,
    head_dim: int,
    head_dim_v: int | None = None,
    attn_scale: float = 1.0,
    use_causal_mask: bool = False,
    use_causal_mask_bottom_right: bool = False,
    sliding_window_length: int | None = None,
    diagonal_alignment: object = None,
    diagonal_band_left_bound: int | None = None,
    diagonal_band_right_bound: int | None = None,
    bias: torch.Tensor | None = None,
    use_alibi_mask: bool = False,
    heads_q: int | None = None,
    use_padding_mask: bool = False,
    seq_len_q: torch.Tensor | None = None,
    seq_len_kv: torch.Tensor | None = None,
    sink_token: torch.Tensor | None = None,
    dropout: object = None,
    use_deterministic_algorithm: bool = False,
    name: str = "cudnn",
    dtype: str = "bf16",
    layout: str = "bhsd",
    **options: object,
) -> Imported:
    """The spec that the options of cuDNN's sdpa node mean, with the tensors among them.

    Conventions, for row i and key j:

    - attn_scale: 1.0 unless given, as in cuDNN, not 1 / sqrt(head_dim).
    - The diagonal is j = i (TOP_LEFT, the default) or j = i + Sk - Sq (BOTTOM_RIGHT). use_causal_mask is TOP_LEFT with
      right bound 0, use_causal_mask_bottom_right is BOTTOM_RIGHT with right bound 0.
    - diagonal_band_left_bound L keeps L keys up to and with the diagonal (one less than FlashAttention's left = L);
      sliding_window_length is its older name. diagonal_band_right_bound R keeps R keys after it.
    - bias is added to the scaled score: it broadcasts to (batch, heads_q, seqlen_q, seqlen_kv).
    - use_alibi_mask subtracts slope * distance, slopes of `heads_q` heads by Press et al.; it asks for right bound 0.
    - use_padding_mask: seq_len_q and seq_len_kv (batch elements, in any shape) are the true lengths; Sq and Sk of the
      diagonal are these. A row beyond its sequence gives 0.
    - sink_token (1, heads_q, 1, 1): one more logit a head in the denominator.

    Lengths and bounds are run-time values of the spec. `diagonal_alignment` is cuDNN's enum or its name.
    Raises: AttnError E0706 (dropout, options that contradict each other), E0705 (dtypes), E01xx to E03xx.
    """
    no_dropout("dropout", dropout[0] if isinstance(dropout, tuple) else dropout)
    draft = Draft()
    bottom_right = _aligned(diagonal_alignment, use_causal_mask, use_causal_mask_bottom_right)
    right = (
        diagonal_band_right_bound
        if diagonal_band_right_bound is None
        else number("diagonal_band_right_bound", diagonal_band_right_bound, 0)
    )
    if use_causal_mask or use_causal_mask_bottom_right:
        if right:
            raise refused("diagonal_band_right_bound", "given beside a causal mask, which is bound 0", "give one")
        right = 0
    left = _left(sliding_window_length, diagonal_band_left_bound, right)

    position = "q_pos" if bottom_right else "q_idx"
    if use_padding_mask:
        if seq_len_q is None or seq_len_kv is None:
            raise refused("use_padding_mask", "given without seq_len_q and seq_len_kv", "give both lengths")
        draft.tensor("len_q", vector("seq_len_q", seq_len_q), ["batch"])
        draft.tensor("len_kv", vector("seq_len_kv", seq_len_kv), ["batch"])
        draft.masks += ["kv_idx < len_kv[b]", "q_idx < len_q[b]"]
        position = "q_idx + (len_kv[b] - len_q[b])" if bottom_right else "q_idx"
    elif seq_len_q is not None or seq_len_kv is not None:
        raise refused("seq_len_q, seq_len_kv", "given without use_padding_mask", "set use_padding_mask")
    draft.band(position, None if left is None else left - 1, right)

    if bias is not None:
        draft.score = f"s + {draft.broadcast('bias', bias, 'bias')}"
    if use_alibi_mask:
        if right != 0:
            raise refused("use_alibi_mask", "without a causal mask", "set use_causal_mask: cuDNN asks for it, too")
        if heads_q is None:
            raise refused("use_alibi_mask", "the slopes depend on the number of heads", "give heads_q")
        draft.tensor("slopes", alibi_slopes(number("heads_q", heads_q, 1)), ["heads_q"])
        draft.score += f" - slopes[h] * ({position} - kv_idx)"
    if sink_token is not None:
        draft.sink = f"{draft.tensor('sinks', vector('sink_token', sink_token), ['heads_q'])}[h]"
    if use_deterministic_algorithm:
        options["deterministic"] = True
    shape = {"head_dim": head_dim, "head_dim_v": head_dim_v, "scale": attn_scale, "dtype": dtype, "layout": layout}
    return draft.finished(name, {**shape, **options})


def alibi_slopes(heads: int) -> torch.Tensor:
    """Slopes of ALiBi, fp32 (heads): 2 ** (-8 (h + 1) / n) for the largest power of two n within `heads`, and beyond it
    every other slope of 2 n heads. Source: Press et al. 2021, section 3 and its code.
    """
    import torch

    n = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8 * (h + 1) / n) for h in range(n)]
    return torch.tensor(slopes + [2.0 ** (-4 * (2 * h + 1) / n) for h in range(heads - n)])


def _aligned(alignment: object, top_left: bool, bottom_right: bool) -> bool:
    """Whether the diagonal ends at the last row and the last key."""
    named = str(getattr(alignment, "name", alignment)).rsplit(".", 1)[-1].upper()
    if alignment is not None and named not in ("TOP_LEFT", "BOTTOM_RIGHT"):
        raise refused("diagonal_alignment", f"is {named[:40]}", "give TOP_LEFT or BOTTOM_RIGHT")
    if top_left and bottom_right:
        raise refused("use_causal_mask", "given beside use_causal_mask_bottom_right", "give one of them")
    if (top_left and named == "BOTTOM_RIGHT") or (bottom_right and named == "TOP_LEFT"):
        raise refused("diagonal_alignment", f"{named} contradicts the causal mask", "give one of them")
    return bottom_right or named == "BOTTOM_RIGHT"


def _left(older: int | None, bound: int | None, right: int | None) -> int | None:
    if older is not None and bound is not None:
        raise refused("sliding_window_length", "given beside diagonal_band_left_bound", "give one: they mean the same")
    if older is not None and right != 0:
        raise refused(
            "sliding_window_length", "given without a causal mask", "set use_causal_mask, or give the band's bounds"
        )
    given = bound if older is None else older
    return None if given is None else number("the left bound", given, 1)
