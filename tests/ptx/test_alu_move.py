"""Moves, packing, address conversion, selection and comparison."""

from __future__ import annotations

import math
import operator

import pytest
from lanes import apply, f32, f64, finish, module, run, signed, value, warp
from ptxcheck import machine
from ptxcheck.build import PARAM_WINDOW, SHARED_BASE, Program
from ptxcheck.table import LOCAL_WINDOW, SHARED_WINDOW

INF, NAN = math.inf, math.nan


def test_pack_and_unpack() -> None:
    regs = {"%q": "b64", "%a": "b32", "%b": "b32", "%h0": "b16", "%h1": "b16", "%h2": "b16", "%h3": "b16", "%w": "b128"}
    regs |= {"%q2": "b64", "%c": "b32", "%q3": "b64", "%q4": "b64"}
    w = run(
        """mov.b64 %q, {%a, %b}; mov.b64 {%h0, %h1, %h2, %h3}, %q; mov.b32 %c, {%h3, %h0};
           mov.b64 {_, %b}, %q; mov.b128 %w, {%q, %q2}; mov.b128 {%q3, %q4}, %w;""",
        regs,
        {"%a": 0x22221111, "%b": [0x44443333 + k for k in range(32)], "%q2": 99},
    )
    assert value(w, "%q")[1] == 0x4444333422221111
    assert [value(w, f"%h{k}")[1] for k in range(4)] == [0x1111, 0x2222, 0x3334, 0x4444]
    assert value(w, "%c")[1] == 0x11114444
    assert value(w, "%b")[31] == 0x44443333 + 31
    assert value(w, "%q3")[1] == 0x4444333422221111 and value(w, "%q4")[1] == 99


def test_bytes() -> None:
    """fp4 pairs live in .b8 registers, which are packed into words."""
    regs = {"%b0": "b8", "%b1": "b8", "%b2": "b8", "%b3": "b8", "%r": "b32", "%h": "b16", "%a": "b32"}
    body = "mov.b32 {%b0, %b1, %b2, %b3}, %r; mov.b16 %h, {%b3, %b0}; mov.b32 %a, {%b1, %b1, %b2, %b0};"
    w = run(body, regs, {"%r": 0x44332211})
    assert value(w, "%h")[0] == 0x1144 and value(w, "%a")[31] == 0x11332222


def test_registers_are_not_aliased() -> None:
    """mov shares the array; later writes to either must not show in the other."""
    regs = {"%a": "b32", "%b": "b32", "%p": "pred"}
    w = run("mov.b32 %b, %a; @%p add.u32 %a, %a, 1; @!%p add.u32 %b, %b, 5;", regs, {"%a": 7, "%p": [True, False]})
    assert value(w, "%a")[:2] == [8, 7] and value(w, "%b")[:2] == [7, 12]


def test_symbols_and_windows() -> None:
    declarations = ".extern .shared .align 1024 .b8 dyn[];\n.shared .align 8 .b8 fixed[24];"
    regs = {f"%q{k}": "b64" for k in range(6)} | {f"%r{k}": "b32" for k in range(3)} | {"%p0": "pred", "%p1": "pred"}
    body = """.local .align 16 .b8 depot[64];
        mov.u32 %r0, fixed; mov.u32 %r1, dyn; mov.u64 %q0, depot; cvta.local.u64 %q1, %q0; cvta.to.local.u64 %q2, %q1;
        mov.u64 %q3, fixed; cvta.shared.u64 %q4, %q3; cvta.to.shared::cluster.u64 %q5, %q4;
        isspacep.shared %p0, %q4; isspacep.global %p1, %q4;"""
    w = run(body, regs, {}, declarations=declarations)
    assert value(w, "%r0")[0] == SHARED_BASE and value(w, "%r1")[0] == SHARED_BASE + 1024
    assert value(w, "%q1")[0] == LOCAL_WINDOW + value(w, "%q0")[0]
    assert value(w, "%q2") == value(w, "%q0")
    assert value(w, "%q4")[0] == SHARED_WINDOW + SHARED_BASE and value(w, "%q5") == value(w, "%q3")
    assert value(w, "%p0")[0] and not value(w, "%p1")[0]
    assert PARAM_WINDOW > LOCAL_WINDOW > SHARED_WINDOW


@pytest.mark.parametrize("t", ["b16", "b32", "b64"])
def test_selp(t: str) -> None:
    p = [True, False, True]
    assert apply(f"selp.{t}", t, (t, [1, 2, 3]), (t, [4, 5, 6]), ("pred", p)) == [1, 5, 3]
    assert apply(f"selp.{t}", t, "7", (t, [4, 5, 6]), ("pred", p)) == [7, 5, 7]


