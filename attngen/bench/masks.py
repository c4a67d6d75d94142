"""What the metadata of a mask costs: tables of packed documents beside FlexAttention's `create_block_mask`.

One packed sequence, causal inside its documents, whose lengths are drawn from the seed. The tables are measured twice:
as the time of the kernel that fills them (torch's profiler, by the kernel's name) and as what a call without a kept
handle takes more than one with it. A tile map is measured in the same way, of the same documents with their ids in no
order: as many pairs are kept, and no position follows from an id. FlexAttention's block mask is built as its users do,
compiled and, where its N x N booleans fit, in eager mode. Memory: of tables and map, their words; of a block mask, what
the allocator held at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from attngen.bench.memory import megabytes
from attngen.bench.timing import Slot, interleave, run_once

SEQLEN = 131072
#: Bytes that an eager `create_block_mask` may hold for a moment, about 8 a pair.
_EAGER_BYTES = 64e9


#: The documents of examples/packing.attn where ids promise no order: `block_sparse` finds the tiles.
UNSORTED = """attn 1
attention packing_unsorted {
  head_dim = 128
  tensor doc: i32[batch, seqlen_kv]
  mask = kv_idx <= q_pos and doc[b, q_pos] == doc[b, kv_idx]
  block_sparse { q = 128, kv = 128 }
}
"""


@dataclass(frozen=True)
class MapCost:
    """Of a tile map: milliseconds of the forward with the map made in the call and kept, of the kernel that makes it
    (None: not seen), and bytes.
    """

    call_ms: float
    kept_ms: float
    map_ms: float | None
    map_bytes: int

    def line(self) -> str:
        """The result as text."""
        ms = self.map_ms if self.map_ms is not None else max(self.call_ms - self.kept_ms, 0.0)
        return (
            f"tile map, ids in no order: {1e3 * ms:.1f} us, {100 * ms / self.kept_ms:.2f} % of its attention "
            f"({self.kept_ms:.3f} ms with the map kept), {megabytes(self.map_bytes)}"
        )


@dataclass(frozen=True)
class Cost:
    """Milliseconds and bytes; None: not measured here."""

    seqlen: int
    documents: int
    heads: int
    head_dim: int
    #: Forward with tables filled in the call, and with tables kept.
    call_ms: float
    kept_ms: float
    #: Of the kernel that fills the tables.
    tables_ms: float | None
    tables_bytes: int
    #: FlexAttention's block mask: compiled (after its compilation), and eager.
    flex_ms: float | None
    flex_bytes: int | None
    flex_eager_ms: float | None
    flex_eager_bytes: int | None
    tile_map: MapCost | None = None

    def lines(self) -> list[str]:
        """The result as text."""
        tables = self.tables_ms if self.tables_ms is not None else max(self.call_ms - self.kept_ms, 0.0)
        how = "its kernel" if self.tables_ms is not None else "the difference of two calls"
        out = [
            f"packed batch: {self.seqlen} tokens, {self.documents} documents, causal inside each, "
            f"{self.heads} heads of {self.head_dim}",
            f"attention forward: {self.call_ms:.3f} ms a call, {self.kept_ms:.3f} ms with tables kept",
            f"tables: {1e3 * tables:.1f} us ({how}), {100 * tables / self.kept_ms:.2f} % of the attention, "
            f"{megabytes(self.tables_bytes)}",
            *([self.tile_map.line()] if self.tile_map is not None else []),
        ]
        for kind, ms, count in (
            ("compiled", self.flex_ms, self.flex_bytes), ("eager", self.flex_eager_ms, self.flex_eager_bytes)
        ):  # fmt: skip
            if ms is not None:
                held = f", {megabytes(count)} at its peak" if count is not None else ""
                out.append(
                    f"FlexAttention's create_block_mask, {kind}: {1e3 * ms:.1f} us, "
                    f"{100 * ms / self.kept_ms:.2f} % of the attention{held}"
                )
        return out

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def document_ids(seqlen: int, mean: int, seed: int) -> Any:
    """Ids (1, seqlen), int32, of documents whose lengths are uniform in [1, 2 * mean)."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, max(2 * mean, 2), (seqlen,), generator=generator)
    ends = lengths.cumsum(0)
    return torch.searchsorted(ends, torch.arange(seqlen), right=True).to(torch.int32)[None]


