"""What compute-sanitizer wrote, read: its reports, each once, and what a kernel's run comes to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

_RACE = re.compile(r"(?:Error|Warning): (Race reported between (?:Write|Read) access) at (.+)")
_BESIDE = re.compile(r"and (?:Write|Read) access at (.+)")
_AT = re.compile(r"at (.+)")
_HAZARDS = re.compile(r" \[\d+ hazards\]$")
#: How those of the tool's lines begin that say nothing of a fault.
_SILENT = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "Target application", "LEAK SUMMARY")


class Report(NamedTuple):
    """One fault that a tool names, however often and by however many threads."""

    what: str  #: in the tool's words
    at: str  #: kernel+offset, and the place in the source where the object knows it
    beside: tuple[str, ...]  #: of a race: where the other accesses are
    times: int  #: how often it stands in the log

    def __str__(self) -> str:
        others = f", {len(self.beside)} accesses, first at {self.beside[0]}" if self.beside else ""
        return f"{self.what} at {self.at}{others} ({self.times} times)"


def reports(log: str) -> list[Report]:
    """The reports of a log, in the order in which it first names them."""
    found: dict[tuple[str, str], tuple[set[str], int]] = {}
    for what, at, beside in _each(log):
        others, times = found.get((what, at), (set(), 0))
        found[what, at] = others | beside, times + 1
    return [Report(what, at, tuple(sorted(others)), n) for (what, at), (others, n) in found.items()]


def _each(log: str) -> Iterator[tuple[str, str, set[str]]]:
    """What, where, and beside what. The lines of a report after its first are set in further."""
    lines = [line.removeprefix("=========") for line in log.splitlines() if line.startswith("=========")]
    for i, line in enumerate(lines):
        said = line.strip()
        if not said or _set_in(line) or said.startswith(_SILENT):
            continue
        below: list[str] = []
        for further in lines[i + 1 :]:
            if not _set_in(further):
                break
            below.append(_HAZARDS.sub("", further.strip()))
        if race := _RACE.match(said):
            yield race[1], race[2], {other[1] for one in below if (other := _BESIDE.match(one))}
        else:
            yield said, next((at[1] for one in below if (at := _AT.match(one))), ""), set()


def _set_in(line: str) -> bool:
    return line.startswith("  ") and not line.isspace()


def verdict(
    log: str, returncode: int, finished: str, known: Callable[[Report], bool]
) -> tuple[bool, str, list[Report]]:
    """Whether a run is clean, that in a word, and its reports that are not known.

    `finished`: what the run itself writes at its end.
    """
    found = reports(log)
    unknown = [report for report in found if not known(report)]
    if unknown:
        return False, f"{len(unknown)} reports", unknown
    if finished not in log:
        return False, "did not finish", []
    if returncode:
        return False, f"exit {returncode}", []
    return True, f"ok, {len(found)} known" if found else "ok", []
