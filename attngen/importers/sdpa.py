"""torch's scaled_dot_product_attention to a spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attngen.importers.draft import Draft, no_dropout
from attngen.importers.imported import Imported, refused

if TYPE_CHECKING:
    import torch


def from_sdpa(
    *,
    head_dim: int,
    head_dim_v: int | None = None,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
    name: str = "sdpa",
    dtype: str = "bf16",
    layout: str = "bhsd",
    **options: object,
) -> Imported:
    """The spec that the arguments of scaled_dot_product_attention mean, with the tensors among them.

        spec, tensors = attngen.from_sdpa(head_dim=64, is_causal=True)
        o = attngen.build(spec)(q, k, v, **tensors)            # q, k, v as SDPA takes them: (B, H, S, D)

    Conventions:

    - is_causal: j <= i for row i and key j, aligned top-left whatever the lengths.
    - attn_mask: bool keeps where true; a float is added to the scaled score, -inf takes a key out. It broadcasts to
      (batch, heads_q, seqlen_q, seqlen_kv) and becomes a captured tensor without its axes of extent 1. torch's
      causal_upper_left and causal_lower_right objects become masks by position.
    - scale: None is 1 / sqrt(head_dim). enable_gqa changes nothing: a spec's query heads always share KV heads as the
      tensors say.

    Raises: AttnError E0706 (dropout; is_causal beside attn_mask), E0705 (dtypes), E01xx to E03xx.
    """
    no_dropout("dropout_p", dropout_p)
    draft = Draft()
    if is_causal:
        if attn_mask is not None:
            raise refused("is_causal", "given beside attn_mask", "give one of them, as torch asks, too")
        draft.masks.append("kv_idx <= q_idx")
    if attn_mask is not None:
        _mask(draft, attn_mask)
    shape = {"head_dim": head_dim, "head_dim_v": head_dim_v, "scale": scale, "dtype": dtype, "layout": layout}
    return draft.finished(name, {**shape, **options})


def _mask(draft: Draft, mask: torch.Tensor) -> None:
    import torch
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if isinstance(mask, CausalBias):
        draft.masks.append("kv_idx <= q_idx" if mask.variant is CausalVariant.UPPER_LEFT else "kv_idx <= q_pos")
    elif mask.dtype is torch.bool:
        draft.masks.append(draft.broadcast("keep", mask, "attn_mask"))
    elif mask.is_floating_point():
        draft.score = f"s + {draft.broadcast('bias', mask, 'attn_mask')}"
    else:
        raise refused("attn_mask", f"is {mask.dtype}", "give bool (true keeps) or a float that is added to the score")
