"""Rows of the code table: the reference executions (dense, blockwise, plan)."""

from __future__ import annotations

from attngen.diag.row import Code

REFERENCE: tuple[Code, ...] = (
    Code(
        "E0650",
        "index-outside",
        "an expression reads a captured tensor outside of its extent",
        "The reference executions clamp nothing: an index below 0 or past the end is a fault wherever the element "
        "matters (the mask keeps it, the branch is taken, the left operand of `and`/`or` does not decide). A kernel "
        "does not check. Pass a tensor that covers every index, or clamp the index: `table[min(q_pos - kv_idx, 31)]`.",
    ),
    Code(
        "E0651",
        "reference-arguments",
        "a reference execution lacks an argument, or has one that the spec does not declare",
        "It takes what the spec declares: params without a default, every captured tensor, one q and k for each "
        "branch, (k, v) for each segment.",
    ),
    Code(
        "E0652",
        "reference-shapes",
        "shapes given to a reference execution do not fit the spec",
        "q is (B, Sq, Hq, D), k (B, Skv, Hkv, D), v (B, Skv, Hkv, Dv), whatever layout the spec names; Hq is a "
        "multiple of Hkv. A captured tensor has its declared axes; extent 1 stands for any.",
    ),
)
