"""Names that a spec may not declare, each with the reason. One table: the checker reads it and the tests walk it."""

from __future__ import annotations

import builtins
import keyword

from attngen.ir.expr import ATOMS
from attngen.ir.functions import FUNCTIONS
from attngen.ir.types import KNOWN_DIMS

_KERNEL = """
ATTN_META PLANS LIMITS compile_plan attngen cutlass cute cuda torch math np numpy sys argparse functools self cls
q k v o p lse out return_lse check scale tile_counter softmax_scale scale_log2 workers stream max_logit
cu_seqlens_q cu_seqlens_k seqused_q seqused_k page_table m_block n_block tidx warp_idx acc_s acc_o row_max row_sum
select floor_div floor_mod minimum maximum absolute Int32 Int64 Float32 Boolean BFloat16 Float16 const_expr
"""
#: Words that an expression gives a meaning of its own.
LANGUAGE_WORDS = tuple(
    ["and", "or", "not", "if", "else", "true", "false", "in", "head_dim", "head_dim_v", "inf", "nan", "auto"]
)
#: What a generated kernel and the callable around it call their own things; params and tensors are arguments of both.
KERNEL_WORDS = tuple(_KERNEL.split())


def _table() -> dict[str, str]:
    table = dict.fromkeys(dir(builtins), "a Python builtin")
    table.update(dict.fromkeys(KERNEL_WORDS, "a name that generated kernels use"))
    table.update(dict.fromkeys((*keyword.kwlist, *keyword.softkwlist), "a Python keyword"))
    table.update(dict.fromkeys(KNOWN_DIMS, "an axis that q, k and v give"))
    table.update(dict.fromkeys((n for n, row in FUNCTIONS.items() if not row.infix), "a function of the language"))
    table.update(dict.fromkeys(ATOMS, "an index or size that the language provides"))
    table.update(dict.fromkeys(LANGUAGE_WORDS, "a word of the language"))
    return table


#: Reason by reserved name.
RESERVED: dict[str, str] = _table()


def reason(name: str, inlined: bool = False) -> str | None:
    """Why `name` may not be declared, or None.

    `inlined`: the name never reaches a kernel (`let`, `def`), so only the language's own words count.
    """
    why = RESERVED.get(name)
    if inlined:
        own = name in ATOMS or name in LANGUAGE_WORDS or (why or "").startswith("a function of")
        return why if own else None
    if name.startswith("_") or name.endswith("_"):
        return "of the pattern that generated kernels keep for themselves"
    return why
