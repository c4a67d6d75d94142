"""Traced softplus is linear above its threshold, as torch's is; it was log(1 + exp(x)) everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import softplus

import attngen
from attngen.ref.evaluate import evaluate


@pytest.mark.parametrize(
    "options", [{}, {"threshold": 0.5}, {"beta": 2.0, "threshold": 1.5}, {"threshold": -3}], ids=str
)
def test_softplus_above_its_threshold(options: dict[str, Any]) -> None:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return softplus(score, **options)

    s = torch.linspace(-6, 30, 400, dtype=torch.float64)
    found = evaluate(attngen.from_flex(mod, head_dim=64).spec.score, {"s": s})
    assert torch.allclose(found, softplus(s, **options), rtol=0, atol=1e-8)
