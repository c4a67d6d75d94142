"""What `tests/gpu/sanitize.py` makes of compute-sanitizer's output."""

from __future__ import annotations

from pathlib import Path

import pytest
from sanitizer_known import known_kind
from sanitizer_log import Report, reports, verdict

CLEAN = "========= COMPUTE-SANITIZER\nall done\n========= ERROR SUMMARY: 0 errors\n"
BARRIER = "".join(
    f"""\
========= Barrier error detected. Divergent thread(s) in block.
=========     at some_bwd_1+0x990 in some.py:31
=========     by thread ({thread},0,0) in block (0,0,0)
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: main in sanitize.py:89
=========
"""
    for thread in (352, 353)
)
RACES = """\
========= Error: Race reported between Write access at some_bwd_1+0x250 in some.py:7
=========     and Read access at some_bwd_1+0xb0 in some.py:9 [96 hazards]
=========     and Read access at some_bwd_1+0xc0 in some.py:9 [96 hazards]
=========
========= Error: Race reported between Write access at some_bwd_1+0x250 in some.py:7
=========     and Read access at some_bwd_1+0xd0 in some.py:9 [4 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


def test_a_fault_of_many_threads_is_one_report() -> None:
    said = "Barrier error detected. Divergent thread(s) in block."
    assert reports(BARRIER) == [Report(said, "some_bwd_1+0x990 in some.py:31", (), 2)]


def test_races_on_one_write_are_one_report() -> None:
    (race,) = reports(RACES)
    assert (race.what, race.at) == ("Race reported between Write access", "some_bwd_1+0x250 in some.py:7")
    assert [x.split("+")[1] for x in race.beside] == ["0xb0 in some.py:9", "0xc0 in some.py:9", "0xd0 in some.py:9"]
    assert race.times == 2
    assert "3 accesses, first at some_bwd_1+0xb0 in some.py:9 (2 times)" in str(race)


def test_what_a_run_comes_to() -> None:
    def said(log: str, code: int, known: bool = False) -> tuple[bool, str]:
        return verdict(log, code, "all done", lambda _: known)[:2]

    assert said(CLEAN, 0) == (True, "ok")
    assert said(CLEAN, 1) == (False, "exit 1")
    assert said(CLEAN.replace("all done", ""), 0) == (False, "did not finish")
    assert said(CLEAN + BARRIER + RACES, 0) == (False, "2 reports")
    assert said(CLEAN + BARRIER + RACES, 0, known=True) == (True, "ok, 2 known")
    assert verdict(CLEAN + RACES, 0, "all done", lambda _: False)[2] == reports(RACES)


KERNEL = """\
def bulk_load(dst):
    cute.arch.inline_ptx(dst)

def rows(w):
    copy(w.sLSE[0])
    copy(w.sV[0])

def tell(slot):
    slot[0] = 1
"""


@pytest.mark.parametrize(
    ("write", "reads", "known"),
    [(2, (5,), True), (2, (5, 6), False), (2, (6,), False), (9, (5,), False), (9, (9,), True), (6, (6,), False)],
)
def test_a_race_is_known_by_what_its_lines_say(tmp_path: Path, write: int, reads: tuple[int, ...], known: bool) -> None:
    path = tmp_path / "some.py"
    path.write_text(KERNEL)
    beside = tuple(f"kernel+0x10 in some.py:{n}" for n in reads)
    race = Report("Race reported between Write access", f"kernel+0x90 in some.py:{write}", beside, 1)
    assert known_kind(race, path) is known
    assert not known_kind(race._replace(what="Barrier error detected. Divergent thread(s) in block."), path)
    assert not known_kind(race._replace(beside=("kernel+0x10",)), path)
    assert not known_kind(race._replace(beside=()), path)


def test_a_race_that_is_told_from_its_read_is_known_too(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(KERNEL)
    read, write = "kernel+0x90 in some.py:5", "kernel+0x10 in some.py:2"
    race = Report("Race reported between Read access", read, (write, write), 1)
    assert known_kind(race, path)
    assert not known_kind(race._replace(at=write, beside=(read,)), path)
    assert not known_kind(race._replace(beside=(write, read)), path)
