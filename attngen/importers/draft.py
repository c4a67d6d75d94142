"""A spec put together clause by clause, for importers of options: masks as conjuncts, a score, captured tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attngen.importers.imported import Imported, declared, refused

if TYPE_CHECKING:
    import torch


@dataclass
class Draft:
    """What an importer has understood so far; expressions are spec text."""

    masks: list[str] = field(default_factory=list)
    score: str = "s"
    sink: str | None = None
    params: dict[str, dict[str, object]] = field(default_factory=dict)
    tensors: dict[str, dict[str, object]] = field(default_factory=dict)
    given: dict[str, torch.Tensor] = field(default_factory=dict)

    def param(self, name: str, value: int | float, **bounds: object) -> str:
        """A run-time scalar with its value as the default: changing it never recompiles."""
        kind = "float" if isinstance(value, float) else "int"
        self.params[name] = {"type": kind, "default": value, **bounds}
        return name

    def tensor(self, name: str, value: torch.Tensor, dims: Sequence[str], *, sorted: bool = False) -> str:
        """A captured tensor, `grad` where it requires gradients."""
        dtype, self.given[name] = declared(name, value)
        self.tensors[name] = {
            "dtype": dtype.value,
            "dims": tuple(dims),
            "grad": value.requires_grad,
            "sorted": sorted,
        }
        return name

    def band(self, position: str, left: int | None, right: int | None) -> None:
        """Keep `left` keys before a row's position and `right` keys after it, both ends included; None: all of them."""
        if right == 0:
            self.masks.append(f"kv_idx <= {position}")
        elif right is not None:
            self.masks.append(f"kv_idx - ({position}) <= {self.param('window_right', right, minimum=0)}")
        if left is not None:
            self.masks.append(f"{position} - kv_idx <= {self.param('window_left', left, minimum=0)}")

    def broadcast(self, name: str, value: torch.Tensor, option: str) -> str:
        """One element of a tensor that broadcasts to (batch, heads_q, seqlen_q, seqlen_kv); axes of extent 1 go."""
        axes = (("batch", "b"), ("heads_q", "h"), ("seqlen_q", "q_idx"), ("seqlen_kv", "kv_idx"))
        if not 1 <= value.dim() <= 4:
            raise refused(
                option, f"has {value.dim()} axes", "it must broadcast to (batch, heads_q, seqlen_q, seqlen_kv)"
            )
        own = axes[4 - value.dim() :]
        kept = [i for i, n in enumerate(value.shape) if n != 1] or [value.dim() - 1]
        lean = value.squeeze([i for i in range(value.dim()) if i not in kept]) if len(kept) < value.dim() else value
        self.tensor(name, lean, [own[i][0] for i in kept])
        return f"{name}[{', '.join(own[i][1] for i in kept)}]"

    def finished(self, name: str, options: dict[str, Any], notes: tuple[str, ...] = ()) -> Imported:
        """The spec, checked as a file is."""
        from attngen.syntax import make_spec

        spec = make_spec(
            name,
            mask=" and ".join(f"({m})" for m in self.masks) or None,
            score=None if self.score == "s" else self.score,
            sink=self.sink,
            params=self.params,
            tensors=self.tensors,
            include=(),
            **options,
        )
        values = {n: p["default"] for n, p in self.params.items()}
        return Imported(spec, dict(self.given), values, notes)  # type: ignore[arg-type]


def no_dropout(option: str, probability: object) -> None:
    """Dropout is nowhere in the language."""
    if probability not in (None, 0, 0.0):
        raise refused(option, "a spec has no dropout", "set it to 0, as in evaluation")


def vector(option: str, value: torch.Tensor) -> torch.Tensor:
    """A tensor of ints or floats with one axis longer than 1, flattened."""
    if value.dim() and max(value.shape, default=1) != value.numel():
        raise refused(option, f"has shape {tuple(value.shape)}", "give one number for each batch element or head")
    return value.reshape(-1)
