"""What a pass returns when it cannot live with an upstream choice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reject:
    """The candidate ends here, and why; the search takes the next one. No pass repairs another's section."""

    by: str
    why: str
    #: What was needed over what there is: the smaller, the nearer the candidate came.
    excess: float = float("inf")
