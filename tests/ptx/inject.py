"""Plant a fault in the PTX of a real kernel, and see how many seeds the checker takes to find it.

A fault is a handful of edits of the compiled text: lines dropped, changed, moved, guards taken off. A pattern selects
lines by a regular expression, `nth` which of them; a pattern that selects nothing is an error, so a change of the
templates cannot turn a fault into none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from backward_calls import OUTPUTS, call, kernels
from backward_calls import run as run_backward
from ptxcheck import launch
from ptxcheck.compile import Code, _scratch, code_of, compile_file
from ptxcheck.report import Fault, FaultFound

from attngen import samples
from attngen.ir.spec import AttentionSpec
from attngen.ref.compare import assert_close
from attngen.samples import Shape
from attngen.syntax import load_all, load_spec

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = "wrong numbers"  # what a fault that breaks no rule of the hardware shows


# ---------------------------------------------------------------------------------------------------------- the edits
Lines = list[str]
Edit = Callable[[Lines], Lines]


def places(lines: Lines, pattern: str, kernel: str = "") -> list[int]:
    """Lines that match, within the kernels whose first lines match `kernel`."""
    inside, found = not kernel, []
    for n, line in enumerate(lines):
        if line.startswith(".visible .entry"):
            inside = bool(re.search(kernel, line))
        if inside and re.search(pattern, line):
            found.append(n)
    if not found:
        raise LookupError(f"no line matches {pattern!r}")
    return found


def drop(pattern: str, nth: int | None = 0, kernel: str = "") -> Edit:
    """The instruction is taken out; `nth` None: all of them."""
    return sub(f"^.*{pattern}.*$", "", nth, kernel)


def sub(pattern: str, new: str, nth: int | None = 0, kernel: str = "") -> Edit:
    """`re.sub` in the line."""

    def edit(lines: Lines) -> Lines:
        at = places(lines, pattern, kernel)
        out = list(lines)
        for n in at if nth is None else [at[nth]]:
            out[n] = re.sub(pattern, new, lines[n])
        return out

    return edit


def waits(lines: Lines, which: str | int, kernel: str = "") -> list[int]:
    """Waits for an mbarrier: those that match a pattern, or for one that lies so many bytes behind a stage's first."""
    if isinstance(which, str):
        return places(lines, f"mbarrier.try_wait.*{which}", kernel)
    found = [n for n in places(lines, r"mbarrier\.try_wait", kernel) if _behind(lines, n) == which]
    if not found:
        raise LookupError(f"no wait for the mbarrier {which} bytes behind the first")
    return found


def _behind(lines: Lines, n: int) -> int:
    """What the last addition to the address of a wait adds: 0 where that is a register."""
    address = re.search(r"\[(%r\d+)(?:\+(\d+))?\]", lines[n])
    assert address is not None
    if address[2]:
        return int(address[2])
    made = next((x for x in reversed(lines[:n]) if re.match(rf"\s*\S+\s+{address[1]}, ", x)), "")
    added = re.search(r"add\.s32\s+%r\d+, %r\d+, (\d+);", made)
    return int(added[1]) if added else 0


def skip_wait(which: str | int, nth: int = 0, kernel: str = "") -> Edit:
    """A wait for an mbarrier is taken out. (try_wait itself waits for a while: it goes with the loop around it.)"""

    def edit(lines: Lines) -> Lines:
        n = waits(lines, which, kernel)[nth]
        assert "@P1 bra.uni DONE" in lines[n + 1]
        return [*lines[:n], "bra.uni DONE;", *lines[n + 2 :]]

    return edit


def always(pattern: str, nth: int = 0, kernel: str = "") -> Edit:
    """The first conditional branch after the line is taken whatever its condition says."""

    def edit(lines: Lines) -> Lines:
        n = places(lines, pattern, kernel)[nth]
        at = next(k for k in range(n, len(lines)) if re.search(r"@%p\d+ bra", lines[k]))
        return [*lines[:at], re.sub(r"@%p\d+ bra", "bra", lines[at]), *lines[at + 1 :]]

    return edit


