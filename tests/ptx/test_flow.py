"""Control flow: divergence, reconvergence, loops, exits, and the faults of registers and opcodes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from lanes import apply, finish, module, run, value, warp
from ptxcheck import build, machine
from ptxcheck.ptx import PtxSyntaxError
from ptxcheck.report import FaultFound
from ptxcheck.table import UnknownInstruction

R = {f"%r{k}": "b32" for k in range(8)} | {f"%p{k}": "pred" for k in range(4)}
LANES = list(range(32))


def fault(body: str, values: dict[str, object] | None = None, registers: dict[str, str] = R) -> str:
    """The one fault that running `body` finds."""
    with pytest.raises(FaultFound) as found:
        finish(warp(body, registers, values or {}))
    return str(found.value)


# ----------------------------------------------------------------------------------------------- branches and loops
def test_branches_nest_and_meet() -> None:
    body = """
        mov.u32 %r0, %laneid; mov.u32 %r1, 0;
        setp.lt.u32 %p0, %r0, 20; @!%p0 bra ELSE;
        and.b32 %r2, %r0, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra EVEN;
        add.u32 %r1, %r1, 100; bra.uni INNER;
    EVEN:
        add.u32 %r1, %r1, 200;
    INNER:
        vote.sync.ballot.b32 %r3, 1, 0x000FFFFF; bra.uni END;
    ELSE:
        add.u32 %r1, %r1, 300; mov.u32 %r3, 0;
    END:
        activemask.b32 %r4;
    """
    w = run(body, R, {})
    assert value(w, "%r1") == [(200 if k % 2 == 0 else 100) if k < 20 else 300 for k in LANES]
    assert value(w, "%r3") == [0xFFFFF if k < 20 else 0 for k in LANES]
    assert value(w, "%r4") == [0xFFFFFFFF] * 32  # all lanes together again


def test_loops_of_different_lengths() -> None:
    body = """
        mov.u32 %r0, %laneid; mov.u32 %r1, 0; mov.u32 %r2, 0;
    LOOP:
        setp.ge.u32 %p0, %r2, %r0; @%p0 bra OUT;
        add.u32 %r1, %r1, %r2; add.u32 %r2, %r2, 1; bra.uni LOOP;
    OUT:
        activemask.b32 %r4;
    """
    w = run(body, R, {})
    assert value(w, "%r1") == [k * (k - 1) // 2 for k in LANES]
    assert value(w, "%r4") == [0xFFFFFFFF] * 32


class Program:
    """A random structured program over %r0..%r2 as PTX and as what each lane computes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.labels = 0
        self.text: list[str] = []
        self.tree = self.block(3)

    def label(self) -> str:
        self.labels += 1
        return f"L{self.labels}"

    def block(self, depth: int) -> list[tuple]:  # type: ignore[type-arg]
        return [self.statement(depth) for _ in range(self.rng.randrange(1, 4))]

    def statement(self, depth: int) -> tuple:  # type: ignore[type-arg]
        kind = self.rng.choice(["add", "if", "loop"] if depth else ["add"])
        a, b, n = self.rng.randrange(3), self.rng.randrange(3), self.rng.randrange(1, 7)
        if kind == "add":
            self.text.append(f"mad.lo.u32 %r{a}, %r{b}, {n}, %r{a};")
            return "add", a, b, n
        if kind == "if":
            other, end, bit = self.label(), self.label(), self.rng.randrange(5)
            t = f"shr.u32 %r7, %r{a}, {bit}; and.b32 %r7, %r7, 1; setp.eq.u32 %p0, %r7, 0; @%p0 bra {other};"
            self.text.append(t)
            yes = self.block(depth - 1)
            self.text.append(f"bra.uni {end}; {other}:")
            no = self.block(depth - 1)
            self.text.append(f"{end}:")
            return "if", a, bit, yes, no
        counter, top, end = 3 + depth, self.label(), self.label()
        self.text.append(f"and.b32 %r{counter}, %r{a}, 3; {top}: setp.eq.u32 %p1, %r{counter}, 0; @%p1 bra {end};")
        body = self.block(depth - 1)
        self.text.append(f"sub.u32 %r{counter}, %r{counter}, 1; bra {top}; {end}:")
        return "loop", a, body

    def evaluate(self, r: list[int], tree: list[tuple] | None = None) -> list[int]:  # type: ignore[type-arg]
        for s in self.tree if tree is None else tree:
            if s[0] == "add":
                r[s[1]] = (r[s[1]] + r[s[2]] * s[3]) & 0xFFFFFFFF
            elif s[0] == "if":
                self.evaluate(r, s[3] if r[s[1]] >> s[2] & 1 else s[4])
            else:
                for _ in range(r[s[1]] & 3):
                    self.evaluate(r, s[2])
        return r


