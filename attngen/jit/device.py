"""Per-GPU state of the launch path: SM count, tile counters, scratch memory for what no caller wants."""

from __future__ import annotations

import threading
from threading import get_ident
from typing import Any

import torch

from attngen.diag.diagnostic import error

#: Tile counters of a device that exist before any graph is captured; 128 bytes apart, so that none share a cache line.
COUNTERS = 1024
_SPACING = 32
#: What a launch writes and no caller wants lies in scratch memory up to so many elements.
SCRATCH_ELEMS = 1 << 22
SCRATCH_SHAPES = 8


class DeviceState:
    """What launches on one GPU share.

    A launch in flight owns a tile counter: an int32 that is zero before the launch and that the kernel leaves at zero.
    Launches of one stream run one after the other, so there is one counter a stream; a call that is captured into a
    CUDA graph gets one of its own, since the graph may be replayed on any stream beside later eager calls.
    """

    def __init__(self, index: int, sm_count: int) -> None:
        self.index = index
        self.device = torch.device("cuda", index) if index >= 0 else torch.device("cpu")
        self.sm_count = sm_count
        self.counters: dict[int, Any] = {}
        #: By (raw stream, batch, heads_q, seqlen_q).
        self.scratch: dict[tuple[int, ...], Any] = {}
        self._words: dict[tuple[int, int, str, int], Any] = {}
        self._pool: Any = None
        self._zero: Any = None
        self._zeros: dict[Any, Any] = {}
        self._used = 0
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Allocate the counters, outside any capture: memory of a graph's pool would not outlive the graph."""
        with self._lock:
            if self._pool is not None:
                return
            pool = torch.zeros(COUNTERS * _SPACING, dtype=torch.int32, device=self.device)
            self._zero = torch.zeros((), dtype=torch.float32, device=self.device)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # zero for every stream that uses it later
            self._pool = pool

    def keep_scratch(self, place: tuple[int, ...], lse: Any) -> None:
        """Remember an LSE for later calls of the same stream and shape; a handful of small ones, no more."""
        if lse.numel() > SCRATCH_ELEMS:
            return
        if len(self.scratch) >= SCRATCH_SHAPES:
            self.scratch.clear()
        self.scratch[place] = lse

    def words(self, stream: int, what: str, count: int) -> Any:
        """int32 memory that the first kernel of a launch fills for its main one; later launches share it.

        Those of this thread alone, which runs one launch of a stream after the other: another's first kernel could come
        between the two.
        """
        place = (stream, get_ident(), what, count)
        found = self._words.get(place)
        if found is None:
            found = torch.empty(count, dtype=torch.int32, device=self.device)
            if count > SCRATCH_ELEMS:
                return found
            if len(self._words) >= SCRATCH_SHAPES:
                self._words.clear()
            self._words[place] = found
        return found

    def counter(self, stream: int) -> Any:
        """The counter of a raw stream, made at the stream's first launch."""
        self.prepare()
        counter = self.counters[stream] = self._take()
        return counter

    def captured_counter(self) -> Any:
        """A counter for one call that is being captured."""
        if self._pool is None:
            return torch.zeros(1, dtype=torch.int32, device=self.device)  # zeroed again by every replay
        return self._take()

    def zeros(self, shape: Any) -> Any:
        """fp32 zeros without memory, all strides 0: the gradient of an LSE that nobody used."""
        found = self._zeros.get(shape)
        if found is None:
            if self._zero is None:  # the first call of all is being captured
                return torch.zeros((), dtype=torch.float32, device=self.device).expand(shape)
            if len(self._zeros) >= SCRATCH_SHAPES:
                self._zeros.clear()
            found = self._zeros[shape] = self._zero.expand(shape)
        return found

    def _take(self) -> Any:
        with self._lock:
            if self._used < COUNTERS:
                at = self._used * _SPACING
                self._used += 1
                return self._pool[at : at + 1]
        return torch.zeros(1, dtype=torch.int32, device=self.device)


_states: dict[int, DeviceState] = {}


def state_of(index: int) -> DeviceState:
    """The shared state of GPU `index`."""
    found = _states.get(index)
    if found is None:
        found = _states[index] = DeviceState(index, torch.cuda.get_device_properties(index).multi_processor_count)
    return found


def capability_of(target: str) -> tuple[int, int]:
    """Compute capability that a target's code runs on: (9, 0) for `sm_90a`."""
    digits = "".join(c for c in target if c.isdigit())
    return int(digits[:-1]), int(digits[-1])


def runs(index: int, target: str) -> bool:
    """Whether GPU `index` runs code for `target`."""
    return torch.cuda.get_device_capability(index) == capability_of(target)


def has_gpu(target: str) -> bool:
    """Whether the current GPU runs code for `target` (another kind is an error only once tensors on it arrive)."""
    return torch.cuda.is_available() and runs(torch.cuda.current_device(), target)


def require_target(index: int, target: str, name: str) -> None:
    """Raise AttnError E0516 unless GPU `index` runs code for `target`."""
    if runs(index, target):
        return
    have, need = torch.cuda.get_device_capability(index), capability_of(target)
    named = torch.cuda.get_device_name(index)
    raise error(
        "E0516",
        f"`{name}` is compiled for {target}; cuda:{index} ({named}) is sm_{have[0]}{have[1]}",
        notes=(f"machine code for {target} runs on compute capability {need[0]}.{need[1]} only",),
        helps=(
            f"move the tensors to a GPU of compute capability {need[0]}.{need[1]}, or build for this GPU's own target",
            "CPU tensors run the reference on any machine",
        ),
    )
