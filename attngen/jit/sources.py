"""Remembered generated files: a warm `build` neither plans nor renders.

    <root>/v1/<toolchain>/.source-<key>.json      {"kernel_id", "sha256", "text"}

The key covers the resolved spec, the target, the direction, and the contents of every file of attngen that can change
the text, so an edited checkout or another release never meets an old text.
"""

from __future__ import annotations

import hashlib
import json
import logging
from functools import lru_cache
from pathlib import Path

from attngen import resources
from attngen.jit.cache import SOURCE_PREFIX, KernelCache
from attngen.jit.key import toolchain_id
from attngen.source import KernelSource, write_atomic

log = logging.getLogger("attngen.cache")
#: Parts of the package that a text does not depend on.
_APART = ("bench", "cli", "docs", "draw", "jit", "ref")


def recall(cache: KernelCache, spec: str, target: str, direction: str = "forward") -> KernelSource | None:
    """The text of a spec (as JSON), if it was generated before by this very generator.

    `direction`: forward, or backward and the captured tensors whose gradients it computes.
    """
    if not cache.persistent:
        return None
    try:
        found = json.loads(_path(cache, spec, target, direction).read_bytes())
        source = KernelSource(str(found["text"]), str(found["kernel_id"]), str(found["sha256"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return source if hashlib.sha256(source.text.encode()).hexdigest() == source.sha256 else None


def remember(cache: KernelCache, spec: str, target: str, source: KernelSource, direction: str = "forward") -> None:
    """Keep a text; a cache that cannot be written is not worth a word here (compiling will say it)."""
    if not cache.persistent:
        return
    path = _path(cache, spec, target, direction)
    record = {"kernel_id": source.kernel_id, "sha256": source.sha256, "text": source.text}
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, json.dumps(record).encode())
    except OSError as failure:
        log.info("cannot keep the generated text: %s", failure)


def _path(cache: KernelCache, spec: str, target: str, direction: str) -> Path:
    key = hashlib.sha256(json.dumps([generator(), spec, target, direction]).encode()).hexdigest()
    return cache.root / "v1" / toolchain_id() / f"{SOURCE_PREFIX}{key[:32]}.json"


@lru_cache(maxsize=1)
def generator() -> str:
    """Hash of everything that turns a spec into text: the package's modules and the templates."""
    package = Path(__file__).parent.parent
    templates = resources.root() / "templates"
    digest = hashlib.sha256()
    for root, pattern in ((package, "*.py"), (templates, "*.jinja")):
        for path in sorted(root.rglob(pattern)):
            relative = path.relative_to(root)
            if root is package and relative.parts[0] in _APART:
                continue
            digest.update(f"{relative}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