def measure(
    seqlen: int = SEQLEN, *, heads: int = 16, head_dim: int = 128, mean: int = 2048, rounds: int = 7, seed: int = 0,
    device: str = "cuda", target: str | None = None,
) -> Cost:  # fmt: skip
    """Measure one packed batch."""
    import torch

    from attngen import api
    from attngen.ir.tables import words
    from attngen.resources import read

    attn: Any = api.build(read("examples/packing.attn"), name="packing_ids", head_dim=head_dim, target=target)
    doc = document_ids(seqlen, mean, seed).to(device)
    q, k, v = (torch.randn(1, seqlen, heads, head_dim, device=device).bfloat16() for _ in range(3))
    kept = attn.tables()

    def call() -> Any:
        return attn(q, k, v, doc=doc)

    slots = [Slot("call", call), Slot("kept", lambda: attn(q, k, v, doc=doc, tables=kept))]
    interleave(slots, rounds, seed)
    sizes = {"batch": 1, "heads_q": heads, "seqlen_q": seqlen, "seqlen_kv": seqlen}
    compiled = _block_mask(doc, seqlen, device, compiled=True) if device == "cuda" else (None, None)
    eager = _block_mask(doc, seqlen, device, compiled=False) if 8 * seqlen**2 < _EAGER_BYTES else (None, None)
    return Cost(
        seqlen=seqlen,
        documents=int(doc.max()) + 1,
        heads=heads,
        head_dim=head_dim,
        call_ms=slots[0].timing().median_ms,
        kept_ms=slots[1].timing().median_ms,
        tables_ms=_kernel_ms(call, "_tables") if device == "cuda" else None,
        tables_bytes=4 * words(attn.source.meta["tables"], sizes),
        flex_ms=compiled[0],
        flex_bytes=compiled[1],
        flex_eager_ms=eager[0],
        flex_eager_bytes=eager[1],
        tile_map=_map_cost(q, k, v, doc, rounds, seed, device, target),
    )


def _map_cost(q: Any, k: Any, v: Any, doc: Any, rounds: int, seed: int, device: str, target: str | None) -> MapCost:
    """The tile map of the same documents, ids shuffled."""
    import torch

    from attngen import api
    from attngen.ir.tile_map import map_words

    attn: Any = api.build(UNSORTED, head_dim=q.shape[3], target=target)
    order = torch.randperm(int(doc.max()) + 1, generator=torch.Generator().manual_seed(seed)).to(doc)
    ids, kept = order[doc.long()], attn.tables()

    def call() -> Any:
        return attn(q, k, v, doc=ids)

    slots = [Slot("call", call), Slot("kept", lambda: attn(q, k, v, doc=ids, tables=kept))]
    interleave(slots, rounds, seed)
    meta, sizes = attn.source.meta, {"batch": 1, "heads_q": q.shape[2], "seqlen_q": q.shape[1], "seqlen_kv": q.shape[1]}
    plan = meta["plans"][attn.plan_set.index(q.shape[1], q.shape[1])]
    return MapCost(
        call_ms=slots[0].timing().median_ms,
        kept_ms=slots[1].timing().median_ms,
        map_ms=_kernel_ms(call, "_map") if device == "cuda" else None,
        map_bytes=4 * map_words(meta["map"], plan, sizes),
    )


def _kernel_ms(call: Callable[[], Any], word: str, calls: int = 20) -> float | None:
    """Milliseconds of one kernel whose name has `word` in it, by torch's profiler; None where it sees no kernel."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    found = [e for e in seen.key_averages() if word in e.key and e.device_time_total]
    count = sum(e.count for e in found)
    return sum(e.device_time_total for e in found) / count / 1e3 if count else None


def _block_mask(doc: Any, seqlen: int, device: str, *, compiled: bool) -> tuple[float | None, int | None]:
    """Milliseconds and peak bytes of FlexAttention's block mask of the same documents; None where it fails."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    ids = doc[0]

    def causal_in_documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])

    make: Any = torch.compile(create_block_mask) if compiled else create_block_mask

    def call() -> Any:
        return make(causal_in_documents, None, None, seqlen, seqlen, device=device)

    try:
        call()
        if device != "cuda":
            return run_once(call, 1), None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        held = torch.cuda.max_memory_allocated() - before
        return min(run_once(call, 5) for _ in range(3)), held
    except (RuntimeError, torch.OutOfMemoryError):  # what does not fit is not measured
        return None, None
