"""One attention block to its AttentionSpec: declared, inlined, typed and checked, all faults in one report."""

from __future__ import annotations

import math
from typing import Any

from attngen.diag.diagnostic import AttnError
from attngen.ir.expr import Expr, atom, const
from attngen.ir.spec import AttentionSpec, BackwardHints, Branch, ScheduleHints, Segment
from attngen.ir.types import DType, Layout, Normalizer
from attngen.syntax import ast, hints, limits
from attngen.syntax.blocks import with_blocks
from attngen.syntax.clauses import check_scale_value, evaluate
from attngen.syntax.collect import Faults
from attngen.syntax.declare import declare, tightened
from attngen.syntax.faults import quoted
from attngen.syntax.merge import merged
from attngen.syntax.reserved import reason
from attngen.syntax.scope import Scope
from attngen.syntax.typing import Typer
from attngen.syntax.values import Names


def resolve(block: ast.Attention, scope: Scope, faults: Faults) -> AttentionSpec | None:
    """The spec of `block`, or None where a fault was recorded. Raises AttnError E0108 past a bound."""
    whole = merged(block, scope, faults)
    return _Resolver(whole, scope, faults).run() if whole is not None else None


class _Resolver:
    def __init__(self, block: ast.Attention, scope: Scope, faults: Faults) -> None:
        self.block, self.scope, self.faults = block, scope, faults
        self.names: Names = declare(block, scope, faults)
        self.words: dict[str, ast.Words] = {}
        self.settings: dict[str, ast.Setting] = {}
        self.blocks: dict[str, ast.Block] = {}
        self.nested: list[ast.Nested] = []
        self.dims: ast.HeadDim | None = None
        self.view: ast.VView | None = None
        for clause in block.clauses:
            if isinstance(clause, ast.Words):
                self.words[clause.word.text] = clause
            elif isinstance(clause, ast.Setting):
                self.settings[clause.word.text] = clause
            elif isinstance(clause, ast.Block):
                self.blocks[clause.word.text] = clause
            elif isinstance(clause, ast.Nested):
                self.nested.append(clause)
            elif isinstance(clause, ast.HeadDim):
                self.dims = clause
            elif isinstance(clause, ast.VView):
                self.view = clause

    def run(self) -> AttentionSpec | None:
        faults = self.faults
        head_dims = self.head_dims()
        self.names.constants = dict(zip(("head_dim", "head_dim_v"), head_dims or (1, 1), strict=True))
        typer = self.typer = Typer(self.scope, self.names, faults)
        values = {w: self.value(w) for w in ("scale", "score", "mask", "sink", "epilogue")}
        if values["scale"] is not None and (values["score"] is not None or "score" not in self.settings):
            check_scale_value(values["scale"], values["score"], self.settings["scale"], faults)
        branches, segments = self.branches(values), self.segments()
        for name in self.names.lets:
            typer.let(name)
        fields = self.word_fields()
        params = []
        for name, param in self.names.params.items():
            bounds = typer.param_bounds.get(name)
            clause = next(c for c in self.block.clauses if isinstance(c, ast.Param) and c.name.text == name)
            params.append(tightened(param, bounds, clause, faults) if bounds else param)
        if faults.any_error or head_dims is None:
            return None
        scale = values["scale"]
        spec = AttentionSpec(
            name=self.block.name.text,
            doc="\n".join(self.block.doc) or None,
            head_dim_qk=head_dims[0],
            head_dim_v=head_dims[1],
            scale=scale if scale is not None else default_scale(head_dims[0]),
            params=tuple(params),
            tensors=tuple(self.names.tensors.values()),
            score=values["score"] or atom("s"),
            mask=values["mask"] or const(True),
            sink=values["sink"],
            epilogue=values["epilogue"] or atom("o"),
            v_view_start=int(self.view.start.value) if self.view else None,
            branches=branches,
            segments=segments,
            span=self.block.head,
            **fields,
        )
        return with_blocks(spec, faults)

    def value(self, word: str) -> Expr | None:
        setting = self.settings.get(word)
        return evaluate(setting, self.typer, self.faults) if setting is not None else None

    def head_dims(self) -> tuple[int, int] | None:
        if self.dims is None:
            self.faults.add(
                "E0209",
                f"attention `{self.block.name.text}` has no head_dim",
                self.block.head,
                "the clause is missing",
                notes=("head dims are compile-time: they choose the kernel",),
                helps=("add `head_dim = 128`",),
            )
            return None
        sides = [self.dims.qk, *([self.dims.v] if self.dims.v is not None else [])]
        for side in sides:
            if not 1 <= side.value <= limits.HEAD_DIM:
                self.faults.add(
                    "E0210",
                    f"head dim {side.value} is not in 1..{limits.HEAD_DIM}",
                    side.span,
                    "out of range",
                    helps=("give the columns of one head, such as 64 or 128",),
                )
                return None
        qk = int(self.dims.qk.value)
        v = int(self.dims.v.value) if self.dims.v is not None else qk
        return self.viewed(qk, v) if self.view is not None else (qk, v)

    def viewed(self, qk: int, v: int) -> tuple[int, int] | None:
        """V as columns of K: the slice must lie inside K and agree with V's head dim where that is given."""
        assert self.view is not None and self.dims is not None
        view, width = self.view, self.view.stop.value - self.view.start.value
        if view.of.text != "k":
            self.faults.add(
                "E0309",
                f"V cannot be a view of `{view.of.text}`",
                view.of.span,
                "only K has the rows that V needs",
                helps=(f"write `v = k[{view.start.value}:{view.stop.value}]`",),
            )
        elif width < 1 or view.stop.value > qk:
            self.faults.add(
                "E0309",
                f"columns {view.start.value}:{view.stop.value} are not inside K's {qk}",
                view.span,
                "an empty slice" if width < 1 else "ends past the last column",
                helps=(f"write start < stop <= {qk}: `v = k[0:{qk}]` is all of K",),
            )
        elif self.dims.v is not None and width != v:
            self.faults.add(
                "E0309",
                f"the view has {width} columns, `head_dim` says V has {v}",
                view.span,
                f"{width} columns",
                helps=(f"write `head_dim = {qk}, v = {width}`, or leave `v` out there",),
            )
        else:
            return qk, int(width)
        return None

    def branches(self, values: dict[str, Expr | None]) -> tuple[Branch, ...]:
        found = [n for n in self.nested if n.word.text == "branch"]
        if len(found) == 1:
            self.faults.add(
                "E0306",
                "a single branch is no difference or sum",
                found[0].name.span,
                "the only branch",
                helps=("add a second `branch`, or move its clauses into the block itself",),
            )
        other = next((n for n in self.nested if n.word.text == "segment"), None)
        if found and other is not None:
            self.faults.add(
                "E0306",
                "branches and segments cannot meet in one attention",
                other.name.span,
                "a segment",
                helps=("write two attention blocks",),
            )
        result = []
        for item in found:
            own = self.nested_values(item, ("score", "mask", "sink", "weight"))
            merged_values = {**{w: values[w] for w in ("score", "mask", "sink")}, **own}
            result.append(
                Branch(
                    name=item.name.text,
                    score=merged_values["score"] or atom("s"),
                    mask=merged_values["mask"] or const(True),
                    sink=merged_values["sink"],
                    weight=own.get("weight") or const(1.0),
                    span=item.span,
                )
            )
        return tuple(result)

    def segments(self) -> tuple[Segment, ...]:
        result = []
        for item in self.nested:
            if item.word.text != "segment":
                continue
            own = self.nested_values(item, ("score", "mask"))
            result.append(
                Segment(
                    name=item.name.text,
                    score=own.get("score") or atom("s"),
                    mask=own.get("mask") or const(True),
                    span=item.span,
                )
            )
        return tuple(result)

    def nested_values(self, item: ast.Nested, allowed: tuple[str, ...]) -> dict[str, Expr | None]:
        why = reason(item.name.text)
        if why and item.name.text not in ("k", "v", "q"):
            self.faults.add(
                "E0204",
                f"`{item.name.text}` is {why}",
                item.name.span,
                f"cannot name a {item.word.text}",
                helps=(f"choose another name, such as `{item.word.text}_{item.name.text.strip('_')}`",),
            )
        values: dict[str, Expr | None] = {}
        for setting in item.settings:
            if setting.word.text not in allowed:
                self.faults.add(
                    "E0207",
                    f"a {item.word.text} has no `{setting.word.text}`",
                    setting.word.span,
                    "unknown here",
                    helps=(f"a {item.word.text} takes {quoted(allowed)}",),
                )
            else:
                values[setting.word.text] = evaluate(setting, self.typer, self.faults)
        return values

    def word_fields(self) -> dict[str, Any]:
        faults, words, blocks = self.faults, self.words, self.blocks
        normalizer = (
            hints.normalizer(words["normalizer"], faults) if "normalizer" in words else None
        ) or Normalizer.SOFTMAX
        sinks = [self.settings.get("sink"), *(s for n in self.nested for s in n.settings if s.word.text == "sink")]
        for sink in sinks:
            if sink is not None and normalizer is not Normalizer.SOFTMAX:
                faults.add(
                    "E0307",
                    f"a sink has no meaning under the {normalizer} normalizer",
                    sink.word.span,
                    "joins a softmax only",
                    notes=("a sink is one more logit in the sum that softmax divides by",),
                    helps=("remove `sink`, or remove `normalizer`",),
                )
        output = hints.entries(blocks["output"], faults) if "output" in blocks else {}
        return {
            "dtype": (hints.dtype(words["dtype"], faults) if "dtype" in words else None) or DType.BF16,
            "layout": (hints.layout(words["layout"], faults) if "layout" in words else None) or Layout.BSHD,
            "normalizer": normalizer,
            "targets": hints.targets(words["target"], faults) if "target" in words else (),
            "out_dtype": DType(output["dtype"]) if "dtype" in output else None,
            "max_logit": bool(output.get("max_logit", False)),
            "block_sparse": hints.block_sparse(blocks["block_sparse"], faults) if "block_sparse" in blocks else None,
            "schedule": hints.schedule(blocks["schedule"], faults) if "schedule" in blocks else ScheduleHints(),
            "backward": hints.backward(blocks["backward"], faults) if "backward" in blocks else BackwardHints(),
        }


def default_scale(head_dim_qk: int) -> Expr:
    """1/sqrt(head_dim), what `scale` is when it is not given."""
    return const(1.0 / math.sqrt(head_dim_qk))


__all__ = ["AttnError", "default_scale", "resolve"]
