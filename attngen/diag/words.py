"""Words that reports share."""

from __future__ import annotations


def counted(n: int, thing: str) -> str:
    """`1 kernel`, `2 kernels`."""
    return f"{n} {thing}{'' if n == 1 else 's'}"
