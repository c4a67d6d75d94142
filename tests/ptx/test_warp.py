"""Exchange between lanes: shuffles, votes, matches, reductions, election."""

from __future__ import annotations

import random
from functools import reduce

import pytest
from lanes import finish, run, value, warp
from ptxcheck.report import FaultFound

R = {f"%r{k}": "b32" for k in range(8)} | {f"%p{k}": "pred" for k in range(4)} | {"%q": "b64"}
LANES = list(range(32))
FULL = 0xFFFFFFFF


def expected_shuffle(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The manual's pseudocode: source lane and predicate."""
    bval, cval, mask = b & 31, c & 31, c >> 8 & 31
    max_lane = (lane & mask) | (cval & ~mask)
    min_lane = lane & mask
    if mode == "up":
        j, p = lane - bval, lane - bval >= max_lane
    elif mode == "down":
        j, p = lane + bval, lane + bval <= max_lane
    elif mode == "bfly":
        j, p = lane ^ bval, lane ^ bval <= max_lane
    else:
        j = min_lane | (bval & ~mask)
        p = j <= max_lane
    return (j if p else lane), p


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle(mode: str) -> None:
    xs = [random.Random(1).getrandbits(32) ^ k for k in LANES]
    segments = [0x1F, 0x0, 0x1C03, 0x181F, 0x1E01, 0x1000, 0x100F, 0x1F1F]
    for c in segments:
        for b in (0, 1, 2, 3, 5, 16, 31, 33):
            want = [expected_shuffle(mode, lane, b, c) for lane in LANES]
            # As literals, and in registers.
            for bt, ct in ((str(b), str(c)), ("%r2", "%r3")):
                w = run(f"shfl.sync.{mode}.b32 %r0|%p0, %r1, {bt}, {ct}, -1;", R, {"%r1": xs, "%r2": b, "%r3": c})
                assert value(w, "%r0") == [xs[j] for j, _ in want], (b, c)
                assert value(w, "%p0") == [p for _, p in want], (b, c)
    rng = random.Random(2)
    bs = [rng.randrange(32) for _ in LANES]
    w = run(f"shfl.sync.{mode}.b32 %r1, %r1, %r2, 0x1f, -1;", R, {"%r1": xs, "%r2": bs})
    want = [expected_shuffle(mode, lane, b, 0x1F) for lane, b in zip(LANES, bs, strict=True)]
    assert value(w, "%r1") == [xs[j] for j, _ in want]


def test_reduction_by_butterflies() -> None:
    body = "".join(f"shfl.sync.bfly.b32 %r1, %r0, {d}, 31, -1; add.u32 %r0, %r0, %r1;" for d in (16, 8, 4, 2, 1))
    assert value(run(body, R, {"%r0": LANES}), "%r0") == [496] * 32


def test_vote() -> None:
    p = [k % 5 == 0 for k in LANES]
    bits = sum(1 << k for k in LANES if p[k])
    body = """vote.sync.ballot.b32 %r0, %p0, -1; vote.sync.all.pred %p1, %p0, -1; vote.sync.any.pred %p2, %p0, -1;
              vote.sync.uni.pred %p3, %p0, -1; vote.sync.ballot.b32 %r1, !%p0, -1;"""
    w = run(body, R, {"%p0": p})
    assert value(w, "%r0") == [bits] * 32 and value(w, "%r1") == [bits ^ FULL] * 32
    assert [value(w, f"%p{k}")[0] for k in (1, 2, 3)] == [False, True, False]
    for same in (True, False):
        w = run(body, R, {"%p0": same})
        assert [value(w, f"%p{k}")[0] for k in (1, 2, 3)] == [same, same, True]


def test_member_masks() -> None:
    """Two halves execute one instruction with their own masks, together or apart."""
    body = """mov.u32 %r0, %laneid; setp.lt.u32 %p0, %r0, 12; selp.b32 %r1, 0x00000FFF, 0xFFFFF000, %p0;
              setp.gt.u32 %p1, %r0, 8; vote.sync.ballot.b32 %r2, %p1, %r1; vote.sync.all.pred %p2, %p1, %r1;
              redux.sync.add.u32 %r3, %r0, %r1; elect.sync %r4|%p3, %r1; match.any.sync.b32 %r5, %r4, %r1;"""
    w = run(body, R, {})
    assert value(w, "%r2") == [0xE00] * 12 + [0xFFFFF000] * 20
    assert value(w, "%p2") == [False] * 12 + [True] * 20
    assert value(w, "%r3") == [66] * 12 + [430] * 20
    assert value(w, "%r4") == [0] * 12 + [12] * 20
    assert value(w, "%p3") == [k in (0, 12) for k in LANES]
    assert value(w, "%r5") == [0xFFF] * 12 + [0xFFFFF000] * 20


def test_lanes_that_arrive_later_are_waited_for() -> None:
    """Lanes of a mask that took another way meet at the instruction; a branch skips it for lanes outside the mask."""
    body = """
        mov.u32 %r0, %laneid; mov.u32 %r1, 0; setp.lt.u32 %p0, %r0, 8; setp.ge.u32 %p1, %r0, 24;
        @%p1 bra END;
        @%p0 bra MEET;
        mul.lo.u32 %r0, %r0, 3;
    MEET:
        vote.sync.ballot.b32 %r1, 1, 0x00FFFFFF;
        shfl.sync.idx.b32 %r2, %r0, 23, 31, 0x00FFFFFF;
    END:
        activemask.b32 %r3;
    """
    for limit in (1, 2, 3, 50):
        w = warp(body, R)
        while not w.done:
            assert w.step(limit)
        assert value(w, "%r1") == [0xFFFFFF] * 24 + [0] * 8
        assert value(w, "%r2")[:24] == [69] * 24


def test_match() -> None:
    xs = [k % 3 for k in LANES]
    body = "match.any.sync.b32 %r0, %r1, -1; match.all.sync.b32 %r2|%p0, %r1, -1; match.all.sync.b64 %r3|%p1, %q, -1;"
    w = run(body, R, {"%r1": xs, "%q": 1 << 40})
    assert value(w, "%r0") == [sum(1 << j for j in LANES if xs[j] == x) for x in xs]
    assert value(w, "%r2") == [0] * 32 and value(w, "%p0") == [False] * 32
    assert value(w, "%r3") == [FULL] * 32 and value(w, "%p1") == [True] * 32


def test_reductions() -> None:
    rng = random.Random(3)
    xs = [rng.getrandbits(32) for _ in LANES]
    signed = [x - (x >> 31 << 32) for x in xs]
    both = lambda fn: reduce(fn, xs)  # noqa: E731
    want = {
        "add.u32": sum(xs) & FULL,
        "add.s32": sum(xs) & FULL,
        "min.u32": min(xs),
        "max.u32": max(xs),
        "min.s32": min(signed) & FULL,
        "max.s32": max(signed) & FULL,
        "and.b32": both(int.__and__),
        "or.b32": both(int.__or__),
        "xor.b32": both(int.__xor__),
    }
    for name, expected in want.items():
        assert value(run(f"redux.sync.{name} %r0, %r1, -1;", R, {"%r1": xs}), "%r0") == [expected] * 32, name
    floats = [0x3F800000, 0xC0000000, 0x7FC00000] + [0] * 29
    for name, expected in (
        ("min.f32", 0xC0000000),
        ("max.f32", 0x3F800000),
        ("max.abs.f32", 0x40000000),
        ("max.NaN.f32", 0x7FFFFFFF),
    ):
        assert value(run(f"redux.sync.{name} %r0, %r1, -1;", R, {"%r1": floats}), "%r0") == [expected] * 32, name


def test_election_in_a_branch() -> None:
    body = """mov.u32 %r0, %laneid; setp.lt.u32 %p0, %r0, 9; @%p0 bra END;
              elect.sync %r1|%p1, 0xFFFFFE00; @%p1 mov.u32 %r0, 777; elect.sync _|%p2, 0xFFFFFE00; END: ret;"""
    w = run(body, R, {})
    assert value(w, "%r0") == [*range(9), 777, *range(10, 32)]
    assert value(w, "%r1")[9:] == [9] * 23 and value(w, "%p2")[9:] == [True] + [False] * 22


def test_transposed_matrix() -> None:
    """Element (row, column) is number 8 row + column; lane l holds two of row l / 4."""
    packed = [(2 * k + 1) << 16 | 2 * k for k in LANES]
    got = value(run("movmatrix.sync.aligned.m8n8.trans.b16 %r0, %r1;", R, {"%r1": packed}), "%r0")
    flat = [h for g in got for h in (g & 0xFFFF, g >> 16)]
    assert flat == [8 * column + row for row in range(8) for column in range(8)]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("shfl.sync.idx.b32 %r0, %r1, 0, 31, 0xFFFF;", "does not name it"),
        ("setp.lt.u32 %p0, %r1, 4; @!%p0 exit; shfl.sync.idx.b32 %r0, %r1, 9, 31, -1;", "lane 9"),
        ("setp.lt.u32 %p0, %r1, 4; selp.b32 %r2, -1, 0xFFFFFFF0, %p0; vote.sync.any.pred %p1, %p0, %r2;", "different"),
        ("vote.sync.any.pred %p1, 1, %r1;", "does not name it"),
    ],
)
def test_undefined_exchanges_are_faults(body: str, says: str) -> None:
    with pytest.raises(FaultFound, match="divergence") as found:
        finish(warp(body, R, {"%r1": LANES}))
    assert says in str(found.value)
