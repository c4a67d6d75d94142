"""The store of tuned choices: what `attngen tune` measured on the chips of this machine.

    <root>/tuned/<target>.json      {"schema": 1, "records": [Tuned, ...]}

A record belongs to a chip (its name as the driver says it) and a class of specs: those that mean the same but for
names, documentation, defaults of params and the `schedule` clause. A spec that asks for a tile, stages, order or
ping-pong of its own is not tuned: what it says is what it gets.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from filelock import FileLock
from pydantic import ValidationError

from attngen.diag.diagnostic import error
from attngen.ir.spec import AttentionSpec, ScheduleHints
from attngen.ir.tuned import Tuned
from attngen.source import write_atomic

log = logging.getLogger("attngen.tuned")
SCHEMA = 1


def spec_class(spec: AttentionSpec) -> str:
    """A name for everything of `spec` that a plan depends on."""
    params = tuple(p.replace(default=None) for p in spec.params)
    bare = spec.replace(name="", doc=None, params=params, schedule=ScheduleHints(), targets=())
    return hashlib.sha256(bare.model_dump_json().encode()).hexdigest()[:16]


def is_tunable(spec: AttentionSpec) -> bool:
    """Whether the spec leaves its plan to the search."""
    s = spec.schedule
    return (s.tile_m, s.tile_n, s.stages, s.order, s.pingpong) == (None,) * 5


def path_of(root: Path, target: str) -> Path:
    """The file of a target."""
    return root / "tuned" / f"{target}.json"


def records(root: Path, target: str) -> tuple[Tuned, ...]:
    """All records of a target. A file of another schema, or one that is damaged, counts as none and is named in the
    log: tuning is an optimisation, its loss no fault of a call.
    """
    path = path_of(root, target)
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


def find(root: Path, target: str, chip: str, spec: AttentionSpec) -> Tuned | None:
    """The record for this chip and spec."""
    if not is_tunable(spec) or not path_of(root, target).exists():
        return None
    name = spec_class(spec)
    return next((r for r in records(root, target) if (r.chip, r.spec_class) == (chip, name)), None)


def keep(root: Path, target: str, record: Tuned) -> Path:
    """Add a record in place of an older one of its chip and class; returns the file.

    Raises: AttnError E0520 where the folder cannot be written.
    """
    path = path_of(root, target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock"), timeout=30):
            mine = (record.chip, record.spec_class)
            others = [r for r in records(root, target) if (r.chip, r.spec_class) != mine]
            kept = [json.loads(r.model_dump_json()) for r in (*others, record)]
            write_atomic(path, (json.dumps({"schema": SCHEMA, "records": kept}, indent=1) + "\n").encode())
    except OSError as why:
        raise error(
            "E0520",
            f"tuned choices cannot be kept in {path.parent}: {why.strerror or why}",
            helps=("name a folder that can be written: ATTNGEN_CACHE_DIR",),
        ) from why
    return path


def forget(root: Path, target: str, spec: AttentionSpec | None = None) -> int:
    """Remove the records of a spec's class, or all; returns how many there were."""
    path = path_of(root, target)
    if not path.exists():
        return 0
    with FileLock(path.with_suffix(".lock"), timeout=30):
        found = records(root, target)
        left = [r for r in found if spec is not None and r.spec_class != spec_class(spec)]
        kept = [json.loads(r.model_dump_json()) for r in left]
        write_atomic(path, (json.dumps({"schema": SCHEMA, "records": kept}, indent=1) + "\n").encode())
    return len(found) - len(left)
