"""Memory of a tile map: two or three bits for each tile of a call, allocated for a launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attngen.ir.spec import AttentionSpec
from attngen.ir.tile_map import map_words
from attngen.jit.device import DeviceState

Tail = tuple[Any, ...]


class MapMemory:
    """What a kernel file says of its map, for one direction. The kernel takes it behind params and captured tensors."""

    def __init__(self, place: int, meta: Mapping[str, Any]) -> None:
        self._place = place
        self._entry, self._plans, self._limits = meta["map"], tuple(meta["plans"]), tuple(meta["limits"])

    @staticmethod
    def of(spec: AttentionSpec, meta: Mapping[str, Any]) -> MapMemory | None:
        """Of ATTN_META, or of its entry `backward`; None where the kernel has no map."""
        return MapMemory(len(spec.params) + len(spec.tensors), meta) if "map" in meta else None

    def joined(self, tail: Tail, state: DeviceState, batch: int, heads_q: int, seqlen_q: int, seqlen_kv: int) -> Tail:
        """`tail` with int32 words, not initialised, for a call of these extents."""
        longest = max(seqlen_q, seqlen_kv)
        plan = next((i for i, limit in enumerate(self._limits) if longest <= limit), len(self._limits))
        sizes = {"batch": batch, "heads_q": heads_q, "seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv}
        words = map_words(self._entry, self._plans[plan], sizes)
        made = torch.empty(words, dtype=torch.int32, device=state.device)
        return *tail[: self._place], made, *tail[self._place :]

    def without(self, tail: Tail) -> Tail:
        """`tail` as it was before `joined`."""
        return *tail[: self._place], *tail[self._place + 1 :]
