"""The ladder of examples: all 34 variants stand in it, its index is complete, and what no kernel serves is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attngen import samples
from attngen.cli.numeric import verify_spec
from attngen.directions import plan_gradients
from attngen.ir.spec import AttentionSpec
from attngen.passes.serves import served_parts, why_not
from attngen.syntax import check_text, format_text, load_all, load_spec, print_spec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SERVED = {s.name: s for f in sorted(EXAMPLES.glob("*.attn")) for s in load_all(f)}
CALL_FILES = sorted((EXAMPLES / "calls").glob("*.attn"))
FILES = sorted((EXAMPLES / "unserved").glob("*.attn"))
CALLS = {s.name: s for f in CALL_FILES for s in load_all(f)}
UNSERVED = {s.name: s for f in FILES for s in load_all(f)}
#: Variants of real models, by the blocks that say them.
VARIANTS = {
    "causal, grouped heads": "llama3",
    "sliding window": "mistral",
    "Gemma 2": "gemma2_local gemma2_global",
    "Gemma 3": "gemma3_local gemma3_global",
    "GPT-OSS": "gpt_oss_local gpt_oss_global",
    "Llama 4 local": "llama4_local",
    "Qwen3-Next": "qwen3_next",
    "Phi-2": "phi2",
    "GLM-4": "glm4",
    "ViT, CLIP, SigLIP": "vit vit_g vit_h siglip",
    "Whisper": "whisper_cross whisper_decoder",
    "ModernBERT": "modernbert_local modernbert_unpadded modernbert_unpadded_global",
    "DeepSeek-V3 prefill": "mla_prefill",
    "MLA decode": "mla_decode",
    "Longformer": "longformer",
    "BigBird": "bigbird bigbird_lists",
    "NATTEN, DiNAT": "natten dinat",
    "ALiBi": "alibi mpt",
    "T5": "t5_encoder t5_decoder",
    "Swin": "swin swin_shifted",
    "Evoformer": "evoformer_row",
    "Forgetting Transformer": "forgetting",
    "sigmoid attention": "sigmoid_attention",
    "softmax off by one": "off_by_one",
    "DiffLlama": "diffllama",
    "packed documents": "packing packing_ids",
    "prefix LM": "prefix_lm",
    "left padding": "left_padding",
    "block-causal": "block_causal",
    "BD3-LM": "bd3lm",
    "tree verification": "tree_verify",
    "cascade decode": "cascade",
    "ring step": "ring_step",
    "lengths of each sequence": "decode decode_local padded_decode",
}
#: Of no row of that table.
FURTHER = {"selected_blocks", "selected_tokens"}
#: What no kernel serves, and for which reasons. Closing a gap fails here: move the file up, and its line in the index.
REFUSED = {
    "mla_decode": {"head_dim = 576", "v = 512", "layout paged"},
}
#: Blocks with a forward kernel whose backward is refused.
NO_BACKWARD: dict[str, set[str]] = {}


def reasons(messages: list[str]) -> set[str]:
    return {m.removesuffix(" yet").partition(" serve ")[2] for m in messages}


def test_all_34_variants() -> None:
    assert len(VARIANTS) == 34
    named = {n for names in VARIANTS.values() for n in names.split()}
    assert named <= SERVED.keys() | CALLS.keys() | UNSERVED.keys()
    assert named >= (CALLS.keys() | UNSERVED.keys()) - FURTHER


def test_the_index_is_complete() -> None:
    """Every block once, behind a link to its file, in the part of the table where it belongs."""
    text = (EXAMPLES / "README.md").read_text()
    served, calls, unserved = re.split("^## .*$", text, flags=re.M)
    folders = ((served, "", EXAMPLES.glob("*.attn")), (calls, "calls/", CALL_FILES), (unserved, "unserved/", FILES))
    for part, folder, files in folders:
        rows = re.findall(r"^\| \[(\w+)\]\(([\w/.]+)\) \| (.*?) \| .* \|$", part, re.M)
        assert all(path == f"{folder}{stem}.attn" for stem, path, _ in rows)
        listed = [(stem, re.findall(r"`(\w+)`", blocks)) for stem, _, blocks in rows]
        assert sorted(listed) == sorted((f.stem, [s.name for s in load_all(f)]) for f in files)


def test_what_is_refused_and_why() -> None:
    found = {n: reasons([d.message for d in why_not(s, "sm_90a")]) for n, s in UNSERVED.items()}
    assert found == REFUSED
    assert all(d.helps and d.notes for s in UNSERVED.values() for d in why_not(s, "sm_90a"))


def test_backwards_that_are_refused_and_why() -> None:
    kernels = {n: served_parts(s, "sm_90a") for n, s in (SERVED | CALLS).items()}
    found = {n: [d for p in own for d in plan_gradients(p.spec, "sm_90a").refused] for n, own in kernels.items()}
    assert {n: reasons([d.message for d in r]) for n, r in found.items() if r} == NO_BACKWARD


@pytest.mark.parametrize("file", [*CALL_FILES, *FILES], ids=lambda f: f.stem)
def test_unserved_files_read_well(file: Path) -> None:
    text = file.read_text()
    assert check_text(file) == [] and format_text(text) == text
    header = text.split("attn 1")[0].strip().splitlines()
    assert 2 <= len(header) <= 4 and header[-1].startswith("# Source: ")
    assert len(text.splitlines()) <= 30


@pytest.mark.parametrize("spec", [*CALLS.values(), *UNSERVED.values()], ids=[*CALLS, *UNSERVED])
def test_blocks_have_a_meaning(spec: AttentionSpec) -> None:
    """They print and parse back; at odd sizes the CPU reference, and the plans of those that kernels serve, agree with
    the dense meaning."""
    assert load_spec(print_spec(spec)) == spec
    small = spec.replace(head_dim_qk=min(spec.head_dim_qk, 40), head_dim_v=min(spec.head_dim_v, 24))
    for rows, keys in ((33, 33), (1, 70), (20, 61)):
        shape = samples.Shape(2, 4, 2, rows, keys)
        values = samples.params(spec, {p.name: 7 for p in spec.params if p.type == "int"})
        outcomes = verify_spec(small, shape, values, target="sm_90a", seed=rows, with_gpu=False)
        done = {o.what.split()[0] for o in outcomes if not o.skipped}
        assert done == ({"CPU"} if spec.name in UNSERVED else {"CPU", "plan"})
        assert not [o for o in outcomes if o.failed], outcomes