@pytest.mark.parametrize("seed", range(25))
def test_random_structured_programs(seed: int) -> None:
    p = Program(seed)
    rng = random.Random(seed)
    start = [[rng.getrandbits(8) for _ in LANES] for _ in range(3)]
    w = warp("\n".join(p.text) + "\nactivemask.b32 %r3;", R, {f"%r{k}": start[k] for k in range(3)})
    while not w.done:
        assert w.step(rng.randrange(1, 60))  # slices end anywhere
    got = [value(w, f"%r{k}") for k in range(3)]
    want = [p.evaluate([start[k][lane] for k in range(3)]) for lane in LANES]
    assert [list(g) for g in zip(*got, strict=True)] == want


def test_uniform_branches() -> None:
    w = run("mov.u32 %r0, 1; bra.uni OVER; mov.u32 %r0, 2; OVER: add.u32 %r0, %r0, 10;", R, {})
    assert value(w, "%r0") == [11] * 32
    text = fault("@%p0 bra.uni L; mov.u32 %r0, 1; L: mov.u32 %r0, 2;", {"%p0": [True]})
    assert "divergence" in text and "bra.uni" in text
    run("@%p0 bra.uni L; mov.u32 %r0, 1; L: mov.u32 %r0, 2;", R, {"%p0": True})


def test_polls_at_different_times_may_end_in_uniform_branches() -> None:
    """Lanes 0 to 4 have polled in vain and stand at the branch; the others poll with success and come to it. Hardware
    does not merge them there, so this is no fault."""
    body = """
    POLL:
        add.u32 %r1, %r1, 1; setp.gt.u32 %p1, %r1, 3;
        @%p1 bra.uni DONE;
        bra.uni POLL;
    DONE:
        activemask.b32 %r2;
    """
    w = warp(body, R, {"%r1": [2] * 5 + [4] * 27, "%p1": False})
    low = np.arange(32) < 5
    w.fragments = [machine.Fragment(2, low), machine.Fragment(1, ~low)]
    finish(w)
    assert value(w, "%r1") == [4] * 32


def test_indexed_branch() -> None:
    body = """
        brx.idx %r0, TABLE;
        TABLE: .branchtargets A, B, C;
    A:  mov.u32 %r1, 10; bra.uni END;
    B:  mov.u32 %r1, 20; bra.uni END;
    C:  mov.u32 %r1, 30;
    END: activemask.b32 %r2;
    """
    w = run(body, R, {"%r0": [k % 3 for k in LANES]})
    assert value(w, "%r1") == [10 * (k % 3 + 1) for k in LANES]
    assert value(w, "%r2") == [0xFFFFFFFF] * 32
    assert value(run(body, R, {"%r0": 2}), "%r1") == [30] * 32
    assert "bad-operand" in fault(body, {"%r0": [3]})


