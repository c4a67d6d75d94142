"""`python -m ptxcheck report FILE`, from tests/: what one call of a generated forward does, tile plan by tile plan.

Counts of instructions, products and exponentials, bytes through TMA, bank conflicts, beside the cycles that the file's
plan predicts (its .plan.txt). Faults, if any, are printed first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ptxcheck.compile import compile_file, load_text
from ptxcheck.launch import attngen_call


def report(path: Path, seqlen: int, heads: int) -> str:
    """The report of every plan of a file that takes neither params nor captured tensors."""
    module = load_text(path.read_text(encoding="utf-8"), path.name.split(".")[0])
    meta, lines = module.ATTN_META, []
    if meta["direction"] != "forward" or meta["params"] or meta["tensors"]:
        raise SystemExit(f"{path.name}: only forwards without params and captured tensors are run by this command")
    generator = torch.Generator().manual_seed(0)
    kind = torch.bfloat16 if meta["dtype"] == "bf16" else torch.float16

    def draw(dim: int) -> torch.Tensor:
        rows = (1, seqlen, heads, dim) if meta["layout"] == "bshd" else (1, heads, seqlen, dim)
        return torch.randn(rows, generator=generator).to(kind)

    q, k, v = draw(meta["head_dim_qk"]), draw(meta["head_dim_qk"]), draw(meta["head_dim_v"])
    for index, plan in enumerate(meta["plans"]):
        compile_file(path, index)
        found = attngen_call(module, index, q, k, v, layout=meta["layout"], measure=True, collect=20)[2]
        found.counters.tiles = heads * -(-seqlen // plan["tile_m"])
        per_tile = ", ".join(f"{n:.0f} {what}" for what, n in found.counters.per_tile().items())
        lines += [f"plan {plan['name']}, seqlen {seqlen}, {heads} heads: {found}", f"a row tile: {per_tile}", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ptxcheck")
    command = parser.add_subparsers(required=True).add_parser("report", help="what a generated forward does")
    command.add_argument("file", type=Path)
    command.add_argument("--seqlen", type=int, default=256)
    command.add_argument("--heads", type=int, default=1)
    given = parser.parse_args()
    print(report(given.file, given.seqlen, given.heads))


if __name__ == "__main__":
    main()
