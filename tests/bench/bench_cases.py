"""Cells, cases and rows that several of the benchmark's tests take."""

from __future__ import annotations

from pathlib import Path

import torch

from attngen import samples
from attngen.bench import cells
from attngen.bench.peers import Case
from attngen.bench.recognize import features
from attngen.bench.runner import Row
from attngen.syntax import load_spec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str):
    return load_spec(EXAMPLES / f"{name}.attn")


def case_of(name: str, rows: int, columns: int, /, **params: int | float) -> tuple[Case, dict]:
    spec = example(name)
    cell = cells.Cell(spec, 2, 4, 2, rows, columns)
    shape = samples.Shape(2, 4, 2, rows, columns)
    values = samples.params(spec, params)
    tensors = samples.tensors(spec, shape)
    q, k, v = samples.qkv(spec, shape, dtype=torch.float32)
    case = Case(cell, features(spec, values), q, k, v, values, tensors)
    return case, {"params": values, "tensors": tensors}


def rows() -> list[Row]:
    made = []
    for i, (ours, peer) in enumerate(((700.0, 650.0), (300.0, 400.0))):
        r = Row(f"causal d128 {i + 1}K b32 h16", "causal", {"batch": 32}, 0.5, ceiling=720.0)
        r.tflops = {"attngen": ours, "fa3": peer}
        r.spread = {k: (v - 10, v + 6) for k, v in r.tflops.items()}
        r.milliseconds = {k: 1.0 for k in r.tflops}
        r.absent = {"fa4": "not installed", **({"flex": "sink"} if i else {})}
        made.append(r)
    return made
