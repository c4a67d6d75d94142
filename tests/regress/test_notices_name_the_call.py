"""A notice named a line of attngen's own: calls with gradients or of the other dtype pass through more frames than a
fixed count says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import attngen
from attngen.jit import notice

PLAIN = "attn 1\nattention a {\n  head_dim = 64\n}\n"
WIDE = "attn 1\nattention a {\n  head_dim = 320\n}\n"


def qkv(dtype: torch.dtype = torch.bfloat16, *, grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(1, 8, 1, 64, dtype=dtype, requires_grad=grad) for _ in range(3)]


WAYS: dict[str, Callable[[], Any]] = {
    "call": lambda: attngen.build(PLAIN)(*qkv()),
    "gradients": lambda: attngen.build(PLAIN)(*qkv(grad=True)),
    "the other dtype": lambda: attngen.build(PLAIN)(*qkv(torch.float16)),
    "the other dtype with gradients": lambda: attngen.build(PLAIN)(*qkv(torch.float16, grad=True)),
    "a spec that no kernel serves": lambda: attngen.build(WIDE),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_line_is_the_callers(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "_said", set())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", attngen.AttngenNotice)
        WAYS[way]()
    (one,) = (w for w in said if issubclass(w.category, attngen.AttngenNotice))
    assert one.filename == __file__