def test_lanes_exit() -> None:
    """The others go on, and full member masks then mean those that are left."""
    body = """
        mov.u32 %r0, %laneid; mov.u32 %r1, 0; setp.ge.u32 %p0, %r0, 20; @%p0 exit;
        mov.u32 %r1, 1; vote.sync.ballot.b32 %r2, 1, -1; setp.lt.u32 %p1, %r0, 4; @%p1 bra AWAY;
        vote.sync.ballot.b32 %r3, 1, 0x000FFFF0; ret;
    AWAY:
        mov.u32 %r1, 2;
    """
    w = run(body, R, {})
    assert value(w, "%r1") == [2] * 4 + [1] * 16 + [0] * 12
    assert value(w, "%r2")[:20] == [0xFFFFF] * 20 and value(w, "%r3")[4:20] == [0xFFFF0] * 16


def test_partial_warp() -> None:
    w = run("mov.u32 %r0, 5; vote.sync.ballot.b32 %r1, 1, -1;", R, {}, threads=7)
    assert value(w, "%r0") == [5] * 7 + [0] * 25 and value(w, "%r1")[:7] == [0x7F] * 7


def test_guards() -> None:
    p = [k % 3 == 0 for k in LANES]
    w = run("mov.u32 %r0, 1; @%p0 mov.u32 %r0, 2; @!%p0 add.u32 %r0, %r0, 4;", R, {"%p0": p})
    assert value(w, "%r0") == [2 if x else 5 for x in p]


def test_barrier_in_a_uniform_branch() -> None:
    body = "@!%p0 bra OVER; bar.sync 0; mov.u32 %r0, 3; OVER: add.u32 %r0, %r0, 1;"
    assert value(run(body, R, {"%p0": True, "%r0": 1}), "%r0") == [4] * 32
    assert value(run(body, R, {"%p0": False, "%r0": 1}), "%r0") == [2] * 32


def test_lanes_of_a_warp_may_wait_for_each_other() -> None:
    """Lane 0 polls, at a lower pc, for what lane 1 stores at a higher one: each makes progress on its own."""
    body = """
        .shared .align 4 .b32 flag[2];
        mov.u32 %r0, %laneid; mov.u32 %r1, flag; mov.u32 %r2, 0; st.shared.u32 [%r1], %r2; bar.warp.sync -1;
        setp.ne.u32 %p0, %r0, 0; @%p0 bra OTHERS;
    POLL:
        ld.acquire.cta.shared.u32 %r3, [%r1]; setp.eq.u32 %p1, %r3, 0; @%p1 bra POLL;
        bra.uni END;
    OTHERS:
        setp.ne.u32 %p2, %r0, 1; @%p2 bra END;
        mov.u32 %r2, 9; st.release.cta.shared.u32 [%r1], %r2;
    END:
        bar.warp.sync -1;
    """
    w = run(body, R, {})
    assert value(w, "%r3")[0] == 9 and value(w, "%r2") == [0, 9] + [0] * 30


def test_false_guards_do_not_wait() -> None:
    """`@p` on an instruction that waits: the lanes without p go on."""
    body = """
        mov.u32 %r0, %laneid; setp.lt.u32 %p0, %r0, 16;
        @%p0 vote.sync.ballot.b32 %r1, 1, 0xFFFF; @!%p0 mov.u32 %r1, 7;
    """
    w = run(body, R, {})
    assert value(w, "%r1") == [0xFFFF] * 16 + [7] * 16
    w = warp("@%p0 vote.sync.ballot.b32 %r1, 1, -1; mov.u32 %r2, 1; bar.warp.sync -1;", R, {"%p0": [True]})
    while w.step():
        pass
    assert [(f.pc, int(f.mask.sum()), f.parked) for f in w.fragments] == [(0, 1, True), (2, 31, True)]
    assert value(w, "%r2")[1:] == [1] * 31


# ------------------------------------------------------------------------------------------------------------- faults
def test_trap() -> None:
    assert "trap" in fault("setp.eq.u32 %p0, %r0, 3; @%p0 trap;", {"%r0": LANES})
    run("setp.eq.u32 %p0, %r0, 99; @%p0 trap;", R, {"%r0": LANES})


