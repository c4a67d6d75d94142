"""One cell: prepare attngen and every peer that can, check that they agree, measure them together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attngen.bench import timing
from attngen.bench.backward import backward_of, keep_for_many, leaves, peak_bytes
from attngen.bench.cells import Cell
from attngen.bench.kept import kept
from attngen.bench.memory import Memory, expected
from attngen.bench.peers import PEERS, Call, Case, Unsupported
from attngen.bench.recognize import features

if TYPE_CHECKING:
    from attngen.samples import Shape

OURS = "attngen"
#: Our backward without turns, beside a deterministic one.
UNORDERED = "attngen unordered"
#: Largest relative difference between a peer's O, or gradients, and ours before it is dropped as something else.
_AGREE = 0.03


@dataclass
class Row:
    """What one cell gave: TFLOP/s by kernel with the spread of the rounds, and why a kernel is missing."""

    label: str
    spec: str
    shape: dict[str, int]
    kept_share: float
    #: Of our plan's own tiles, the share that keeps some pair.
    tile_share: float = 1.0
    tflops: dict[str, float] = field(default_factory=dict)
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)
    milliseconds: dict[str, float] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    ceiling: float = 0.0
    direction: str = "forward"
    #: Backward: memory that one forward and backward took beside its inputs, and what it should be.
    peak_bytes: dict[str, int] = field(default_factory=dict)
    memory: Memory | None = None

    @property
    def dims(self) -> str:
        """Head dims as the label says them, `d128`; empty where it does not."""
        return next((word for word in self.label.split() if word[:1] == "d" and word[1:2].isdigit()), "")

    @property
    def best_peer(self) -> str | None:
        """The fastest kernel that is not ours."""
        peers = {k: v for k, v in self.tflops.items() if k not in (OURS, UNORDERED)}
        return max(peers, key=lambda k: peers[k]) if peers else None

    @property
    def ratio(self) -> float | None:
        """Ours over the best peer."""
        return self.over(self.best_peer) if self.best_peer else None

    def over(self, peer: str) -> float | None:
        """Ours over this peer; None where one of them did not run."""
        return self.tflops[OURS] / self.tflops[peer] if peer in self.tflops and OURS in self.tflops else None

    @property
    def ratio_to_unordered(self) -> float | None:
        """A deterministic backward over ours without turns."""
        both = OURS in self.tflops and UNORDERED in self.tflops
        return self.tflops[OURS] / self.tflops[UNORDERED] if both else None


def measure(
    cell: Cell,
    peers: Iterable[str],
    *,
    params: Mapping[str, Any],
    rounds: int,
    seed: int = 0,
    target: str | None = None,
    build: Callable[..., Any] | None = None,
    with_host: bool = False,
    device: str = "cuda",
    ceiling_size: int = 8192,
    backward: bool = False,
    captured: Callable[[Shape], dict[str, Any]] | None = None,
) -> Row:
    """Measure one cell on the current CUDA device. A kernel that cannot run is in `absent` with its reason.

    `backward`: the gradients of q, k and v are timed, everything that is launched for them, without the forward; a
    deterministic spec is measured without turns too.
    `captured` gives the values of captured tensors, on the CPU; without it they are drawn from the seed.
    `device="cpu"` measures the CPU reference and torch's CPU attention, for trying the benchmark itself.
    """
    import torch

    case, row = _case(cell, params, device, seed, backward, captured)
    found = kept(cell, case.params, case.tensors, tile_of(cell, target, backward))
    row.kept_share = found.pairs / max(1, cell.seqlen_q * cell.seqlen_kv)
    row.tile_share = found.tile_share
    calls = _prepare(case, peers, row, build, target, seed)
    slots = [timing.Slot(name, call) for name, call in calls.items()]
    ceiling, ceiling_flops = timing.matmul_slot(device, ceiling_size)
    timing.interleave([*slots, ceiling], rounds, seed)
    row.ceiling = ceiling_flops / ceiling.timing().median_ms / 1e9
    flops = cell.flops(found.pairs, backward=backward)
    for slot in slots:
        t = slot.timing()
        row.milliseconds[slot.name] = t.median_ms
        row.tflops[slot.name] = flops / t.median_ms / 1e9
        row.spread[slot.name] = (flops / t.high_ms / 1e9, flops / t.low_ms / 1e9)
        if with_host:
            row.host_us[slot.name] = timing.host_us(slot.call, max(20, min(300, int(20 / max(t.median_ms, 1e-3)))))
    del slots, calls, case
    if device == "cuda":
        torch.cuda.empty_cache()
    return row


def tile_of(cell: Cell, target: str | None, backward: bool) -> tuple[int, int]:
    """Rows and keys of the tile that our plan takes for a cell; (1, 1), single pairs, where no plan serves it."""
    from attngen.diag.diagnostic import AttnError
    from attngen.search import plan
    from attngen.search_backward import plan_backward
    from attngen.settings import DEFAULT_TARGET

    try:
        plans = (plan_backward if backward else plan)(cell.spec, target or DEFAULT_TARGET)
        chosen = plans.plans[plans.index(cell.seqlen_q, cell.seqlen_kv)].compute
        return chosen.tile_m, chosen.tile_n
    except AttnError:
        return 1, 1


def rehearse(
    cell: Cell,
    peers: Sequence[str],
    params: Mapping[str, Any],
    target: str | None,
    seed: int,
    backward: bool,
    captured: Callable[[Shape], dict[str, Any]] | None,
    device: str = "cuda",
) -> dict[str, str]:
    """Call everything that `measure` would, once, so that what is compiled on the way lies in the caches on disk.

    For processes of their own beside the one that measures. Returns the reasons of what did not run.
    """
    case, row = _case(cell, params, device, seed, backward, captured)
    _prepare(case, peers, row, None, target, seed)
    return row.absent


def arguments(
    cell: Cell,
    params: Mapping[str, Any],
    seed: int,
    captured: Callable[[Shape], dict[str, Any]] | None,
    device: str = "cuda",
) -> tuple[Any, Any, Any, dict[str, Any], float]:
    """q, k, v (bshd), params and captured tensors by name, and the kept pairs of a head, of one call of a cell."""
    case, _ = _case(cell, params, device, seed, False, captured)
    return case.q, case.k, case.v, {**case.params, **case.tensors}, kept(cell, case.params, case.tensors).pairs


def _case(
    cell: Cell,
    params: Mapping[str, Any],
    device: str,
    seed: int,
    backward: bool,
    captured: Callable[[Shape], dict[str, Any]] | None,
) -> tuple[Case, Row]:
    """The arguments of a cell, and its row with nothing measured."""
    from attngen import samples

    shape = samples.Shape(cell.batch, cell.heads_q, cell.heads_kv, cell.seqlen_q, cell.seqlen_kv)
    q, k, v = samples.qkv(cell.spec, shape, device=device, seed=seed)
    if cell.rising:
        q, k = samples.rising(q, k)
    tensors = samples.tensors(cell.spec, shape, device=device, seed=seed)
    if captured is not None:
        tensors |= {n: x.to(device) for n, x in captured(shape).items()}
    values = dict(params)
    if backward:
        q, k, v = leaves(q, k, v)
    row = Row(cell.label, cell.spec.name, shape.__dict__.copy(), 0.0)
    row.direction = "backward" if backward else "forward"
    if backward:
        row.memory = expected(cell, tensors)
    return Case(cell, features(cell.spec, values), q, k, v, values, tensors), row


def _prepare(
    case: Case, peers: Iterable[str], row: Row, build: Callable[..., Any] | None, target: str | None, seed: int
) -> dict[str, Call]:
    from attngen import api
    from attngen.diag.diagnostic import AttnError

    calls: dict[str, Call] = {}
    spec, do, expected = case.cell.spec, _gradient_of_o(case, seed), None
    own = {OURS: spec}
    if row.direction == "backward" and spec.backward.deterministic:
        own[UNORDERED] = spec.replace(backward=spec.backward.replace(deterministic=False))
    for name, variant in own.items():
        try:
            attn = (build or api.build)(variant, target=target)
            calls[name], got = _ours(case, attn, row, name, do)
            expected = got if expected is None else expected
        except AttnError as fault:
            row.absent[name] = fault.diagnostics[0].message
        except Exception as fault:  # one cell's failure must not cost the others' results
            row.absent[name] = _words(fault)
    for name in peers:
        peer = PEERS[name]
        if peer.module() is None:
            row.absent[name] = "not installed"
            continue
        try:
            if row.direction == "backward":
                keep_for_many()
            call = _directed(peer.prepare(case), (case.q, case.k, case.v), row, name, do)
            got = _tensors(call())
            _wait()
        except Unsupported as why:
            row.absent[name] = str(why)
            continue
        except Exception as fault:  # a peer's own failure is a row of the table, not ours
            row.absent[name] = _words(fault)
            continue
        if expected is not None:
            gap = max(float((x - y).norm() / y.norm().clamp_min(1e-9)) for x, y in zip(got, expected, strict=True))
            if not gap < _AGREE:
                row.absent[name] = f"computes something else here (relative difference {gap:.2g})"
                continue
        calls[name] = call
    return calls


def _ours(case: Case, attn: Any, row: Row, name: str, do: Any) -> tuple[Call, list[Any]]:
    """Our call, run once, and what it returns as fp32 tensors in the peers' layout."""
    bhsd = case.cell.spec.layout.value == "bhsd"
    inputs = [x.transpose(1, 2).contiguous() if bhsd else x for x in (case.q, case.k, case.v)]
    if row.direction == "backward" and bhsd:
        inputs, do = leaves(*inputs), do.transpose(1, 2).contiguous()

    def forward() -> Any:
        return attn(*inputs, **case.params, **case.tensors)

    call = _directed(forward, inputs, row, name, do)
    got = _tensors(call())
    _wait()
    return call, [x.transpose(1, 2) for x in got] if bhsd else got


def _directed(forward: Call, inputs: Sequence[Any], row: Row, name: str, do: Any) -> Call:
    """The forward itself, or the backward of one O; of that one forward and backward tell the memory."""
    if row.direction == "forward":
        return forward
    backward_of(forward, inputs, do)()  # whatever is compiled or cached on the first call does not count
    row.peak_bytes[name] = peak_bytes(lambda: backward_of(forward, inputs, do)())
    return backward_of(forward, inputs, do)


def _gradient_of_o(case: Case, seed: int) -> Any:
    """dO, random, in the layout of the peers."""
    import torch

    generator = torch.Generator(device=case.q.device).manual_seed(seed + 1)
    shape = (*case.q.shape[:3], case.v.shape[3])
    return torch.randn(shape, generator=generator, device=case.q.device, dtype=torch.float32).to(case.q.dtype)


def _tensors(result: Any) -> list[Any]:
    return [x.detach().float() for x in (result if isinstance(result, tuple | list) else (result,))]


def _words(fault: Exception) -> str:
    first = str(fault).strip().splitlines()[0][:120] if str(fault).strip() else ""
    return f"failed: {type(fault).__name__}: {first}"


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
