"""`attngen import`: functions written for FlexAttention to a spec."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from attngen.cli import arguments, common, files
from attngen.diag.diagnostic import AttnError


def import_(
    functions: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE:FUNCTION...",
            help="A score_mod (5 arguments), a mask_mod (4) or a BlockMask; one, or one of each.",
            show_default=False,
        ),
    ],
    head_dim: Annotated[str, typer.Option("--head-dim", help="Head dim, e.g. 64, or 192x128 for q/k and v.")],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where the spec goes; - is stdout.")
    ] = "-",
    param: Annotated[
        list[str] | None, typer.Option("--param", help="A captured number that stays a run-time value; repeatable.")
    ] = None,
    promised: Annotated[
        list[str] | None, typer.Option("--sorted", help="A captured tensor that never decreases; repeatable.")
    ] = None,
    scale: Annotated[float | None, typer.Option("--scale", help="Softmax scale (default: 1 / sqrt(head dim)).")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the attention block.")] = None,
    dtype: arguments.DTypeOption = None,
    layout: arguments.LayoutOption = None,
) -> None:
    """Write the spec that functions of FlexAttention mean. FILE is a .py file, which is run, or a module's name.

    Captured tensors become declared tensors, which a call of the spec takes; they are listed on stderr.
    """
    from attngen.importers import from_flex

    found: dict[str, Any] = {}
    for argument in functions:
        value = _load(argument)
        kind = _kind(value, argument)
        if kind in found or (kind != "score_mod" and {"mask_mod", "block_mask"} & {*found}):
            raise common.Usage(
                f"{common.printable(argument)} is one more {kind}; join masks with and_masks in the file"
            )
        found[kind] = value
    changes = arguments.overrides(dtype=dtype, head_dim=head_dim, layout=layout)
    imported = from_flex(
        **found,
        params=param or (),
        sorted=promised or (),
        scale=scale,
        name=name,
        **changes,  # type: ignore[arg-type]
    )
    files.write_text(output, imported.text)
    for tensor in imported.spec.tensors:
        common.say(f"note: a call takes {tensor.name}: {tensor.dtype}[{', '.join(map(str, tensor.dims))}]")
    for note in imported.notes:
        common.say(f"note: {note}")


def _load(argument: str) -> Any:
    """What FILE:FUNCTION names."""
    place, colon, name = argument.rpartition(":")
    if not colon or not place or not name:
        raise common.Usage(f"{common.printable(argument)} is no FILE:FUNCTION, such as masks.py:causal")
    value: Any = _module(place)
    for word in name.split("."):
        if not hasattr(value, word):
            raise common.Usage(f"{common.printable(place)} has no `{common.printable(name)}`")
        value = getattr(value, word)
    return value


def _module(place: str) -> Any:
    path = Path(place)
    if path.suffix == ".py" and not path.is_file():
        raise common.Usage(f"no such file: {common.printable(place)}")
    try:
        if path.suffix != ".py":
            sys.path.insert(0, "")
            return importlib.import_module(place)
        name = f"attngen_import_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path.resolve())
        assert spec is not None and spec.loader is not None
        if name in sys.modules:  # both functions from one run of the file
            return sys.modules[name]
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except AttnError:
        raise
    except Exception as fault:
        why = f"{type(fault).__name__}: {str(fault)[:200]}"
        raise common.Usage(f"{common.printable(place)} cannot be imported: {common.printable(why)}") from None


def _kind(value: object, argument: str) -> str:
    """The keyword of from_flex that takes `value`."""
    if type(value).__name__ == "BlockMask":
        return "block_mask"
    try:
        parameters = inspect.signature(value).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise common.Usage(f"{common.printable(argument)} is no function") from None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    count = sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)
    if count not in (4, 5):
        raise common.Usage(
            f"{common.printable(argument)} takes {count} arguments; a score_mod takes (score, b, h, q_idx, kv_idx), a "
            "mask_mod (b, h, q_idx, kv_idx)"
        )
    return "score_mod" if count == 5 else "mask_mod"
