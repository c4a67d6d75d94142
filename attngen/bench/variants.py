"""The grid of variants: masks and scores beside plain causal, where FlexAttention is the peer that serves them all.

Each row is an example of the gallery at this grid's head dim and lengths, with values of its params and captured
tensors; the shapes are those of published FlexAttention tables: batch 2, 16 heads, 16 K rows, head dim 128, and for the
small window GPT-OSS's head dim 64 with the model width kept. Unmasked rows are there to be compared with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attngen.bench.cells import WIDTH, Cell
from attngen.samples import Shape

if TYPE_CHECKING:
    from attngen.bench.cells import Captured

#: The peer that a grid of variants is compared with, whatever else serves some of them.
AGAINST = "flex"
BATCH, SEQLEN = 2, 16384
WINDOW, DOCUMENT, PREFIX, CAP, SLOPE, SINK_WINDOW = 1025, 1500, 4096, 30.0, 0.001, 128


@dataclass(frozen=True)
class Variant:
    """A row: an attention block of an example, and what it is called with. `captured` None: drawn from the seed."""

    title: str
    example: str
    block: str
    params: dict[str, int | float] = field(default_factory=dict)
    captured: Captured | None = None
    head_dim: int = 128

    def cell(self, changes: dict[str, object], seqlen: int = SEQLEN) -> Cell:
        """Its cell, with the tile, dtype and so on of `changes`; raises AttnError as `specs.resolve` does."""
        from attngen import specs
        from attngen.options import Options
        from attngen.resources import read

        options = Options.parse({"head_dim": self.head_dim, **changes})
        spec = specs.resolve(read(f"examples/{self.example}.attn"), self.block, options)
        heads = max(1, WIDTH // spec.head_dim_v)
        batch = max(1, BATCH * SEQLEN // seqlen)
        return Cell(spec, batch, heads, heads, seqlen, seqlen, self.title)


def starts(shape: Shape) -> dict[str, Any]:
    """Documents of DOCUMENT tokens: where each position's begins."""
    import torch

    places = torch.arange(shape.seqlen_kv, dtype=torch.int32)
    return {"start": (places // DOCUMENT * DOCUMENT).expand(shape.batch, -1).contiguous()}


def _prefix(shape: Shape) -> dict[str, Any]:
    import torch

    return {"prefix": torch.full((shape.batch,), PREFIX, dtype=torch.int32)}


def slopes(shape: Shape) -> dict[str, Any]:
    """ALiBi's: 2^(-8 (h + 1) / heads)."""
    import torch

    heads = torch.arange(1, shape.heads_q + 1, dtype=torch.float32)
    return {"slopes": torch.exp2(-8.0 * heads / shape.heads_q)}


VARIANTS: tuple[Variant, ...] = (
    Variant("full", "full", "full"),
    Variant("causal", "causal", "causal"),
    Variant("window 1024", "mistral", "mistral", {"window": WINDOW}),
    Variant("documents 1500", "packing", "packing", captured=starts),
    Variant("prefix 4096", "prefix_lm", "prefix_lm", captured=_prefix),
    Variant("ALiBi causal", "alibi", "alibi", captured=slopes),
    Variant("softcap causal", "gemma2", "gemma2_global", {"cap": CAP}),
    Variant("relative", "relative", "relative", {"slope": SLOPE}),
    Variant("full", "full", "full", head_dim=64),
    Variant("window 128, sinks", "gpt_oss", "gpt_oss_local", {"window": SINK_WINDOW}, head_dim=64),
)


def chosen(words: str | None) -> tuple[Variant, ...]:
    """The rows whose title begins with one of the words (commas between), all where None; KeyError for no row's."""
    if words is None:
        return VARIANTS
    wanted = [w.strip().lower() for w in words.split(",") if w.strip()]
    for word in wanted:
        if not any(v.title.lower().startswith(word) for v in VARIANTS):
            raise KeyError(word)
    return tuple(v for v in VARIANTS if any(v.title.lower().startswith(w) for w in wanted))
