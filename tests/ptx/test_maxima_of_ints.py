"""Forwards whose maxima are those of ints, on the checker: bit by bit what maxima of floats give, at any scores."""

from __future__ import annotations

import pytest
import torch
from ptxcheck.compile import load_text
from ptxcheck.launch import attngen_call

from attngen import samples
from attngen.emit.module import emit
from attngen.ir.plan import Maxima
from attngen.ir.spec import AttentionSpec
from attngen.jit.scale import Scale
from attngen.passes.mask_form import mask_form
from attngen.ref.compare import assert_close
from attngen.samples import Shape
from attngen.search import choice_of, plan, plan_choice
from attngen.syntax import make_spec

pytestmark = [pytest.mark.dsl, pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")]  # inf times 0
SPECS = [
    make_spec("causal", head_dim=64, mask="kv_idx <= q_pos", tile="128x64"),
    make_spec("halves", head_dim=64, dtype="fp16", tile="128x64"),
    make_spec("line", head_dim=64, score="s - 0.5 * (q_pos - kv_idx)", mask="kv_idx <= q_pos", tile="128x64"),
    make_spec("far", head_dim=64, score="s * 2.0 - 0.25 * q_pos", tile="128x64"),
]


def text_of(spec: AttentionSpec, maxima: Maxima) -> str:
    """The kernel of the spec's first plan with maxima of that kind."""
    planned = plan(spec)
    made = plan_choice(spec, mask_form(spec), choice_of(planned.plans[0]).replace(maxima=maxima))
    return emit(planned.replace(plans=(made,), limits=(), small=None)).text


def operands(spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """150 rows in five kinds, whose scores along the walk are usual, rise, fall, lie far below 0, far above it; and by
    themselves one with NaN, one with inf and one with only zeros.
    """
    q, k, v = samples.qkv(spec, Shape(1, 1, 1, 150, 400), seed=7)
    k[..., 0] = torch.arange(400, 0, -1)[None, :, None] * 0.15
    k[..., 1] = 8.0
    for kind, (rise, level) in enumerate(((0.0, 0.0), (8.0, 0.0), (-8.0, 0.0), (0.5, -40.0), (0.5, 40.0))):
        q[:, kind::5, :, 0], q[:, kind::5, :, 1] = rise, level
    return q, k, v


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_maxima_of_ints(spec: AttentionSpec) -> None:
    texts = {kind: text_of(spec, kind) for kind in Maxima}
    assert ["def int_max" in texts[kind] for kind in (Maxima.FLOATS, Maxima.INTS)] == [False, True]
    q, k, v = operands(spec)
    strange = q.clone()
    strange[:, 17], strange[:, 60, :, 2], strange[:, 90] = torch.nan, torch.inf, 0.0
    for rows in (q, strange):
        found = []
        for text in texts.values():
            o, lse, report = attngen_call(load_text(text, spec.name), 0, rows, k, v, scale=Scale(spec).default)
            assert not report.faults
            found.append((o, lse))
        (o, lse), (o_ints, lse_ints) = found
        assert torch.equal(o.isnan(), o_ints.isnan()) and torch.equal(o.nan_to_num(), o_ints.nan_to_num())
        assert torch.equal(lse.isnan(), lse_ints.isnan()) and torch.equal(lse.nan_to_num(), lse_ints.nan_to_num())
        if rows is q:
            assert_close(o_ints, spec, q, k, v, lse=lse_ints)