def twice(pattern: str, nth: int = 0, kernel: str = "") -> Edit:
    """The instruction is executed twice; its destination, if any, is not needed."""

    def edit(lines: Lines) -> Lines:
        n = places(lines, pattern, kernel)[nth]
        return [*lines[:n], lines[n], *lines[n:]]

    return edit


def flip(which: str | int, nth: int = 0, kernel: str = "") -> Edit:
    """Wait for the other parity."""

    def edit(lines: Lines) -> Lines:
        n = waits(lines, which, kernel)[nth]
        new = re.sub(r"\], (%r\d+|\d+),", r"], flipped,", lines[n])
        parity = re.search(r"\], (%r\d+|\d+),", lines[n])
        assert parity is not None
        return [*lines[:n], ".reg .b32 flipped;", f"xor.b32 flipped, {parity[1]}, 1;", new, *lines[n + 1 :]]

    return edit


def unguard(pattern: str, nth: int = 0, kernel: str = "") -> Edit:
    """The branch around an instruction is taken out: all lanes execute it."""

    def edit(lines: Lines) -> Lines:
        n = places(lines, pattern, kernel)[nth]
        guard = max(k for k in range(n) if re.search(r"@%p\d+ bra", lines[k]))
        assert not any(re.match(r"\$L__", x) for x in lines[guard:n]), "the branch is around something else"
        return [*lines[:guard], *lines[guard + 1 :]]

    return edit


def early(pattern: str, to: str, nth: int = 0, to_nth: int = 0, kernel: str = "", at: str = "") -> Edit:
    """An elected lane's arrival, taken out of its place and made before the line `to`; `at`: its address there."""

    def edit(lines: Lines) -> Lines:
        n, m = places(lines, pattern, kernel)[nth], places(lines, to, kernel)[to_nth]
        barrier = re.search(r"\[[^]]*\]", f"[{at}]" if at else lines[n])
        assert barrier is not None and m < n
        block = f"{{ .reg .pred one; elect.sync _|one, -1; @one mbarrier.arrive.shared.b64 _, {barrier[0]}; }}"
        return [*lines[:m], block, *lines[m:n], *lines[n + 1 :]]

    return edit


@dataclass(frozen=True)
class Planted:
    """A fault in one of the kernels below.

    about: its class, as issue 4 names them.  does: what is wrong.  kinds: what a report may call it.
    ptx, host: edits of the device's and of the host's code.
    """

    name: str
    kernel: str
    about: str
    does: str
    kinds: tuple[str, ...]
    ptx: tuple[Edit, ...] = field(default=(), repr=False)
    host: tuple[Edit, ...] = field(default=(), repr=False)

    def plant(self, code: Code) -> Code:
        """The kernel with the fault in it."""
        made = Code(_edited(code.ptx, self.ptx), _edited(code.host, self.host))
        if made == code:
            raise AssertionError(f"{self.name} changes nothing")
        return made


def _edited(text: str, edits: tuple[Edit, ...]) -> str:
    lines = text.splitlines()
    for edit in edits:
        lines = edit(lines)
    return "\n".join(lines) + "\n" * text.endswith("\n")


# -------------------------------------------------------------------------------------------------------- the kernels
@dataclass(frozen=True)
class Kernel:
    """Compiled code, and one call of it: True if the numbers are right."""

    code: Code
    call: Callable[[Code, int], bool]


