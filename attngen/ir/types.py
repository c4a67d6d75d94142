"""Types of the language: expression types, element types, axes of captured tensors."""

from __future__ import annotations

from enum import StrEnum


class Type(StrEnum):
    """Type of an expression: `bool`, `int` (32-bit, positions) or `float` (fp32)."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"


class DType(StrEnum):
    """Element type of a tensor, as written in a spec."""

    BF16 = "bf16"
    FP16 = "fp16"
    F32 = "f32"
    I32 = "i32"
    BOOL = "bool"

    @property
    def bits(self) -> int:
        return {"bf16": 16, "fp16": 16, "f32": 32, "i32": 32, "bool": 8}[self.value]

    @property
    def type(self) -> Type:
        """Type that an element has inside an expression."""
        return {DType.I32: Type.INT, DType.BOOL: Type.BOOL}.get(self, Type.FLOAT)


class Layout(StrEnum):
    """How q, k, v and o are laid out in memory; the head dimension is always contiguous."""

    BSHD = "bshd"
    BHSD = "bhsd"
    PACKED_QKV = "packed_qkv"
    VARLEN = "varlen"
    PADDED = "padded"
    PAGED = "paged"

    @property
    def is_ragged(self) -> bool:
        """Every sequence has lengths of its own, which the call passes as tensors."""
        return self in (Layout.VARLEN, Layout.PADDED)


class Normalizer(StrEnum):
    """What turns kept scores into weights."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    RELU = "relu"


#: Axes whose extent the q, k and v tensors give; any other name in a tensor's dims is free.
KNOWN_DIMS = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "head_dim_v")
