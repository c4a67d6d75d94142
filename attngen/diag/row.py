"""One row of the code table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Code:
    """A diagnostic's code, its slug, one line on what it means, and a longer text with an example and the mend."""

    code: str
    slug: str
    summary: str
    explanation: str
