"""Reading ptxas and nvdisasm: what a spill and a serialised WGMMA look like is pinned, so that CI cannot miss one."""

from __future__ import annotations

from pathlib import Path

import pytest
from ptxcheck.compile import compile_backward, compile_file, compile_module, load_text

from attngen import api
from attngen.diag.diagnostic import AttnError
from attngen.verify import machine

ROOT = Path(__file__).resolve().parents[2]
REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    48 bytes stack frame, 16 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 48 bytes cumulative stack size, 1024 bytes smem
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to …
"""
LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/             @!P0  HGMMA.64x80x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0020*/              @UP1 UTMALDG.4D [UR8], [UR4] ;
        /*0030*/                   HGMMA.64x80x16.F32.BF16 R24, gdesc[UR4], R24 ;
"""


def test_spills_and_serialisation_are_seen() -> None:
    code = machine.parse(REPORT, LISTING)
    assert (code.registers, code.spill_bytes, code.stack_bytes, code.static_smem_bytes) == (168, 48, 48, 1024)
    assert len(code.serialized) == 1 and "C7512" in code.serialized[0]
    assert code.opcodes == {"LDC": 1, "HGMMA": 2, "UTMALDG": 1} and code.instructions == 4
    assert not code.is_clean


def test_clean_code_is_clean() -> None:
    report = REPORT.replace("48 bytes", "0 bytes").replace("16 bytes", "0 bytes").replace("32 bytes", "0 bytes")
    code = machine.parse("\n".join(line for line in report.splitlines() if "C75" not in line), LISTING)
    assert code.is_clean


@pytest.mark.dsl
@pytest.mark.skipif(machine.tool("ptxas") is None, reason="needs the development tools")
def test_real_tools_on_a_hand_written_kernel() -> None:
    ptx = (
        ".version 8.0\n.target sm_90a\n.address_size 64\n"
        ".visible .entry k(.param .u64 p) { .reg .b64 %a; .reg .f32 %f; ld.param.u64 %a, [p]; "
        "ld.global.f32 %f, [%a]; ex2.approx.f32 %f, %f; st.global.f32 [%a], %f; ret; }\n"
    )
    code = machine.inspect_ptx(ptx)
    assert code.is_clean and code.registers > 0 and code.opcodes["MUFU"] == 1 and code.opcodes["EXIT"] >= 1


@pytest.mark.dsl
@pytest.mark.skipif(machine.tool("ptxas") is None, reason="needs the development tools")
def test_the_machine_code_of_a_plan(tmp_path: Path) -> None:
    """By a process of its own from a file of both directions, as `attngen run` has it, and by this one from a file of
    one, as the other tests have it; with places in the source, as the PTX checker may have it, and without: the same.
    """
    source = api.compile(ROOT / "examples" / "gpt_oss.attn", name="gpt_oss_local")
    source.write(tmp_path / "both.py")
    of, compiling = {"compile_plan": "", "compile_backward": ".bwd"}, (compile_module, compile_backward)
    for (entry, suffix), make in zip(of.items(), compiling, strict=True):
        text = (ROOT / "generated" / f"gpt_oss_local.sm90{suffix}.py").read_text()
        here = make(load_text(text, "gpt_oss_local")).machine_code
        assert machine.inspect_plan(tmp_path / "both.py", 0, entry=entry) == here and here.opcodes["HGMMA"] > 0
    placed = compile_file(ROOT / "generated" / "gpt_oss_local.sm90.py", 0, lines=True)[1]
    plain = compile_file(ROOT / "generated" / "gpt_oss_local.sm90.py", 0)[1]
    assert ".loc" in placed.ptx and placed.machine_code == plain.machine_code


@pytest.mark.skipif(machine.tool("ptxas") is None, reason="needs the development tools")
def test_ptx_that_ptxas_refuses() -> None:
    with pytest.raises(AttnError) as fault:
        machine.inspect_ptx("no ptx at all")
    assert fault.value.code == "E0542"


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "tool", lambda name: None)
    with pytest.raises(AttnError) as fault:
        machine.inspect_ptx("x")
    assert fault.value.code == "E0541" and "attngen[dev]" in str(fault.value)
