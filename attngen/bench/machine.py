"""The machine and the software that a table was measured on."""

from __future__ import annotations

import functools
import platform
import subprocess
from importlib import metadata
from typing import Any

_PEER_DISTRIBUTIONS = (
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "flash-attn-4",
    "fa3-fwd",
    "flash-attn-3",
    "attngen",
)


@functools.cache
def describe() -> dict[str, str]:
    """GPU, driver, power limit and clocks as the driver says them, versions of everything that ran."""
    import torch

    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = f"{properties.name}, {properties.multi_processor_count} SMs, {properties.total_memory >> 30} GiB"
        cudnn: Any = torch.backends.cudnn
        found["cudnn"] = str(cudnn.version())
        found |= _driver()
    for name in _PEER_DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _driver() -> dict[str, str]:
    fields = ("driver_version", "power.limit", "clocks.max.sm")
    try:
        asked = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"],
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [v.strip() for v in asked.stdout.strip().split(",")]
    if asked.returncode or len(values) != len(fields):
        return {}
    return dict(zip(("driver", "power_limit", "max_sm_clock"), values, strict=True))
