"""Every example and gallery kernel as sm_90a machine code, without a GPU: no spill, no serialised WGMMA, registers and
shared memory as the plan says, tensor cores and TMA in use."""

from __future__ import annotations

from pathlib import Path

import pytest
from ptxcheck.compile import compile_module, load_text

from attngen import api, specs
from attngen.cli.regen import GALLERY
from attngen.ir.spec import AttentionSpec
from attngen.options import Options
from attngen.search import plan
from attngen.syntax import load_all
from attngen.targets import sm90
from attngen.verify import machine

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [(f, s.name) for f in sorted((ROOT / "examples").glob("*.attn")) for s in load_all(f)]
#: Bytes that a kernel with wide heads may store and load beside writing O before the epilogue, twice.
SAVED_O_BUDGET = 64
#: Kernels of the gallery that are no example as it stands.
REST_OF_GALLERY = [
    e for e in GALLERY if e.direction == "forward" and (e.overrides or e.example not in {f.stem for f, _ in EXAMPLES})
]

pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(machine.tool("ptxas") is None, reason="needs the development tools: pip install 'attngen[dev]'"),
]


def check(spec: AttentionSpec) -> None:
    plans = plan(spec, "sm_90a")
    source = api.compile(spec, target="sm_90a", only="forward")
    module = load_text(source.text, spec.name)
    for index, p in enumerate(plans.plans):
        code = compile_module(module, index).machine_code
        where = f"{spec.name}, plan {p.name}"
        budget = SAVED_O_BUDGET if "o_pre" in source.meta.get("further", ()) else 0
        assert code.spill_bytes <= budget and code.stack_bytes <= budget, (
            f"{where}: spills {code.spill_bytes} B, stack {code.stack_bytes} B"
        )
        assert code.serialized == (), f"{where}: {code.serialized}"
        assert code.registers <= p.launch.launch_registers, f"{where}: {code.registers} registers at launch"
        assert code.opcodes["USETMAXREG"] >= 2, f"{where}: no register reallocation"
        stores = code.opcodes.get("UTMASTG", 0) >= 1 or spec.out_dtype is not None  # another dtype goes by registers
        assert code.opcodes["UTMALDG"] >= 3 and stores, f"{where}: TMA is not in use"
        # one product of each kind at the least: head_dim / 16 and tile_n / 16 steps
        steps = p.compute.head_dim_qk_padded // 16 + p.compute.tile_n // 16
        assert code.opcodes["HGMMA"] >= steps, f"{where}: {code.opcodes['HGMMA']} WGMMA of {steps}"
        meta = source.meta["plans"][index]
        assert meta["smem_bytes"] == p.memory.smem_bytes <= sm90.SMEM_BYTES
        assert code.static_smem_bytes + p.memory.smem_bytes <= sm90.SMEM_BYTES + 1024


@pytest.mark.parametrize(("file", "name"), EXAMPLES, ids=[n for _, n in EXAMPLES])
def test_example(file: Path, name: str) -> None:
    check(specs.resolve(file, name, Options()))


def test_clusters() -> None:
    check(specs.resolve(ROOT / "examples" / "causal.attn", "causal", Options.parse({"cluster": "2x1"})))


@pytest.mark.parametrize("entry", REST_OF_GALLERY, ids=lambda e: e.example)
def test_rest_of_gallery(entry) -> None:
    spec = specs.resolve(ROOT / "examples" / f"{entry.example}.attn", entry.name, Options.parse(entry.overrides))
    check(spec)
