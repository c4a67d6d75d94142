"""The store of tuned choices: what `attngen tune` measured on the chips of this machine.

    <root>/tuned/<target>.json      {"schema": 1, "records": [Tuned, ...]}

A record belongs to a chip (its name as the driver says it) and a class of specs: those that mean the same but for
names, documentation, defaults of params and the `schedule` clause. A spec that asks for a tile, stages, order or
ping-pong of its own is not tuned: what it says is what it gets.

Beside the store, records ship with the package for chips that they were measured on: `targets/<target>_tuned.json`, in
the same form, with classes of plain attention named in words (`plain_class`). The machine's own record comes first.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from filelock import FileLock
from pydantic import ValidationError

from attngen.diag.diagnostic import error
from attngen.ir.expr import Apply, atom, const
from attngen.ir.spec import AttentionSpec, BackwardHints, ScheduleHints
from attngen.ir.tuned import Tuned
from attngen.ir.types import DType, Layout, Type
from attngen.source import write_atomic

log = logging.getLogger("attngen.tuned")
SCHEMA = 1
_CAUSAL = Apply(type=Type.BOOL, fn="le", args=(atom("kv_idx"), atom("q_pos")))
_PLAIN_MASKS = {"full": const(True), "causal": _CAUSAL}


def spec_class(spec: AttentionSpec) -> str:
    """A name for everything of `spec` that a plan depends on."""
    params = tuple(p.replace(default=None) for p in spec.params)
    bare = spec.replace(name="", doc=None, params=params, schedule=ScheduleHints(), targets=())
    return hashlib.sha256(bare.model_dump_json().encode()).hexdigest()[:16]


def plain_class(spec: AttentionSpec) -> str | None:
    """`full 128` or `causal 192 128` for attention that is that and nothing else, of any dtype and scale; else None."""
    if spec.layout.is_ragged:
        return None
    same = {"name": "", "doc": None, "dtype": DType.BF16, "layout": Layout.BSHD, "targets": (), "scale": const(1.0)}
    bare = spec.replace(**same, schedule=ScheduleHints(), backward=BackwardHints())
    for name, mask in _PLAIN_MASKS.items():
        dims = {"head_dim_qk": spec.head_dim_qk, "head_dim_v": spec.head_dim_v}
        if bare == AttentionSpec(name="", **dims, scale=const(1.0), score=atom("s"), mask=mask, epilogue=atom("o")):
            return " ".join([name, *dict.fromkeys(map(str, dims.values()))])
    return None


def is_tunable(spec: AttentionSpec) -> bool:
    """Whether the spec leaves its plan to the search."""
    s = spec.schedule
    return (s.tile_m, s.tile_n, s.stages, s.order, s.pingpong, s.pack_gqa, s.cluster) == (None,) * 7


def path_of(root: Path, target: str) -> Path:
    """The file of a target."""
    return root / "tuned" / f"{target}.json"


def records(root: Path, target: str) -> tuple[Tuned, ...]:
    """All records of a target in the store."""
    return _read(path_of(root, target))


def shipped(target: str) -> tuple[Tuned, ...]:
    """The records that come with the package."""
    name = target.removesuffix("a").replace("_", "")
    return _read(Path(__file__).resolve().parent / "targets" / f"{name}_tuned.json")


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


def find(root: Path, target: str, chip: str, spec: AttentionSpec) -> Tuned | None:
    """The record for this chip and spec: the store's, else the one that ships."""
    if not is_tunable(spec):
        return None
    name, plain = spec_class(spec), plain_class(spec)
    own = next((r for r in records(root, target) if (r.chip, r.spec_class) == (chip, name)), None)
    if own is not None or plain is None:
        return own
    return next((r for r in shipped(target) if (r.chip, r.spec_class) == (chip, plain)), None)


def keep(root: Path, target: str, record: Tuned) -> Path:
    """Add a record in place of an older one of its chip and class; returns the file.

    Raises: AttnError E0520 where the folder cannot be written.
    """
    return _add(path_of(root, target), record)


def export(path: Path, spec: AttentionSpec, record: Tuned) -> Path:
    """Add a record of plain attention to a file of the shipped form: its class in words, rates of its own plans only.

    Raises: AttnError E0503 where the spec is not plain attention, E0520 where the file cannot be written.
    """
    plain = plain_class(spec)
    if plain is None:
        raise error("E0503", f"`{spec.name}` is more than full or causal attention, whose records ship")
    rates = tuple(r for r in record.rates if r.choice in record.plans)
    return _add(path, record.replace(spec_class=plain, rates=rates))


def _add(path: Path, record: Tuned) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock"), timeout=30):
            mine = (record.chip, record.spec_class)
            others = [r for r in _read(path) if (r.chip, r.spec_class) != mine]
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
