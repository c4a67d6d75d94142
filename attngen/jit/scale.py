"""The softmax scale of a call: given, or the spec's expression over its params."""

from __future__ import annotations

import math
from typing import Any

import torch

from attngen.diag.diagnostic import error
from attngen.ir.expr import Atom, params_of
from attngen.ir.spec import AttentionSpec
from attngen.passes.score_form import scales_last

_REMEMBERED = 256


class Scale:
    """`default` is the spec's scale, or NaN if it reads params; `of(tail)` is the scale for bound arguments."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._names = tuple(p.name for p in spec.params)
        self._known: dict[tuple[Any, ...], float] = {}
        self.default = math.nan if params_of(spec.scale) else evaluate_scale(spec, {})

    def of(self, tail: tuple[Any, ...]) -> float:
        """The scale for these params, remembered: evaluating the expression takes longer than a launch."""
        if self.default == self.default:
            return self.default
        values = tail[: len(self._names)]
        found = self._known.get(values)
        if found is None:
            found = evaluate_scale(self._spec, dict(zip(self._names, values, strict=True)))
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[values] = found
        return found


def evaluate_scale(spec: AttentionSpec, params: dict[str, Any]) -> float:
    """The spec's scale in natural units, evaluated in float64. Raises: AttnError E0603 if it is not finite."""
    from attngen.ref.evaluate import evaluate

    env = {n: torch.tensor(v, dtype=torch.float64 if isinstance(v, float) else None) for n, v in params.items()}
    value = float(evaluate(spec.scale, env, {}))
    if not math.isfinite(value):
        given = ", ".join(f"{n} = {v}" for n, v in params.items())
        raise error(
            "E0603",
            f"the scale of `{spec.name}` is {value}" + (f" for {given}" if given else ""),
            helps=("make the spec's `scale` finite for the params that are passed, or pass scale=",),
        )
    return _with_allowed_sign(value, spec)


def _with_allowed_sign(value: float, spec: AttentionSpec) -> float:
    if value > 0.0 or not scales_last(spec):
        return value
    why = "without a score expression" if isinstance(spec.score, Atom) else "where the score is s and a line"
    raise error(
        "E0603",
        f"the scale of `{spec.name}` is {value}; {why} it must be positive",
        notes=("the kernel takes row maxima before it scales",),
        helps=("write the factor into the score: `score = -s`, say",),
    )


def number(scale: Any, spec: AttentionSpec) -> float:
    """`scale=` of a call as a float: a finite number, or a tensor without axes on the CPU.

    It is positive where the spec has no score expression. Raises: AttnError E0603.
    """
    if isinstance(scale, torch.Tensor) and (scale.ndim or scale.device.type != "cpu"):
        raise error(
            "E0603",
            f"`scale` must be one number, found a tensor {tuple(scale.shape)} on {scale.device}",
            notes=("it is read on the host before the launch",),
            helps=("pass a float",),
        )
    try:
        value = float(scale)
    except (TypeError, ValueError):
        raise error(
            "E0603", f"`scale` must be a number, found {type(scale).__name__}", helps=("pass a float",)
        ) from None
    if not math.isfinite(value):
        raise error("E0603", f"`scale` is {value}", helps=("pass a finite number",))
    return _with_allowed_sign(value, spec)
