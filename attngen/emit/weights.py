"""Spell the weight of a pair under each normaliser, and what a backward keeps of it."""

from __future__ import annotations

from typing import Any

from attngen.emit.view import Weight
from attngen.ir.types import Normalizer

#: What turns a dP into dz, beside the softmax's P and D.
_SLOPES = {Normalizer.SIGMOID: ("fma(-pair[e], pair[e], pair[e])", "P (1 - P)"),
           Normalizer.RELU: ("select(pair[e] > 0.0, 1.0, 0.0)", "[P > 0]")}  # fmt: skip


def weight(normalizer: Normalizer, score: str, has_score: bool) -> Weight:
    """The weight of a pair whose score (before the scale, unless `has_score`) is the text `score`."""
    if normalizer is Normalizer.SIGMOID:  # tanh.approx would be off by 2**-12, which is a small weight's own size
        to_log2 = "LOG2E" if has_score else "w.scale_log2"
        return Weight("sigmoid(score)", f"cute.arch.rcp_approx(1.0 + exp2({score} * -{to_log2}))")
    if normalizer is Normalizer.RELU:
        scaled = score if has_score else f"{score} * w.p.softmax_scale"
        return Weight("max(score, 0)", f"cute.arch.fmax({scaled}, 0.0)")
    return Weight("2**(score - LSE)", "")


def backward_fields(normalizer: Normalizer, has_score: bool, has_slope: bool, has_captured: bool) -> dict[str, Any]:
    """The fields of `BackwardView` about P and its slope."""
    softmax = normalizer is Normalizer.SOFTMAX
    text, kept = ("", "P") if softmax else _SLOPES[normalizer]
    dp = "(dP - D)" if softmax else "dP"
    title = weight(normalizer, "score", has_score).title
    slope = " times the score's slope" if softmax else " times the slope"
    whole = kept + slope if has_slope else kept
    return {
        "weight_slope": text,
        "kept": whole,
        "packs_kept": has_slope or not (softmax or has_captured),
        "scales_to_log2": not has_score and normalizer is not Normalizer.RELU,
        "probabilities_note": f"S -> P = {title} in place, and as 16-bit pairs for dV."
        if softmax
        else f"S -> P = {title}, as 16-bit pairs for dV; S becomes {whole}.",
        "dp_note": dp,
        "dz_note": f"{kept} {dp}",
        "past_end_note": "Rows past the end have LSE = inf, so P = 0."
        if softmax
        else "Rows past the end have dO = 0: they add nothing.",
    }
