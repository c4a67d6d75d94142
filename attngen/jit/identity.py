"""What tells one Attention from another, here and on other machines: in pickles, caches, and torch's operators."""

from __future__ import annotations

import hashlib

from attngen.ir.spec import AttentionSpec
from attngen.source import KernelSource


def portable_json(spec: AttentionSpec) -> str:
    """The spec as JSON that says the same on every machine: without places in source files."""
    return spec.replace(schedule=spec.schedule.replace(places=())).model_dump_json()


def handle_of(spec: AttentionSpec, source: KernelSource, target: str) -> str:
    """The name by which operators find an Attention: equal where spec, text and target are."""
    text = f"{portable_json(spec)}\n{source.sha256}\n{target}"
    return f"{source.kernel_id}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