def test_slct() -> None:
    a, b = ("b32", [1] * 5), ("b32", [2] * 5)
    assert apply("slct.b32.s32", "b32", a, b, ("b32", [0, 5, 0xFFFFFFFF])) == [1, 1, 2, 1, 1]
    c = ("b32", [0, 0x80000000, f32(-1.0), 0x7FC00000, 0x80000001])
    assert apply("slct.u32.f32", "b32", a, b, c) == [1, 1, 2, 2, 2]
    assert apply("slct.ftz.u32.f32", "b32", a, b, c) == [1, 1, 2, 2, 1]


ORDER = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


@pytest.mark.parametrize("t", ["u16", "s16", "u32", "s32", "u64", "s64", "b16", "b32", "b64"])
def test_integer_comparison(t: str) -> None:
    bits = int(t[1:])
    xs = [0, 1, (1 << (bits - 1)) - 1, 1 << (bits - 1), (1 << bits) - 1]
    pairs = [(x, y) for x in xs for y in xs]
    a, b = (f"b{bits}", [x for x, _ in pairs]), (f"b{bits}", [y for _, y in pairs])
    for name, fn in ORDER.items():
        if t[0] == "b" and name not in ("eq", "ne"):
            continue
        want = [fn(signed(x, bits), signed(y, bits)) if t[0] == "s" else fn(x, y) for x, y in pairs]
        assert apply(f"setp.{name}.{t}", "pred", a, b) == want, name
    if t[0] == "u":
        for name, of in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
            assert apply(f"setp.{name}.{t}", "pred", a, b) == [ORDER[of](x, y) for x, y in pairs], name


@pytest.mark.parametrize(("t", "code"), [("f32", f32), ("f64", f64)])
def test_float_comparison(t: str, code) -> None:  # type: ignore[no-untyped-def]
    xs = [0.0, -0.0, 1.0, -INF, NAN]
    pairs = [(x, y) for x in xs for y in xs]
    a, b = ((f"b{t[1:]}", [code(p[k]) for p in pairs]) for k in (0, 1))
    for name, fn in ORDER.items():
        nan = [math.isnan(x) or math.isnan(y) for x, y in pairs]
        ordered = [fn(x, y) and not n for (x, y), n in zip(pairs, nan, strict=True)]
        assert apply(f"setp.{name}.{t}", "pred", a, b) == ordered, name
        either = [n or o for n, o in zip(nan, ordered, strict=True)]
        assert apply(f"setp.{name}u.{t}", "pred", a, b) == either, name
    assert apply(f"setp.nan.{t}", "pred", a, b) == nan
    assert apply(f"setp.num.{t}", "pred", a, b) == [not n for n in nan]


def test_comparison_forms() -> None:
    regs = {"%p": "pred", "%q": "pred", "%c": "pred", "%a": "b32", "%b": "b32"}
    given = {"%a": [1, 2, 1, 2], "%b": [2, 1, 2, 1], "%c": [True, True, False, False]}
    less = [True, False, True, False]
    for name, fn in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        w = run(f"setp.lt.{name}.u32 %p|%q, %a, %b, %c;", regs, given)
        assert value(w, "%p")[:4] == [fn(x, c) for x, c in zip(less, given["%c"], strict=True)]
        assert value(w, "%q")[:4] == [fn(not x, c) for x, c in zip(less, given["%c"], strict=True)]
        w = run(f"setp.lt.{name}.u32 %p, %a, %b, !%c;", regs, given)
        assert value(w, "%p")[:4] == [fn(x, not c) for x, c in zip(less, given["%c"], strict=True)]
    assert apply("setp.eq.ftz.f32", "pred", ("b32", [1]), ("b32", [0x80000000])) == [True]
    assert apply("setp.eq.f32", "pred", ("b32", [1]), ("b32", [0x80000000])) == [False]
    assert apply("setp.lt.bf16", "pred", ("b16", [0xBF80, 0x3F80]), ("b16", [0x3F80, 0x3F80])) == [True, False]
    w = run("setp.gt.f16x2 %p|%q, %a, %b;", regs, {"%a": [0x3C004000], "%b": [0x40003C00]})
    assert value(w, "%p")[0] and not value(w, "%q")[0]


def test_set() -> None:
    a, b = ("b32", [f32(1.0), f32(2.0)]), ("b32", [f32(2.0), f32(1.0)])
    assert apply("set.lt.u32.f32", "b32", a, b) == [0xFFFFFFFF, 0]
    assert apply("set.lt.f32.f32", "b32", a, b) == [f32(1.0), 0]
    assert apply("set.ge.and.s32.s32", "b32", ("b32", [5, 5]), ("b32", [5, 5]), ("pred", [True, False])) == [
        0xFFFFFFFF,
        0,
    ]
    assert apply("set.gt.f16x2.f16x2", "b32", ("b32", [0x3C004000]), ("b32", [0x40003C00])) == [0x00003C00]


