"""Every example: formatted, planned, and equal to its dense meaning in every execution, at sizes no tile divides."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngen import samples
from attngen.cli.numeric import cases, self_attention, verify_spec
from attngen.ir.spec import AttentionSpec
from attngen.search import plan
from attngen.syntax import check_text, format_text, load_all, load_spec, print_spec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*.attn"))
SPECS = [(f, s.name) for f in FILES for s in load_all(f)]
#: Values small enough that a mask bites at the test's lengths.
SMALL = {
    "mistral": {"window": 37},
    "gemma2_local": {"keys": 50, "cap": 2.0},
    "gpt_oss_local": {"window": 29},
    "block_causal": {"block": 24},
    "llama4_local": {"chunk": 48},
    "modernbert_local": {"half": 21},
    "longformer": {"half": 16},
    "ring_step": {"q_offset": 80, "kv_offset": 57},
    "gemma3_local": {"keys": 33},
    "streaming": {"keys": 19, "sinks": 3},
    "bd3lm": {"half": 65, "size": 8},
    "dinat": {"height": 11, "width": 12, "dilation": 2},
    "swin_shifted": {"across": 2, "down": 1},
    "evoformer_row": {"rows": 2},
    "decode_local": {"keys": 9},
}


@pytest.fixture(params=SPECS, ids=[name for _, name in SPECS])
def spec(request: pytest.FixtureRequest) -> AttentionSpec:
    file, name = request.param
    return load_spec(file, name=name)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_reads_well(file: Path) -> None:
    text = file.read_text()
    assert check_text(file) == []
    assert format_text(text) == text
    header = text.split("attn 1")[0].strip().splitlines()
    assert 2 <= len(header) <= 4 and all(line.startswith("# ") for line in header)
    assert header[-1].startswith("# Source: "), "an example names its paper or model"
    assert len(text.splitlines()) <= 30


def test_prints_and_parses_back(spec: AttentionSpec) -> None:
    assert load_spec(print_spec(spec)) == spec


def test_plans_for_hopper(spec: AttentionSpec) -> None:
    found = plan(spec, "sm_90a")
    assert 1 <= len(found.plans) <= 3 and found.limits == tuple(sorted(found.limits))


def test_all_executions_agree(spec: AttentionSpec) -> None:
    """Blockwise reference and every plan against the dense meaning; tails, one row, more keys than rows."""
    params = samples.params(spec, SMALL.get(spec.name, {}))
    lengths = [(131, 131), (1, 70), (60, 203)] + ([] if self_attention(spec) else [(150, 40)])
    outcomes = []
    for rows, keys in lengths:
        shape = samples.Shape(2, 2, 1, rows, keys)
        outcomes += verify_spec(spec, shape, params, target="sm_90a", seed=rows, with_gpu=False)
    assert not [o for o in outcomes if o.skipped]
    assert not [o for o in outcomes if o.failed], outcomes
    assert len(outcomes) >= 2 * len(lengths)


def test_a_wrong_plan_is_found() -> None:
    """The comparison can fail: a causal plan run for a full spec is caught."""
    causal, full = load_spec(EXAMPLES / "causal.attn"), load_spec(EXAMPLES / "full.attn")
    from attngen.ref import dense, interp

    q, k, v = samples.qkv(full, samples.Shape(1, 2, 1, 70, 70))
    o, _, _ = interp.run(plan(causal, "sm_90a"), causal, q, k, v)
    assert float((o - dense.attention(full, q, k, v).o).abs().max()) > 0.1


def test_params_bite() -> None:
    for file, name in SPECS:
        spec = load_spec(file, name=name)
        for p in spec.params:
            assert p.name in SMALL.get(name, {}) or p.type == "float", f"{name}.{p.name} has no small value here"


def test_cases_cover_odd_lengths() -> None:
    lengths = cases(load_spec(EXAMPLES / "causal.attn"))
    assert any(q > k for q, k in lengths) and any(q < k for q, k in lengths) and (1, 129) in lengths
