"""Tuned choices: what `attngen tune` measured on the chips of this machine, and what ships of such runs.

    <root>/tuned/<target>.json      {"schema": 2, "records": [Tuned, ...]}
    targets/<target>_tuned.json     the same, of the package: data, written by `attngen tune --export`

A record belongs to a chip (its name as the driver says it) and a class of specs (`spec_class`); within it, lengths are
the classes of shapes. A spec that asks for a tile, stages, order or ping-pong of its own is not tuned: what it says is
what it gets. The machine's own record comes before the one that ships.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from filelock import FileLock
from pydantic import ValidationError

from attngen.diag.diagnostic import error
from attngen.ir.expr import const
from attngen.ir.spec import AttentionSpec, BackwardHints, ScheduleHints
from attngen.ir.tuned import Direction, Tuned
from attngen.ir.types import DType, Layout
from attngen.source import write_atomic

log = logging.getLogger("attngen.tuned")
SCHEMA = 2


def spec_class(spec: AttentionSpec, direction: Direction = "forward") -> str:
    """A name for everything of `spec` that a choice of this direction depends on.

    Not of it: names, documentation, defaults of params, which tensors are `grad`, the scale, which 16-bit dtype, which
    dense layout, of the `schedule` clause all but the query heads that share a tile, and of a forward how gradients are
    added up.
    """
    dense = spec.layout if spec.layout.is_ragged else Layout.BSHD
    bare = spec.replace(
        name="",
        doc=None,
        dtype=DType.BF16,
        layout=dense,
        scale=const(1.0),
        params=tuple(p.replace(default=None) for p in spec.params),
        tensors=tuple(t.replace(grad=False) for t in spec.tensors),
        schedule=ScheduleHints(pack_gqa=pack_of(spec) if pack_of(spec) > 1 else None),
        backward=BackwardHints() if direction == "forward" else spec.backward,
        targets=(),
    )
    return hashlib.sha256(f"{direction} {bare.model_dump_json()}".encode()).hexdigest()[:16]


def pack_of(spec: AttentionSpec) -> int:
    """Query heads of a KV head that share a row tile of this spec's kernel."""
    return spec.schedule.pack_gqa or 1


def is_tunable(spec: AttentionSpec) -> bool:
    """Whether the spec leaves its plan to the search."""
    s = spec.schedule
    return (s.tile_m, s.tile_n, s.stages, s.order, s.pingpong, s.cluster) == (None,) * 6


def path_of(root: Path, target: str) -> Path:
    """The file of a target."""
    return root / "tuned" / f"{target}.json"


def records(root: Path, target: str) -> tuple[Tuned, ...]:
    """All records of a target in the store."""
    return _read(path_of(root, target))


def shipped_path(target: str) -> Path:
    """The file of records that come with the package."""
    name = target.removesuffix("a").replace("_", "")
    return Path(__file__).resolve().parent / "targets" / f"{name}_tuned.json"


@cache
def shipped(target: str) -> tuple[Tuned, ...]:
    """The records that come with the package."""
    return _read(shipped_path(target))


def _read(path: Path) -> tuple[Tuned, ...]:
    """Records of a file. One of another schema, or one that is damaged, counts as none and is named in the log: tuning
    is an optimisation, its loss no fault of a call.
    """
    try:
        found = json.loads(path.read_bytes())
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']}, this attngen reads {SCHEMA}")
        return tuple(Tuned.model_validate(r) for r in found["records"])
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as why:
        log.warning("tuned choices in %s are not used: %s", path, str(why).splitlines()[0])
        return ()


def find(root: Path, target: str, chip: str, spec: AttentionSpec, direction: Direction = "forward") -> Tuned | None:
    """The record for this chip and spec: the store's, else the one that ships."""
    if direction == "forward" and not is_tunable(spec):
        return None
    wanted = (chip, spec_class(spec, direction))
    return next((r for r in (*records(root, target), *shipped(target)) if (r.chip, r.spec_class) == wanted), None)


def keep(root: Path, target: str, record: Tuned) -> Path:
    """Add a record in place of an older one of its chip and class; returns the file.

    Raises: AttnError E0520 where the folder cannot be written.
    """
    return _add(path_of(root, target), record)


def export(path: Path, record: Tuned) -> Path:
    """Add a record to a file of the shipped form: rates of its own plans only.

    Raises: AttnError E0520 where the file cannot be written.
    """
    return _add(path, record.replace(rates=tuple(r for r in record.rates if r.choice in record.plans)))


def as_text(found: Sequence[Tuned]) -> str:
    """A file of records, a line each: so differences of what ships can be read."""
    lines = ",\n".join("  " + r.model_dump_json() for r in found)
    return f'{{"schema": {SCHEMA}, "records": [\n{lines}\n]}}\n'


def _add(path: Path, record: Tuned) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock"), timeout=30):
            mine = (record.chip, record.spec_class)
            others = [r for r in _read(path) if (r.chip, r.spec_class) != mine]
            write_atomic(path, as_text((*others, record)).encode())
    except OSError as why:
        raise error(
            "E0520",
            f"tuned choices cannot be kept in {path.parent}: {why.strerror or why}",
            helps=("name a folder that can be written: ATTNGEN_CACHE_DIR",),
        ) from why
    return path


def forget(root: Path, target: str, spec: AttentionSpec | None = None) -> int:
    """Remove the records of a spec, of both directions, or all; returns how many there were."""
    path = path_of(root, target)
    if not path.exists():
        return 0
    with FileLock(path.with_suffix(".lock"), timeout=30):
        found = records(root, target)
        gone = () if spec is None else (spec_class(spec), spec_class(spec, "backward"))
        left = [r for r in found if spec is not None and r.spec_class not in gone]
        write_atomic(path, as_text(left).encode())
    return len(found) - len(left)
