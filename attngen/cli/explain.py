"""`attngen explain`: what the compiler made of a spec and why, or what a diagnostic's code means."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attngen.cli import arguments, common, files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attngen.ir.plan import PlanSet
    from attngen.ir.spec import AttentionSpec
    from attngen.samples import Shape


def explain(
    subject: Annotated[
        str, typer.Argument(metavar="SPEC|CODE", help="A .attn file, -, or a code such as E0302.", show_default=False)
    ],
    name: arguments.Name = None,
    target: arguments.Target = None,
    dtype: arguments.DTypeOption = None,
    head_dim: arguments.HeadDim = None,
    layout: arguments.LayoutOption = None,
    tile: arguments.Tile = None,
    stages: arguments.Stages = None,
    order: arguments.Order = None,
    deterministic: arguments.Deterministic = None,
    seqlen: Annotated[
        str, typer.Option("--seqlen", help="Lengths for the rooflines, e.g. 1024,4096; the picture takes the first.")
    ] = "1024,8192",
    seqlen_kv: arguments.SeqlenKv = None,
    batch: arguments.Batch = None,
    heads: arguments.Heads = None,
    heads_kv: arguments.HeadsKv = None,
    param: arguments.Params = None,
    part: Annotated[
        str | None, typer.Option("--part", help="Of a spec that takes several kernels, this one alone.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every rejected candidate.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Plans, rooflines and rejections as JSON on stdout.")] = False,
    svg: Annotated[
        str | None, typer.Option("--svg", metavar="FILE", help="Draw the mask with its tile classes and loop.")
    ] = None,
    png: Annotated[
        str | None, typer.Option("--png", metavar="FILE", help="The same as PNG (needs matplotlib).")
    ] = None,
    at_batch: Annotated[int, typer.Option("--at-batch", min=0, help="Batch entry that is drawn.")] = 0,
    at_head: Annotated[int, typer.Option("--at-head", min=0, help="Query head that is drawn.")] = 0,
) -> None:
    """Explain a spec, forward and backward: formula, mask form, gradients, plans with budgets, rooflines, rejected
    candidates. Or explain a code.
    """
    if _is_code(subject):
        _explain_code(subject, as_json)
        return
    from attngen import samples
    from attngen.passes.parts import describe, formula, several
    from attngen.passes.selected import is_selected
    from attngen.passes.serves import served_parts

    for option, file, ending in (("--svg", svg, ".png"), ("--png", png, ".svg")):
        if file is not None and file.lower().endswith(ending):
            other = "--png" if option == "--svg" else "--svg"
            raise common.Usage(
                f"{option} {common.printable(file)} names a {ending} file; write {other} {common.printable(file)}"
            )
    changes = arguments.overrides(
        dtype=dtype,
        head_dim=head_dim,
        layout=layout,
        tile=tile,
        stages=stages,
        order=order,
        deterministic=deterministic,
    )
    spec = arguments.load(subject, name, changes)
    all_params = samples.params(spec, arguments.settings_of(param or [], "--param"))
    shapes = [_shape(spec, n, seqlen_kv, batch, heads, heads_kv) for n in arguments.lengths_of(seqlen)]
    timed = [] if is_selected(spec) else shapes  # how many keys are listed is the call's affair
    chosen = served_parts(spec, arguments.pick_target(spec, target), part)
    drawn = svg is not None or png is not None
    if drawn and len(chosen) > 1:
        raise several(spec)
    documents: dict[str, Any] = {}
    texts = [describe(spec)] if len(chosen) > 1 or is_selected(spec) else []
    for one in chosen:
        params = {p.name: all_params.get(p.name, 1) for p in one.spec.params}
        plans, documents[one.name], words = _kernel(
            one.spec, arguments.pick_target(spec, target), timed, params, everything
        )
        texts += words
        if drawn:
            _draw(plans, shapes[0], params, svg, png, at_batch, at_head)
    if as_json:
        whole = {"schema": 1, "name": spec.name, "formula": formula(spec), "parts": documents}
        print(json.dumps(documents[chosen[0].name] if len(chosen) == 1 else whole, indent=1))
    elif svg != "-":
        print("\n\n".join(t for t in texts if t))


def _kernel(
    spec: AttentionSpec, target: str, shapes: list[Shape], params: dict[str, Any], everything: bool
) -> tuple[PlanSet, dict[str, Any], list[str]]:
    """The plans of a kernel, and what is said of them and of their gradients: as a document, as texts."""
    from attngen import plan_text, plan_text_backward
    from attngen.cli.explain_json import document, document_backward
    from attngen.directions import plan_gradients
    from attngen.rooflines import roofline, roofline_backward
    from attngen.search import plan

    plans = plan(spec, target)
    gradients = plan_gradients(spec, plans.target)
    back = gradients.plans
    lines = [(label, roofline(plans, shape, params, x)) for label, shape, x in _calls(spec, shapes)]
    back_lines = (
        [(label, roofline_backward(back, shape, params, x)) for label, shape, x in _calls(spec, shapes)] if back else []
    )
    texts = [
        plan_text.describe(plans, everything=everything),
        plan_text.rooflines(lines),
        plan_text_backward.describe_backward(back, gradients.refused, everything=everything),
        plan_text_backward.rooflines_backward(back_lines),
    ]
    return plans, document(plans, lines) | {"backward": document_backward(gradients, back_lines)}, texts


def _is_code(text: str) -> bool:
    if re.fullmatch(r"[EWew]\d{4}", text):
        return True
    from attngen.diag.codes import find

    return not text.endswith(".attn") and text != "-" and not Path(text[:200]).exists() and find(text) is not None


def _explain_code(text: str, as_json: bool) -> None:
    from attngen.diag.codes import CODES, find

    row = find(text)
    if row is None:
        import difflib

        close = difflib.get_close_matches(text.upper(), list(CODES), n=3)
        raise common.Usage(
            f"no diagnostic has the code {text.upper()}" + (f"; near it: {', '.join(close)}" if close else "")
        )
    if as_json:
        print(json.dumps({"schema": 1, **{k: getattr(row, k) for k in ("code", "slug", "summary", "explanation")}}))
    else:
        print(f"{row.code} {row.slug}: {row.summary}\n\n{row.explanation.strip()}")


def _shape(
    spec: AttentionSpec, seqlen: int, seqlen_kv: int | None, batch: int | None, heads: int | None, heads_kv: int | None
) -> Shape:
    from attngen.samples import Shape

    count = heads or max(1, 2048 // min(spec.head_dim_qk, spec.head_dim_v))
    count_kv = heads_kv or count
    if count % count_kv:
        raise common.Usage(
            f"{count} query heads cannot share {count_kv} KV heads: the first must be a multiple of the second"
        )
    return Shape(batch or max(1, 32768 // seqlen), count, count_kv, seqlen, seqlen_kv or seqlen)


def _calls(spec: AttentionSpec, shapes: list[Shape]) -> Iterator[tuple[str, Shape, dict[str, Any]]]:
    """Label, shape and captured tensors of each call whose rooflines are asked for."""
    from attngen import samples

    for shape in shapes:
        label = (
            f"batch {shape.batch}, heads {shape.heads_q}/{shape.heads_kv}, seqlen {shape.seqlen_q}x{shape.seqlen_kv}"
        )
        yield label, shape, _small_tensors(samples, spec, shape)


def _small_tensors(samples: Any, spec: AttentionSpec, shape: Shape) -> dict[str, Any]:
    """Sample tensors with their declared shapes; those that no mask reads without storage."""
    if not spec.tensors:  # and no second is spent on importing torch
        return {}
    import torch

    from attngen.ir.expr import tensors_of

    read = tensors_of(spec.mask)
    made = samples.tensors(spec.replace(tensors=tuple(t for t in spec.tensors if t.name in read)), shape)
    kinds = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "f32": torch.float32,
        "i32": torch.int32,
        "bool": torch.bool,
    }
    for decl in spec.tensors:
        if decl.name not in read:
            made[decl.name] = torch.empty(
                samples.extents(spec, decl, shape), dtype=kinds[decl.dtype.value], device="meta"
            )
    return dict(made)


def _draw(
    plans: PlanSet, shape: Shape, params: dict[str, Any], svg: str | None, png: str | None, batch: int, head: int
) -> None:
    from dataclasses import replace

    from attngen import samples
    from attngen.draw import draw_mask

    if shape.seqlen_q * shape.seqlen_kv > 2**26:
        raise common.Usage("a picture of more than 64 M elements: give a shorter --seqlen")
    if head >= shape.heads_q:
        raise common.Usage(f"--at-head {head}: there are {shape.heads_q} query heads")
    drawn_shape = replace(shape, batch=max(batch + 1, min(shape.batch, 2)))
    spec = plans.spec
    plan = plans.plans[plans.index(shape.seqlen_q, shape.seqlen_kv)]
    tensors = samples.tensors(spec, drawn_shape)
    canvas = draw_mask(spec, plan, drawn_shape, params=params, tensors=tensors, batch=batch, head=head)
    if svg is not None:
        files.write_text(svg, canvas.svg())
    if png is not None:
        files.write_bytes(Path(png), canvas.png())
    for file in (svg, png):
        if file not in (None, "-"):
            common.say(f"{file}: mask of {spec.name}")
