"""Arguments that several commands take, the same words in each: the spec, what changes it, the shape of a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from attngen.cli.common import Usage, printable
from attngen.cli.files import read_source

if TYPE_CHECKING:
    from attngen.ir.spec import AttentionSpec

Source = Annotated[str, typer.Argument(metavar="SPEC", help="A .attn file, or - for stdin.", show_default=False)]
Name = Annotated[str | None, typer.Option("--name", help="Which attention block (default: the last).")]
Target = Annotated[
    str | None,
    typer.Option("--target", help="Architecture, e.g. sm_90a (default: ATTNGEN_TARGET, the spec's, sm_90a)."),
]
DTypeOption = Annotated[str | None, typer.Option("--dtype", help="bf16 or fp16 in place of the spec's.")]
HeadDim = Annotated[str | None, typer.Option("--head-dim", help="Head dim, e.g. 64, or 192x128 for q/k and v.")]
LayoutOption = Annotated[str | None, typer.Option("--layout", help="bshd, bhsd or packed_qkv in place of the spec's.")]
Tile = Annotated[str | None, typer.Option("--tile", help="tile_m x tile_n, e.g. 128x128.")]
Stages = Annotated[int | None, typer.Option("--stages", help="K/V stages in shared memory.", min=1, max=64)]
Order = Annotated[str | None, typer.Option("--order", help="Tile order: lpt or linear.")]
Deterministic = Annotated[
    bool | None,
    typer.Option("--deterministic/--no-deterministic", help="Gradients with the same bits from run to run, or not."),
]

SeqlenKv = Annotated[int | None, typer.Option("--seqlen-kv", min=1, max=2**24, help="Keys, where not as many as rows.")]
Batch = Annotated[int | None, typer.Option("--batch", min=1, max=2**20, help="Default: 32768 tokens in all.")]
Heads = Annotated[
    int | None, typer.Option("--heads", min=1, max=65536, help="Query heads (default: width 2048 in all).")
]
HeadsKv = Annotated[
    int | None, typer.Option("--heads-kv", min=1, max=65536, help="KV heads (default: as many as query heads).")
]
Params = Annotated[list[str] | None, typer.Option("--param", help="NAME=VALUE of a run-time param; repeatable.")]


def overrides(
    *,
    dtype: str | None = None,
    head_dim: str | None = None,
    layout: str | None = None,
    tile: str | None = None,
    stages: int | None = None,
    order: str | None = None,
    deterministic: bool | None = None,
) -> dict[str, object]:
    """The override options as `attngen.options.Options` takes them."""
    changes: dict[str, object] = {}
    if head_dim is not None:
        parts = head_dim.lower().split("x")
        if len(parts) > 2 or not all(p.isascii() and p.isdigit() and len(p) < 7 for p in parts):
            raise Usage(
                f"--head-dim takes a number such as 64, or 192x128 for q/k and v, found {printable(head_dim)!r}"
            )
        changes["head_dim"] = int(parts[0])
        if len(parts) == 2:
            changes["head_dim_v"] = int(parts[1])
    plain: dict[str, object] = {"dtype": dtype, "layout": layout, "tile": tile, "stages": stages, "order": order}
    plain["deterministic"] = deterministic
    return changes | {k: v for k, v in plain.items() if v is not None}


def load(source: str, name: str | None, changes: Mapping[str, object]) -> AttentionSpec:
    """The spec that SOURCE, --name and the override options mean."""
    from attngen import specs
    from attngen.options import Options

    return specs.resolve(read_source(source), name, Options.parse(changes))


def pick_target(spec: AttentionSpec, target: str | None) -> str:
    """--target, else ATTNGEN_TARGET, else the spec's first target, else sm_90a: as `attngen compile` picks."""
    from attngen.settings import DEFAULT_TARGET, settings

    return target or settings().target or (spec.targets[0] if spec.targets else DEFAULT_TARGET)


def settings_of(items: Iterable[str], option: str) -> dict[str, str]:
    """`NAME=VALUE` options as a dict."""
    found: dict[str, str] = {}
    for item in items:
        key, sign, value = item.partition("=")
        if not sign or not key:
            raise Usage(f"{option} takes NAME=VALUE, found {printable(item)!r}")
        found[key.strip()] = value.strip()
    return found


def lengths_of(text: str) -> tuple[int, ...]:
    """The lengths of --seqlen, such as `1024,4096`."""
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isascii() and p.isdigit() and 0 < int(p) < 2**24 for p in parts):
        raise Usage(f"--seqlen takes lengths from 1 to {2**24 - 1} such as 1024,4096, found {printable(text)!r}")
    return tuple(int(p) for p in parts)
