"""What a pass returns when it cannot live with an upstream choice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reject:
    """The candidate ends here, and why; the search takes the next one. No pass repairs another's slot."""

    by: str
    why: str
