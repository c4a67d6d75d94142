"""Faults planted in real kernels: every one is found, as what it is, with its place in the source.

`planted.py` is the table; the kernels without a fault pass under many seeds (test_clean.py, and below).
"""

from __future__ import annotations

import re
from collections import Counter

import inject
import pytest
from inject import NUMBERS, drop, find, kernel, sub
from planted import PLANTED
from ptxcheck.report import KINDS

pytestmark = pytest.mark.dsl
SEEDS = 12  # at most; most are found under the first
#: A launch that cannot be made has no place in the source.
NOWHERE = {"shared-over-budget"}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda p: p.name)
def test_found(planted: inject.Planted) -> None:
    found = find(planted, SEEDS)
    assert found, f"{planted.does}: not found under {SEEDS} seeds"
    assert found.kind in planted.kinds, (
        f"{planted.does}: found after {found.seeds} seeds as {found.kind}\n{found.fault}"
    )
    if found.fault and found.kind not in NOWHERE:
        assert re.search(r"\w\.py:\d+", str(found.fault)), f"no place in the source:\n{found.fault}"


@pytest.mark.parametrize("name", sorted({p.kernel for p in PLANTED}))
def test_nothing_is_found_without_a_fault(name: str) -> None:
    """In the very calls that show the faults; test_clean.py has more seeds."""
    base = kernel(name)
    for seed in range(3):
        assert base.call(base.code, seed), f"seed {seed}"


def test_the_table() -> None:
    """Enough of them, told apart by name and by what they change, and every kind of fault that can be planted."""
    assert len(PLANTED) >= 40
    assert max(Counter(p.name for p in PLANTED).values()) == 1
    assert {k for p in PLANTED for k in p.kinds} <= {NUMBERS, *KINDS}
    planted = [p.plant(kernel(p.kernel).code) for p in PLANTED]
    assert len({(c.ptx, c.host) for c in planted}) == len(PLANTED)


def test_an_edit_that_changes_nothing_is_an_error() -> None:
    code = kernel("product").code
    with pytest.raises(LookupError, match="no line matches"):
        inject.Planted("x", "product", "", "", (), (drop("no.such.instruction"),)).plant(code)
    with pytest.raises(AssertionError, match="changes nothing"):
        inject.Planted("x", "product", "", "", (), (sub("tcgen05", "tcgen05"),)).plant(code)
