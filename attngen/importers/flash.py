"""FlashAttention's arguments to a spec (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attngen.importers.draft import Draft, no_dropout, vector
from attngen.importers.imported import Imported, declared, refused

if TYPE_CHECKING:
    import torch

#: The largest cap whose scores a bf16 kernel takes without following their maxima (passes/compute, REACH).
BOUNDED_CAP = 50.0


def from_flash(
    *,
    head_dim: int,
    head_dim_v: int | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    learnable_sink: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    name: str = "flash",
    dtype: str = "bf16",
    layout: str = "bshd",
    **options: object,
) -> Imported:
    """The spec that FlashAttention's arguments mean, with the tensors among them.

        spec, tensors = attngen.from_flash(head_dim=128, causal=True, window_size=(127, 0))
        o = attngen.build(spec)(q, k, v, **tensors)            # q, k, v as flash_attn_func takes them: (B, S, H, D)

    Conventions, those of version 2.1 and later, for row i and key j of sequences of Sq rows and Sk keys:

    - causal: j <= i + Sk - Sq (aligned bottom-right).
    - window_size (left, right): i + Sk - Sq - left <= j <= i + Sk - Sq + right, both ends included; -1 or None is no
      bound; `causal` makes right 0. (127, 0) keeps 128 keys. The widths become params: another width never recompiles.
    - softcap: cap * tanh(s / cap) of the scaled score, a param; 0 is none. Up to 50 it stands for caps from 1 (or its
      own, if that is less) to 50, whose kernels follow no maxima; of a larger one every cap is taken.
    - alibi_slopes (heads) or (batch, heads), fp32: minus slope * |i + Sk - Sq - j|, after the softcap.
    - softmax_scale: None is 1 / sqrt(head_dim).
    - learnable_sink (heads): one more logit a head in the denominator, not scaled.
    - seqused_q, seqused_k (batch): rows and keys that a padded sequence has; Sq and Sk above are these. A row beyond
      its sequence gives 0.
    - cu_seqlens_q, cu_seqlens_k (sequences + 1): packed sequences, called as one batch element: q (1, total_q, H, D),
      k and v (1, total_k, H, D). Each row's first key, end of keys and diagonal become captured tensors of total_q
      ints, so that other lengths are other tensors of the same spec. Without cu_seqlens_k it is cu_seqlens_q.
    - layout="varlen" or "padded": the lengths go to the call instead, which takes q, k and v as flash_attn_varlen_func
      does, (total, H, D), or padded, (B, S, H, D); they are among `tensors`, and the mask says nothing of them.

    Raises: AttnError E0706 (dropout, arguments that contradict each other), E0705 (dtypes), E01xx to E03xx.
    """
    no_dropout("dropout_p", dropout_p)
    draft = Draft()
    rows: torch.Tensor | None = None
    if layout in ("varlen", "padded"):
        position = _by_layout(draft, layout, (cu_seqlens_q, cu_seqlens_k), (seqused_q, seqused_k))
    elif cu_seqlens_q is not None or cu_seqlens_k is not None:
        if seqused_q is not None or seqused_k is not None:
            raise refused("seqused_q, seqused_k", "given beside cu_seqlens", "give the lengths by cu_seqlens alone")
        position, rows = _packed(draft, cu_seqlens_q, cu_seqlens_k)
    else:
        position = _padded(draft, seqused_q, seqused_k)
    left, right = _window(window_size)
    draft.band(position, left, 0 if causal else right)
    if softcap:
        if softcap < 0:
            raise refused("softcap", f"is {softcap}", "give a positive number, or 0 for none")
        # a declared range lets kernels do without maxima (passes/score_bound)
        span = {"minimum": min(float(softcap), 1.0), "maximum": BOUNDED_CAP} if softcap <= BOUNDED_CAP else {}
        draft.param("cap", float(softcap), **span)
        draft.score = "cap * tanh(s / cap)"
    if alibi_slopes is not None:
        draft.score += f" - {_slopes(draft, alibi_slopes, rows)} * abs({position} - kv_idx)"
    if learnable_sink is not None:
        draft.sink = f"{draft.tensor('sinks', vector('learnable_sink', learnable_sink), ['heads_q'])}[h]"
    if deterministic:
        options["deterministic"] = True
    shape = {"head_dim": head_dim, "head_dim_v": head_dim_v, "scale": softmax_scale, "dtype": dtype, "layout": layout}
    return draft.finished(name, {**shape, **options})


def _window(window: Sequence[int | None]) -> tuple[int | None, int | None]:
    sides = tuple(window)
    if len(sides) != 2:
        raise refused("window_size", f"has {len(sides)} numbers", "give (left, right); -1 is no bound")
    bounds: list[int | None] = []
    for side in sides:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < -1):
            raise refused("window_size", f"holds {str(side)[:40]}", "give whole numbers from 0 up, or -1 for no bound")
        bounds.append(None if side in (None, -1) else side)
    return bounds[0], bounds[1]


def _by_layout(
    draft: Draft, layout: str, starts: tuple[torch.Tensor | None, ...], used: tuple[torch.Tensor | None, ...]
) -> str:
    """Lengths that a call of a ragged layout takes, with its captured tensors; the position of a row."""
    own, other, names = (starts, used, ("cu_seqlens_q", "cu_seqlens_k"))
    if layout == "padded":
        own, other, names = used, starts, ("seqused_q", "seqused_k")
    if any(x is not None for x in other):
        wanted = " and ".join(names)
        raise refused(f"layout={layout!r}", "is given beside lengths of the other kind", f"give {wanted}")
    if layout == "varlen" and own[0] is None:
        raise refused("layout='varlen'", "is given without cu_seqlens_q", "give cu_seqlens_q, and cu_seqlens_k too")
    for name, x in zip(names, own, strict=True):
        if x is not None:
            if x.dim() != 1 or x.is_floating_point():
                raise refused(name, f"is {x.dtype} of shape {tuple(x.shape)}", "give int32 with one axis")
            word = f"{name[:-1]}kv" if name.endswith("_k") else name
            draft.given[word] = declared(word, x)[1]
    return "q_pos"


def _padded(draft: Draft, used_q: torch.Tensor | None, used_k: torch.Tensor | None) -> str:
    """The position of a row among its keys."""
    if used_q is None and used_k is None:
        return "q_pos"
    rows, keys = "seqlen_q", "seqlen_kv"
    if used_k is not None:
        keys = f"{draft.tensor('len_kv', vector('seqused_k', used_k), ['batch'])}[b]"
        draft.masks.append(f"kv_idx < {keys}")
    if used_q is not None:
        rows = f"{draft.tensor('len_q', vector('seqused_q', used_q), ['batch'])}[b]"
        draft.masks.append(f"q_idx < {rows}")
    return f"q_idx + ({keys} - {rows})"


def _packed(draft: Draft, cu_q: torch.Tensor | None, cu_k: torch.Tensor | None) -> tuple[str, torch.Tensor]:
    """The position of a row among the packed keys, and the sequence that each row belongs to."""
    import torch

    if cu_q is None:
        raise refused("cu_seqlens_k", "given without cu_seqlens_q", "give both, or cu_seqlens_q alone where they agree")
    cu_k = cu_q if cu_k is None else cu_k
    for option, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cu.dim() != 1 or cu.is_floating_point() or len(cu) < 2:
            raise refused(option, f"is {cu.dtype} of shape {tuple(cu.shape)}", "give int32 of shape (sequences + 1)")
        if int(cu[0]) or bool((cu.diff() < 0).any()):
            raise refused(option, "does not start at 0, or decreases", "give the running sum of the lengths")
    if len(cu_q) != len(cu_k):
        raise refused("cu_seqlens_k", f"has {len(cu_k)} entries, cu_seqlens_q {len(cu_q)}", "give one a sequence")
    sequence = torch.repeat_interleave(torch.arange(len(cu_q) - 1, device=cu_q.device), cu_q.diff())
    start_q, first, end = cu_q[:-1][sequence], cu_k[:-1][sequence], cu_k[1:][sequence]
    lengths_q = cu_q.diff()[sequence]
    draft.tensor("first_key", first, ["seqlen_q"], sorted=True)
    draft.tensor("end_key", end, ["seqlen_q"], sorted=True)
    draft.masks += ["kv_idx >= first_key[q_idx]", "kv_idx < end_key[q_idx]"]
    draft.tensor("diagonal", end - lengths_q - start_q, ["seqlen_q"])
    return "q_idx + diagonal[q_idx]", sequence


def _slopes(draft: Draft, slopes: torch.Tensor, sequence: torch.Tensor | None) -> str:
    if slopes.dim() == 1:
        return f"{draft.tensor('slopes', slopes, ['heads_q'])}[h]"
    if slopes.dim() != 2:
        raise refused("alibi_slopes", f"has shape {tuple(slopes.shape)}", "give (heads) or (batch, heads)")
    if sequence is None:
        return f"{draft.tensor('slopes', slopes, ['batch', 'heads_q'])}[b, h]"
    return f"{draft.tensor('slopes', slopes[sequence], ['seqlen_q', 'heads_q'])}[q_idx, h]"