def test_uninitialised_registers() -> None:
    for body in ("add.u32 %r0, %r1, 1;", "mov.u32 %r0, %r1;", "@%p1 mov.u32 %r0, 1;", "mov.b64 %q, {%r1, %r1};"):
        text = fault(body, registers=R | {"%q": "b64"})
        assert text.count("uninitialised-register") == 1 and ("%r1" in text or "%p1" in text)
    assert "%p2" in fault("@!%p2 bra L; L: mov.u32 %r0, 1;")
    run("mov.u32 %r1, 0; add.u32 %r0, %r1, 1;", R, {})


def test_registers_in_flight() -> None:
    """Poison of registers that asynchronous work owns: reads and writes are faults, untouched ones are none."""
    mma = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1, %r1, %r1, %r1}, %q, %q, 1, 1, 1, 0, 0;"
    for text, bad in (("add.f32 %r2, %r1, %r0;", "read"), ("mov.b32 %r1, 0;", "written"), ("mov.b32 %r2, %r0;", None)):
        body = f"{text} ret; {mma}"
        w = warp(body, R | {"%q": "b64"}, {"%r0": 1}, target="sm_90a")
        w.regs[w.program.numbers["%r1"]] = machine.Poison("a wgmma accumulates into it", w.program.kernel.insts[2])
        if bad is None:
            finish(w)
        else:
            with pytest.raises(FaultFound, match="register-in-flight") as found:
                finish(w)
            assert f"%r1 is {bad}" in str(found.value)


def test_a_mistake_in_the_checker_is_not_a_fault_of_the_kernel() -> None:
    w = warp("mov.u32 %r0, 1;", R)
    w.program.steps[0] = lambda w, m: w.no_such_attribute  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no_such_attribute"):
        finish(w)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("frobnicate.b32 %r0, %r1;", "frobnicate.b32 is not in the instruction table"),
        ("add.e4m3 %r0, %r1, %r1;", "add.e4m3 is not in the instruction table"),
        ("call.uni f, (%r0);", "call.uni is not in the instruction table"),
        ("mul.s32 %r0, %r1, %r1;", "mul needs .lo, .hi or .wide"),
        ("setp.lo.f32 %p0, %r0, %r1;", "comparison .lo of floats"),
        ("add.u64 %r0, %r1, %r1;", "%r1"),
        ("mov.u32 %r0, %no_such;", "%no_such"),
        ("and.pred %p0, %p1, %r0;", "%r0"),
    ],
)
def test_unknown_instructions_name_themselves_and_their_line(text: str, says: str) -> None:
    body = f".loc 1 77 3\n{text}"
    with pytest.raises((UnknownInstruction, PtxSyntaxError)) as found:
        build.Program(module(body, R, declarations='.file 1 "kernel.py"'))
    assert says in str(found.value)
    if isinstance(found.value, UnknownInstruction):
        assert "kernel.py:77" in str(found.value) and text in str(found.value)


def test_no_step_writes_to_a_register_in_place() -> None:
    """Arrays are shared between registers (mov) and with constants, so steps must make new ones."""
    xs = np.arange(32, dtype=np.uint32)
    xs.flags.writeable = False
    regs = {"%a": "b32", "%b": "b32"}
    texts = ["add.u32 %b, %a, %a", "fma.rn.ftz.f32 %b, %a, %a, %a", "cvt.rn.bf16x2.f32 %b, %a, %a"]
    texts += ["prmt.b32 %b, %a, %a, %a", "bfi.b32 %b, %a, %a, 3, 4", "lop3.b32 %b, %a, %a, %a, 0x96"]
    for text in texts:
        w = warp(f"{text};", regs)
        w.regs[0] = xs
        finish(w)
        assert w.regs[0] is xs and w.regs[1] is not xs
    assert apply("mov.b32", "b32", ("b32", [4])) == [4]
