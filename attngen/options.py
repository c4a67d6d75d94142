"""Options: everything that `build` and `compile` take besides the spec. One field each: type, range, default, one line.

The command line's flags, the documentation's table and the did-you-mean of an unknown option come from these fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from attngen.diag.diagnostic import AttnError, Diagnostic

_TILE = re.compile(r"^\s*(\d+)\s*[xX]\s*(\d+)\s*$")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


def _pair(value: object) -> object:
    """`"128x64"`, `(128, 64)` or `[128, 64]` as a pair of ints."""
    if isinstance(value, str) and (match := _TILE.match(value)):
        return (int(match[1]), int(match[2]))
    return tuple(value) if isinstance(value, list) else value


def _dtype(value: object) -> object:
    """Accept torch's dtypes and their names beside the language's own."""
    name = str(value).removeprefix("torch.")
    return _DTYPES.get(name, value if isinstance(value, str) else name)


Pair = Annotated[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]], BeforeValidator(_pair)]
Auto = Literal["auto"]
#: What the clause takes (`syntax.limits.HEAD_DIM`); what a kernel serves of it is for the planner to say (E0402).
HeadDim = Annotated[int, Field(ge=1, le=4096, strict=True)]


class Options(BaseModel):
    """Overrides of a spec, each `None` unless given. A value that no plan can honour is an error at planning."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    head_dim: HeadDim | None = Field(
        None, description="head dimension of q and k, and of v unless the spec or head_dim_v gives v its own"
    )
    head_dim_v: HeadDim | None = Field(None, description="head dimension of v and o")
    dtype: Annotated[Literal["bf16", "fp16"], BeforeValidator(_dtype)] | None = Field(
        None, description="element type of q, k, v and o: bf16 or fp16 (torch's dtypes are understood)"
    )
    layout: Literal["bshd", "bhsd", "packed_qkv", "varlen", "padded", "paged"] | None = Field(
        None, description="memory layout of q, k, v and o"
    )
    deterministic: Annotated[bool, Field(strict=True)] | None = Field(
        None, description="the same bits of every gradient from run to run"
    )
    target: str | None = Field(None, description="GPU architecture to compile for, such as sm_90a")
    tile: Pair | Auto | None = Field(None, description='rows x keys of one tile, "128x128" or (128, 128)')
    stages: Annotated[int, Field(ge=1, le=8)] | Auto | None = Field(None, description="K/V stages in shared memory")
    order: Literal["lpt", "linear", "auto"] | None = Field(None, description="order of the row tiles")
    persistent: bool | Auto | None = Field(None, description="one CTA per SM that fetches tiles until none is left")
    cluster: Pair | Auto | None = Field(None, description='CTAs of a cluster, "2x1"')
    split_kv: Annotated[int, Field(ge=1, le=256)] | Auto | None = Field(
        None, description="parts that the keys are split into"
    )
    pack_gqa: Annotated[int, Field(ge=1, le=8)] | Auto | None = Field(
        None, description="query heads of one KV head that share a row tile: 1, 2, 4 or 8"
    )
    sm_margin: Annotated[int, Field(ge=0, le=512)] | Auto | None = Field(
        None, description="SMs left free for kernels that run at the same time"
    )
    pingpong: bool | Auto | None = Field(None, description="two consumer warpgroups alternate between MMA and softmax")

    @classmethod
    def parse(cls, values: Mapping[str, object]) -> Options:
        """Options from keyword arguments. Raises AttnError E0502 (unknown), E0503 (value), all at once."""
        faults = [_unknown(name) for name in values if name not in cls.model_fields]
        try:
            options = cls(**cast(Any, {n: v for n, v in values.items() if n in cls.model_fields}))
        except ValidationError as failure:
            faults += _bad_values(failure, values)
        if faults:
            raise AttnError(*faults)
        return options

    def language(self) -> dict[str, object]:
        """The overrides that change what the spec says, as the syntax layer takes them."""
        names = ("head_dim", "head_dim_v", "dtype", "layout", "deterministic")
        return {n: getattr(self, n) for n in names if getattr(self, n) is not None}

    def schedule(self) -> dict[str, object]:
        """The overrides of the `schedule` clause, by field of `ScheduleHints`. `auto` clears what the spec asks for."""
        changes: dict[str, object] = {}
        for name in ("stages", "order", "persistent", "cluster", "split_kv", "pack_gqa", "sm_margin", "pingpong"):
            value = getattr(self, name)
            if value is not None:
                changes[name] = None if value == "auto" else value
        if self.tile == "auto":
            changes |= {"tile_m": None, "tile_n": None}
        elif self.tile is not None:
            changes |= {"tile_m": self.tile[0], "tile_n": self.tile[1]}
        return changes


def table() -> list[tuple[str, str]]:
    """Name and one-line description of every option, in order."""
    return [(name, field.description or "") for name, field in Options.model_fields.items()]


def _unknown(name: str) -> Diagnostic:
    from difflib import get_close_matches

    known = tuple(Options.model_fields)
    close = get_close_matches(name, known, n=1)
    mend = f"did you mean `{close[0]}`?" if close else f"the options are {', '.join(known)}"
    return Diagnostic("E0502", f"unknown option `{name}`", helps=(mend,))


def _bad_values(failure: ValidationError, values: Mapping[str, object]) -> list[Diagnostic]:
    """One diagnostic for each option at fault (pydantic reports every arm of a union)."""
    reasons: dict[str, list[str]] = {}
    for item in failure.errors(include_url=False):
        message = item["msg"][0].lower() + item["msg"][1:]
        reasons.setdefault(str(item["loc"][0]), []).append(message)
    about = dict(table())
    return [
        Diagnostic(
            "E0503",
            f"option `{name}` does not take {values[name]!r}",
            notes=(f"{name}: {about[name]}",),
            helps=("; or ".join(dict.fromkeys(why)),),
        )
        for name, why in reasons.items()
    ]