def test_special_registers() -> None:
    names = ["%tid.x", "%tid.y", "%ntid.x", "%ntid.y", "%laneid", "%warpid", "%ctaid.x", "%nctaid.x"]
    names += ["%cluster_ctarank", "%cluster_nctarank"] + [f"%lanemask_{c}" for c in ("eq", "lt", "le", "gt", "ge")]
    regs = {f"%r{k}": "b32" for k in range(len(names))} | {"%t0": "b64", "%t1": "b64"}
    body = "mov.u64 %t0, %clock64;" + "".join(f"mov.u32 %r{k}, {n};" for k, n in enumerate(names))
    w = warp(body + "mov.u64 %t1, %clock64;", regs)
    while not w.done:
        w.step(1)
    got = {n: value(w, f"%r{k}") for k, n in enumerate(names)}
    lanes = range(32)
    assert got["%tid.x"] == list(lanes) and got["%laneid"] == list(lanes) and got["%tid.y"] == [0] * 32
    assert got["%ntid.x"] == [32] * 32 and got["%ntid.y"] == [1] * 32 and got["%nctaid.x"] == [1] * 32
    assert got["%warpid"] == got["%ctaid.x"] == got["%cluster_ctarank"] == [0] * 32
    assert got["%cluster_nctarank"] == [1] * 32
    full = 0xFFFFFFFF
    assert got["%lanemask_eq"] == [1 << k for k in lanes]
    assert got["%lanemask_lt"] == [(1 << k) - 1 for k in lanes]
    assert got["%lanemask_le"] == [(2 << k) - 1 for k in lanes]
    assert got["%lanemask_gt"] == [full & ~((2 << k) - 1) for k in lanes]
    assert got["%lanemask_ge"] == [full & ~((1 << k) - 1) for k in lanes]
    assert value(w, "%t1")[0] > value(w, "%t0")[0]


def test_places_in_grid_and_cluster() -> None:
    """Cluster (1, 1) of a grid of 6 x 2 CTAs in clusters of 3 x 1: its CTAs are (3, 1) to (5, 1)."""
    names = ["ctaid.x", "ctaid.y", "nctaid.x", "clusterid.x", "clusterid.y", "nclusterid.x", "nclusterid.y"]
    names += ["cluster_ctaid.x", "cluster_nctaid.x", "cluster_ctarank", "cluster_nctarank"]
    regs = {f"%r{k}": "b32" for k in range(len(names))} | {"%s": "b32", "%p": "pred"}
    body = "".join(f"mov.u32 %r{k}, %{n};" for k, n in enumerate(names))
    body += "mov.u32 %s, fixed; mov.pred %p, %is_explicit_cluster;"
    program = Program(module(body, regs, declarations=".shared .align 8 .b8 fixed[24];"))
    m = machine.Machine(program, (6, 2, 1), (32, 1, 1), cluster=(3, 1, 1))
    for rank, cta in enumerate(machine.Cluster(m, (1, 1, 0)).ctas):
        w = finish(cta.warps[0])
        got = dict(zip(names, (value(w, f"%r{k}")[0] for k in range(len(names))), strict=True))
        assert got == {
            "ctaid.x": 3 + rank,
            "ctaid.y": 1,
            "nctaid.x": 6,
            "clusterid.x": 1,
            "clusterid.y": 1,
            "nclusterid.x": 2,
            "nclusterid.y": 2,
            "cluster_ctaid.x": rank,
            "cluster_nctaid.x": 3,
            "cluster_ctarank": rank,
            "cluster_nctarank": 3,
        }
        assert value(w, "%s")[0] == SHARED_BASE | rank << 24 and value(w, "%p")[0]


def test_threads_are_numbered_x_first() -> None:
    regs = {f"%r{k}": "b32" for k in range(4)}
    body = "mov.u32 %r0, %tid.x; mov.u32 %r1, %tid.y; mov.u32 %r2, %tid.z; mov.u32 %r3, %warpid;"
    m = machine.Machine(Program(module(body, regs)), (1, 1, 1), (5, 4, 3))
    w = finish(machine.Cluster(m, (0, 0, 0)).ctas[0].warps[1])
    threads = [t for t in range(32, 64) if t < 60]
    got = list(zip(*(value(w, f"%r{k}")[: len(threads)] for k in range(4)), strict=True))
    assert got == [(t % 5, t // 5 % 4, t // 20, 1) for t in threads]
