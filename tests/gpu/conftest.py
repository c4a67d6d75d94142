"""Tests that need a Hopper GPU. Elsewhere they are skipped, loudly."""

from __future__ import annotations

import pytest
import torch


def has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="NEEDS A HOPPER GPU: run `pytest -m gpu tests/gpu` on one")
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            if not has_hopper():
                item.add_marker(skip)
