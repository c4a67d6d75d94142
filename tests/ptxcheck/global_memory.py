"""Global memory: registered arrays, bounds, alignment, races between warps, and what an earlier launch has written."""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxcheck.hb import Actor, Clock, History
from ptxcheck.memory import Bytes, Ints, gather, granules, scatter, typed
from ptxcheck.shadow import Note, Shadow

LAUNCH_BLOCK = 4  # log2 of the bytes that "written by which launch" is kept for


@dataclass
class View:
    """A registered array: what faults call it."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    itemsize: int

    @property
    def span(self) -> int:
        """Bytes from the first to past the last element."""
        if 0 in self.shape:
            return 0
        return sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + self.itemsize

    @property
    def dense(self) -> bool:
        """Whether its elements fill the span."""
        return self.span == int(np.prod(self.shape)) * self.itemsize

    def index(self, address: int) -> str:
        """`q[0, 3, 1, 16]` for an address, as far as the strides tell."""
        rest, out = address - self.address, [0] * len(self.shape)
        for d in sorted(range(len(self.shape)), key=lambda d: -self.strides[d]):
            if self.strides[d] > 0 and (self.shape[d] > 1 or self.strides[d] >= self.itemsize):
                out[d], rest = divmod(rest, self.strides[d])
        return f"{self.name}[{', '.join(map(str, out))}]" + (f" + {rest} bytes" if rest else "")


@dataclass
class Region:
    """Memory that one or several overlapping arrays occupy."""

    low: int
    high: int
    views: list[View]
    data: Bytes  # from `origin`, which is a multiple of 16
    origin: int
    covered: NDArray[np.bool_] | None  # bytes that belong to an array, where some in between do not
    writer: NDArray[np.int16] = field(init=False)  # number of the launch that last wrote each 16 bytes, from 1
    shadow: Shadow | None = None
    words: dict[int, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.words = typed(self.data)
        self.writer = np.zeros((self.data.size >> LAUNCH_BLOCK) + 1, np.int16)

    def name(self, address: int) -> str:
        view = next((v for v in self.views if v.address <= address < v.address + v.span), self.views[0])
        return view.index(address)


class Global:
    """All arrays that kernels may touch. Lives over several launches; `begin` starts one.

    Races between warps are looked for among writes and later reads of one launch (a read is not remembered: the
    reverse order of the same two accesses occurs in some other schedule).
    """

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self._lows: list[int] = []
        self._views: list[tuple[View, Any]] = []
        self.clocks: dict[int, Clock] = {}
        self.launch = 0
        self.history: History | None = None
        self.note: Note | None = None
        self.shift = 2
        self.machine: Any = None
        self.unsafe = 0  # writes of launches from this number on may be unfinished (0: none)

    # ---- registration --------------------------------------------------------------------------------------------
    def register(self, name: str, array: Any) -> None:
        """Make a torch CPU tensor or a NumPy array known; it must live as long as this object is used."""
        if hasattr(array, "data_ptr"):
            item = array.element_size()
            view = View(name, array.data_ptr(), tuple(array.shape), tuple(s * item for s in array.stride()), item)
        else:
            view = View(name, array.ctypes.data, array.shape, array.strides, array.itemsize)
        self.register_view(view, array)

    def register_view(self, view: View, keep: Any = None) -> None:
        """Make memory of this process known; `keep` is held on to."""
        if view.span == 0 or any(v == view for v, _ in self._views):
            return
        self._views.append((view, keep))
        touching = [r for r in self.regions if r.low < view.address + view.span and view.address < r.high]
        views = [view] + [v for r in touching for v in r.views]
        low = min(v.address for v in views)
        high = max(v.address + v.span for v in views)
        origin = low & ~15
        data = np.ctypeslib.as_array((ctypes.c_uint8 * (high - origin)).from_address(origin))
        self._add(Region(low, high, views, data, origin, _covered(views, low, high)), touching)

    def register_bytes(self, name: str, address: int, data: Bytes) -> None:
        """Memory that has an address of its own making (variables of a module)."""
        padded = np.zeros(-(-data.size // 16) * 16, np.uint8)
        padded[: data.size] = data
        view = View(name, address, (data.size,), (1,), 1)
        old = [r for r in self.regions if r.low == address]
        self._add(Region(address, address + data.size, [view], padded, address, None), old)

    def _add(self, region: Region, instead: list[Region]) -> None:
        self.regions = sorted([r for r in self.regions if r not in instead] + [region], key=lambda r: r.low)
        self._lows = [r.low for r in self.regions]

    def begin(self, machine: Any, unsafe: int = 0) -> None:
        """A launch starts: nothing of it has been written, and what came before is done, but for PDL (`unsafe`)."""
        self.machine = machine
        self.history, self.note = machine.history, machine.note
        self.launch += 1
        self.shift = machine.global_shift
        self.unsafe = unsafe
        self.clocks = {}
        for r in self.regions:
            r.shadow = None

    # ---- accesses ------------------------------------------------------------------------------------------------
    def find(self, actor: Actor, at: Ints, nbytes: int) -> Region | None:
        """The region that holds all of `nbytes` at each address; else None, with a fault."""
        assert self.note is not None
        low, high = int(at.min()), int(at.max()) + nbytes
        k = bisect.bisect_right(self._lows, low) - 1
        region = self.regions[k] if k >= 0 else None
        if (
            region is None
            or high > region.high
            or (region.covered is not None and not self._covers(region, at, nbytes))
        ):
            self._lost(actor, at, nbytes)
            return None
        unit = min(nbytes, 16)
        if unit > 1 and (at & (unit - 1)).any():
            bad = int(at[(at & (unit - 1)) != 0][0])
            self.note(
                "misaligned",
                f"{region.name(bad)}: address {bad:#x} is no multiple of {unit}",
                actor.where,
                "",
                (actor.key,),
            )
            return None
        return region

    def _covers(self, region: Region, at: Ints, nbytes: int) -> bool:
        assert region.covered is not None
        first = at - region.low
        return bool(region.covered[first].all() and region.covered[first + nbytes - 1].all())

    def _lost(self, actor: Actor, at: Ints, nbytes: int) -> None:
        assert self.note is not None
        for a in at.tolist():
            k = bisect.bisect_right(self._lows, a) - 1
            r = self.regions[k] if k >= 0 else None
            one = np.array([a])
            if r is None or a + nbytes > r.high or (r.covered is not None and not self._covers(r, one, nbytes)):
                near = self._nearest(a)
                self.note("out-of-bounds", f"{nbytes} bytes at {a:#x}, {near}", actor.where, "", (actor.key,))
                return
        raise AssertionError("one access spans several arrays")

    def _nearest(self, address: int) -> str:
        best = min(
            (v for r in self.regions for v in r.views),
            key=lambda v: max(v.address - address, address - (v.address + v.span) + 1, 0),
            default=None,
        )
        if best is None:
            return "and no array is registered"
        if address >= best.address + best.span:
            return f"{address - best.address - best.span} bytes past the end of {best.name} {best.shape}"
        if address < best.address:
            return f"{best.address - address} bytes before {best.name} {best.shape}"
        return f"between the rows of {best.name} {best.shape}, at {best.index(address)}"

    def _each(self, actor: Actor, at: Ints, nbytes: int) -> list[tuple[Region, Any]]:
        """The regions of the addresses, with the selection of each; addresses outside are faults and left out."""
        low = int(at.min())
        k = bisect.bisect_right(self._lows, low) - 1
        if k >= 0 and int(at.max()) < self.regions[k].high:
            r = self.find(actor, at, nbytes)
            return [(r, slice(None))] if r is not None else []
        out = []
        which = np.searchsorted(np.array(self._lows), at, side="right") - 1
        for k in np.unique(which):
            select = which == k
            r = self.find(actor, at[select], nbytes)
            if r is not None:
                out.append((r, select))
        return out

    def load(self, actor: Actor, at: Ints, nbytes: int, mode: int = 0) -> Bytes:
        """`uint8[n, nbytes]` at addresses `at`."""
        parts = self._each(actor, at, nbytes)
        if len(parts) == 1 and isinstance(parts[0][1], slice):
            r = parts[0][0]
            offset = at - r.origin
            self.reads(actor, r, offset, nbytes, mode)
            return gather(r.words, offset, nbytes)
        out = np.zeros((at.size, nbytes), np.uint8)
        for r, select in parts:
            offset = at[select] - r.origin
            self.reads(actor, r, offset, nbytes, mode)
            out[select] = gather(r.words, offset, nbytes)
        return out

    def store(self, actor: Actor, at: Ints, data: Bytes, mode: int = 0) -> None:
        """Write `uint8[n, nbytes]` at addresses `at`."""
        for r, select in self._each(actor, at, data.shape[1]):
            offset = at[select] - r.origin
            new = data[select]
            self.writes(actor, r, offset, data.shape[1], mode, new)
            scatter(r.words, offset, new)
        if self.clocks and not mode:
            for a in at.tolist():
                self.clocks.pop(a, None)

    def reads(self, actor: Actor, r: Region, offset: Ints, nbytes: int, mode: int = 0) -> None:
        """Account for reads of `nbytes` at offsets from the region's origin."""
        if r.shadow is not None:
            r.shadow.read(actor, granules(offset, nbytes, self.shift), mode)
        if self.unsafe:
            self._dependency(actor, r, offset, nbytes, "read")

    def writes(
        self, actor: Actor, r: Region, offset: Ints, nbytes: int, mode: int = 0, data: Bytes | None = None
    ) -> None:
        """Account for writes of `nbytes` at offsets from the region's origin.

        Two unordered writes of the same bytes are let pass: kernels pad that way, each CTA for itself.
        """
        assert self.history is not None and self.note is not None
        if r.shadow is None:
            shift, origin = self.shift, r.origin
            size = (r.data.size >> shift) + 1
            r.shadow = Shadow(
                self.history,
                size,
                lambda g: r.name(origin + (g << shift)),
                self.note,
                initialised=True,
                readers=False,
            )
        if self.unsafe:
            self._dependency(actor, r, offset, nbytes, "written")
        at = granules(offset, nbytes, self.shift)

        def same() -> Any:
            if data is None or at.size * (1 << self.shift) != data.size:
                return np.zeros(at.size, np.bool_)
            return (gather(r.words, offset, nbytes) == data).reshape(at.size, -1).all(1)

        r.shadow.write(actor, at, mode, same)
        self.machine.progress += 1
        r.writer[granules(offset, nbytes, LAUNCH_BLOCK)] = self.launch

    def _dependency(self, actor: Actor, r: Region, offset: Ints, nbytes: int, how: str) -> None:
        """Programmatic dependent launch: the preceding grid may still run until griddepcontrol.wait."""
        assert self.note is not None
        if actor.has_seen(self.machine.grid_chain, 1):
            return
        blocks = granules(offset, nbytes, LAUNCH_BLOCK)
        by = r.writer[blocks]
        bad = (by >= self.unsafe) & (by < self.launch)
        if bad.any():
            where = r.name(max(r.origin + (int(blocks[bad][0]) << LAUNCH_BLOCK), r.low))
            self.note(
                "missing-grid-dependency",
                f"{where} is {how} before griddepcontrol.wait, and launch {int(by[bad][0])} wrote it",
                actor.where,
                "",
                (actor.key,),
            )

    def written_now(self, at: Ints) -> str:
        """The first of the addresses that this launch has written, by name; "" if none."""
        for a in at.tolist():
            k = bisect.bisect_right(self._lows, a) - 1
            r = self.regions[k] if k >= 0 else None
            if r is not None and r.shadow is not None and a < r.high and r.shadow.written[(a - r.origin) >> self.shift]:
                return r.name(a)
        return ""

    def clock(self, at: int) -> Clock:
        """The clock of the strong operations on an address."""
        assert self.history is not None
        c = self.clocks.get(at)
        if c is None:
            c = self.clocks[at] = self.history.clock()
        return c


def _covered(views: list[View], low: int, high: int) -> NDArray[np.bool_] | None:
    if any(v.dense and v.address == low and v.address + v.span == high for v in views):
        return None
    out = np.zeros(high - low, np.bool_)
    for v in views:
        part = out[v.address - low :]
        shape, strides = (*v.shape, v.itemsize), (*v.strides, 1)
        np.lib.stride_tricks.as_strided(part, shape, strides)[...] = True
    return out
