"""Element formats of matrix operands: raw bytes to fp32 (PTX ISA, "Alternate Floating-Point Data Formats").

e4m3 is the OCP form without infinities (S.1111.111 is NaN), e5m2 has IEEE's; tf32 takes the upper 19 bits of a word.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"

BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


def _float8(exponent_bits: int, mantissa_bits: int) -> Array:
    """The 256 values of a minifloat: e5m2 has infinities and NaNs as IEEE, e4m3 only the all-ones NaN."""
    code = np.arange(256)
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    fraction = mantissa / (1 << mantissa_bits)
    value = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    top = (1 << exponent_bits) - 1
    if exponent_bits == 5:
        value = np.where(exponent == top, np.where(mantissa == 0, np.inf, np.nan), value)
    else:
        value = np.where((exponent == top) & (mantissa == (1 << mantissa_bits) - 1), np.nan, value)
    return np.where(code & 0x80, -value, value).astype(np.float32)


E4M3, E5M2 = _float8(4, 3), _float8(5, 2)


def to_f32(raw: Array, type_: str) -> Array:
    """fp32 values of the elements in `raw`, contiguous uint8[..., bytes]."""
    if type_ == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if type_ == "f16":
        return raw.view(np.float16).astype(np.float32)
    if type_ == "tf32":
        return (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    if type_ == "e4m3":
        return E4M3[raw]
    if type_ == "e5m2":
        return E5M2[raw]
    if type_ == "s8":
        return raw.view(np.int8).astype(np.float32)
    if type_ == "u8":
        return raw.astype(np.float32)
    raise ValueError(f"no format {type_}")
