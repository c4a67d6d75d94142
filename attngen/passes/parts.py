"""parts: what a spec asks of kernels whose q, k and v are three tensors.

Rewrite   a spec  -->  the spec of its kernel: slices of one packed tensor, and V as columns of K, are strides of a call
Keeps     meaning: the kernel reads the same elements, a TMA descriptor each for Q, K and V
"""

from __future__ import annotations

from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout


def kernel_spec(spec: AttentionSpec) -> AttentionSpec:
    """`spec` as its kernel sees it: q, k and v are tensors of their own, with any strides. Its doc says what they are.

    A spec that takes them so already is returned as it is.
    """
    changes: dict[str, object] = {}
    notes: list[str] = []
    if spec.layout is Layout.PACKED_QKV:
        changes["layout"] = Layout.BSHD
        notes.append("q, k and v are slices of one qkv: heads_q heads of q, then heads_kv of k, then heads_kv of v.")
    if spec.v_view_start is not None:
        changes["v_view_start"] = None
        notes.append(f"v is a view of k: k[..., {spec.v_view_start}:{spec.v_view_start + spec.head_dim_v}].")
    if not changes:
        return spec
    return spec.replace(doc="\n".join([*([spec.doc] if spec.doc else []), *notes]), **changes)