def forward(name: str, plan: int, shape: Shape, workers: int = 2, *, lines: bool = True, **given: Any) -> Kernel:
    """A forward of the gallery. Its sums have one order: every call must give the bits of the first, which are right.

    Few CTAs take all tiles, so that every ring turns several times. `lines`: faults are to name their places.
    """
    module, code = compile_file(ROOT / "generated" / f"{name}.sm90.py", plan, lines=lines)
    spec = {s.name: s for f in (ROOT / "examples").glob("*.attn") for s in load_all(f)}[name]
    q, k, v = samples.qkv(spec, shape, seed=1)
    params, tensors = samples.params(spec, given), samples.tensors(spec, shape, seed=1)

    def outputs(code: Code, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return launch.attngen_call(
            module, plan, q, k, v, params=tuple(params.values()), tensors=tuple(tensors.values()), code=code,
            workers=workers, seed=seed,
        )[:2]  # fmt: skip

    right = outputs(code, 0)
    assert_close(right[0], spec, q, k, v, lse=right[1], params=params, tensors=tensors)

    def run(code: Code, seed: int) -> bool:
        return all(torch.equal(x, y) for x, y in zip(outputs(code, seed), right, strict=True))

    return Kernel(code, run)


def backward(spec: AttentionSpec, shape: Shape, sms: int, workers: int, *, lines: bool = True) -> Kernel:
    """A backward: its three launches. One that promises equal bits is held to those of the first call."""
    made, c = kernels(spec, lines=lines), call(spec, shape, seed=1)
    expected = c.expected(())
    fixed = run_backward(made, c)[0] if made.meta["deterministic"] else None

    def run(code: Code, seed: int) -> bool:
        found, _ = run_backward(replace(made, code=code), c, seed=seed, sms=sms, workers=workers)
        if fixed is not None and not all(torch.equal(found[n], fixed[n]) for n in OUTPUTS):
            return False
        return all(float((found[n].double() - expected[n][0]).abs().max()) <= expected[n][1] for n in OUTPUTS)

    return Kernel(made.code, run)


def product(group: int) -> Kernel:
    """A tile of a product on sm_100a, by one CTA or by a pair."""
    import kernels_sm100
    from cutlass import BFloat16, Float32
    from cutlass.cute.nvgpu import tcgen05

    tile = (128 * group, 64 * group, 64)
    load = tcgen05.Ld32x32bOp(tcgen05.Repetition.x32)
    types = (BFloat16, BFloat16, Float32)
    code = code_of(kernels_sm100.compile_product(tile, types, (False, False), group, load, _scratch().name))
    g = torch.Generator().manual_seed(1)
    a, b = (torch.randn(n, tile[2], generator=g).bfloat16() for n in tile[:2])
    exact = a.double() @ b.double().T

    def run(code: Code, seed: int) -> bool:
        d = torch.full(tile[:2], float("nan"))
        launch.check(code, a, b, d, seed=seed, names=("a", "b", "d"))
        return bool(float((d - exact).abs().max()) <= 1e-5 * float(exact.abs().max()))

    return Kernel(code, run)


@cache
def kernel(name: str) -> Kernel:
    """The kernels that faults are planted in, compiled once a session."""
    if name in ("causal 128x128", "causal 192x80"):  # rows and keys past the end; a diagonal that splits tiles
        return forward("causal", int(name.endswith("80")), Shape(1, 3, 1, 333, 400))
    if name == "window and sink":
        return forward("gpt_oss_local", 0, Shape(1, 2, 1, 200, 200), window=70)
    if name == "backward":
        causal = "attn 1\nattention causal {\n  head_dim = 128\n  mask = kv_idx <= q_pos\n}\n"
        return backward(load_spec(causal), Shape(1, 2, 1, 250, 400), 2, 2)  # two CTAs share four KV tiles
    if name == "zeros ahead":  # two CTAs, four heads: dQ of the last two is zeroed by the KV tiles of the first two
        full = "attn 1\nattention full {\n  head_dim = 64\n}\n"
        return backward(load_spec(full), Shape(1, 4, 4, 64, 200), 2, 2)
    if name == "deterministic backward":
        text = "attn 1\nattention turns {\n  head_dim = 64\n  backward { deterministic = true }\n}\n"
        return backward(load_spec(text), Shape(1, 1, 1, 128, 640), 8, 4)
    return product({"product": 1, "pair's product": 2}[name])


# ---------------------------------------------------------------------------------------------------------- the search
@dataclass(frozen=True)
class Found:
    """After how many seeds, as what."""

    seeds: int
    kind: str
    fault: Fault | None


def find(planted: Planted, seeds: int) -> Found | None:
    """The first seed whose run has a fault or wrong numbers."""
    base = kernel(planted.kernel)
    code = planted.plant(base.code)
    try:
        for seed in range(seeds):
            try:
                if not base.call(code, seed):
                    return Found(seed + 1, NUMBERS, None)
            except FaultFound as e:
                return Found(seed + 1, e.faults[0].kind, e.faults[0])
            except AssertionError as e:
                if "tile counter" not in str(e):
                    raise
                return Found(seed + 1, NUMBERS, None)
    finally:
        launch.forget(code)
    return None
