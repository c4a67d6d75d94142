"""How long calls of each kind keep the host busy: plain, by tables, maps and lists, of several kernels, ragged.

Shapes are small, so that the GPU is never what a call waits for. A plain call is an allocation and a launch; what
others take beside as many launches is attngen's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from attngen.bench.timing import host_us

#: Rows and keys, query heads and KV heads.
ROWS, HEADS, HEADS_KV = 256, 8, 2
_CAUSAL = "  mask = kv_idx <= q_pos\n"
_DOCUMENTS = "  tensor doc: i32[batch, seqlen_kv] sorted\n  mask = doc[b, q_pos] == doc[b, kv_idx]\n"


def _blocks(q: int, kv: int) -> str:
    return f"{_CAUSAL}  block_sparse {{ q = {q}, kv = {kv}, lists = given }}\n"


_SEGMENT = f"{_CAUSAL}  segment past {{ }}\n"
_BRANCHES = f"{_CAUSAL}  branch one {{ }}\n  branch two {{\n    weight = -0.5\n  }}\n"


#: Positional and named arguments of a call.
Given = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Kind:
    """Calls of one kind: the spec's clauses, what a call is given on a device, and whether by a handle of tables."""

    name: str
    clauses: str
    given: Callable[[str], Given]
    by_handle: bool = False

    @property
    def spec(self) -> str:
        """The spec's text."""
        return f"attn 1\nattention calls {{\n  head_dim = 64\n{self.clauses}}}\n"


@dataclass(frozen=True)
class Busy:
    """Microseconds of the host for a call of a kind, median of rounds, and the least."""

    name: str
    us: float
    least_us: float

    def line(self) -> str:
        """The result as text."""
        return f"{self.us:8.1f} us, least {self.least_us:7.1f}   {self.name}"


def _qkv(device: str) -> tuple[Any, Any, Any]:
    import torch

    q, k, v = (torch.randn(1, ROWS, h, 64, device=device).bfloat16() for h in (HEADS, HEADS_KV, HEADS_KV))
    return q, k, v


def _plain(device: str) -> Given:
    return _qkv(device), {}


def _with(name: str, *shape: int, is_map: bool = False) -> Callable[[str], Given]:
    """Documents of one id, lists of one block; a map of all blocks."""

    def given(device: str) -> Given:
        import torch

        make = torch.ones if is_map else torch.zeros
        return _qkv(device), {name: make(shape, dtype=torch.bool if is_map else torch.int32, device=device)}

    return given


def _segment(device: str) -> Given:
    return _qkv(device), {"segments": {"past": _qkv(device)[1:]}}


def _branches(device: str) -> Given:
    (q, k, v), (q2, k2, _) = _qkv(device), _qkv(device)
    return ((q, q2), (k, k2), v), {}


def _packed_rows(device: str) -> Given:
    import torch

    starts = torch.tensor([0, ROWS // 3, ROWS], dtype=torch.int32, device=device)
    return tuple(x[0] for x in _qkv(device)), {"cu_seqlens_q": starts}


def _packed_segment(device: str) -> Given:
    own, named = _packed_rows(device)
    return own, {**named, "segments": {"past": (own[1], own[2], named["cu_seqlens_q"])}}


def _packed_blocks(device: str) -> Given:
    import torch

    own, named = _packed_rows(device)
    return own, {**named, "blocks": torch.ones(2, 1, 4, 4, dtype=torch.bool, device=device)}


def _one_qkv(device: str) -> Given:
    import torch

    return (torch.randn(1, ROWS, 3, HEADS, 64, device=device).bfloat16(),), {}


def kinds() -> Iterator[Kind]:
    """The kinds of calls that are measured."""
    yield Kind("plain", _CAUSAL, _plain)
    for by_handle in (False, True):
        kept = ", kept" * by_handle
        yield Kind(f"documents{kept}", _DOCUMENTS, _with("doc", 1, ROWS), by_handle)
        yield Kind(f"blocks{kept}", _blocks(64, 64), _with("blocks", 1, 1, 4, 4, is_map=True), by_handle)
        yield Kind(f"key lists{kept}", _blocks(64, 1), _with("blocks", 1, 1, 4, 64), by_handle)
        yield Kind(f"row lists{kept}", _blocks(1, 16), _with("blocks", 1, 1, ROWS, 3), by_handle)
        yield Kind(f"varlen blocks{kept}", f"{_blocks(64, 64)}  layout = varlen\n", _packed_blocks, by_handle)
    yield Kind("segment", _SEGMENT, _segment)
    yield Kind("branches", _BRANCHES, _branches)
    yield Kind("varlen", f"{_CAUSAL}  layout = varlen\n", _packed_rows)
    yield Kind("padded, no lengths given", f"{_CAUSAL}  layout = padded\n", _plain)
    yield Kind("varlen segment", f"{_SEGMENT}  layout = varlen\n", _packed_segment)
    yield Kind("one qkv", f"{_CAUSAL}  layout = packed_qkv\n", _one_qkv)


def call_of(kind: Kind, attn: Any, device: str) -> Callable[[], Any]:
    """A call of the kind by its attention, again and again on the same tensors."""
    positional, named = kind.given(device)
    if kind.by_handle:
        named = {**named, "tables": attn.tables()}
    return lambda: attn(*positional, **named)


def measure(rounds: int, *, device: str = "cuda", target: str | None = None) -> list[Busy]:
    """Every kind, in turn, `rounds` times."""
    import torch

    from attngen import api

    calls = {k.name: call_of(k, api.build(k.spec, target=target), device) for k in kinds()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(rounds):
            for name, call in calls.items():
                call()
                found[name].append(host_us(call, 20))
    return [Busy(name, statistics.median(x), min(x)) for name, x in found.items()]
