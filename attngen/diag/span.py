"""Source text and places in it."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Source:
    """A spec's text and the name it is reported under (`<text>` for a string)."""

    name: str
    text: str
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        starts = [0, *(i + 1 for i, c in enumerate(self.text) if c == "\n")]
        object.__setattr__(self, "_starts", tuple(starts))

    def line_col(self, offset: int) -> tuple[int, int]:
        """1-based line and column of a 0-based character offset."""
        line = bisect.bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    def line(self, number: int) -> str:
        """Text of 1-based line `number`, without its newline."""
        lines = self.text.split("\n")
        return lines[number - 1] if 1 <= number <= len(lines) else ""


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open character range `[start, end)` of a source."""

    source: Source = field(repr=False)
    start: int
    end: int

    def to(self, other: Span) -> Span:
        """The smallest span that covers both (both in one source)."""
        return Span(self.source, min(self.start, other.start), max(self.end, other.end))
