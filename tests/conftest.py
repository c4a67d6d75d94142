"""Shared by all tests. Being here, it also puts `tests/` on the path, so that `builders` can be imported."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "attngen", deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("attngen")
