"""attngen: a compiler for attention. A spec in, a readable standalone CuTe-DSL kernel and a torch callable out.

    attn = attngen.build("examples/causal.attn")
    o = attn(q, k, v)

Importing this package imports neither torch nor the DSL; names load when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "block_map": "attngen.jit.blocks",
    "build": "attngen.api",
    "check": "attngen.api",
    "compile": "attngen.api",
    "explain": "attngen.api",
    "format": "attngen.api",
    "from_cudnn": "attngen.importers",
    "from_flash": "attngen.importers",
    "from_flex": "attngen.importers",
    "from_sdpa": "attngen.importers",
    "AttentionSpec": "attngen.ir.spec",
    "AttnError": "attngen.diag.diagnostic",
    "Attention": "attngen.jit.kernel",
    "AttngenNotice": "attngen.jit.notice",
    "AttngenWarning": "attngen.jit.notice",
    "Imported": "attngen.importers",
    "KernelSource": "attngen.source",
    "Options": "attngen.options",
    "make_spec": "attngen.syntax",
    "merge": "attngen.jit.merge",
}
__all__ = [*sorted(_HOME), "__version__"]

if TYPE_CHECKING:
    from attngen.api import build as build
    from attngen.api import check as check
    from attngen.api import compile as compile
    from attngen.api import explain as explain
    from attngen.api import format as format
    from attngen.diag.diagnostic import AttnError as AttnError
    from attngen.importers import Imported as Imported
    from attngen.importers import from_cudnn as from_cudnn
    from attngen.importers import from_flash as from_flash
    from attngen.importers import from_flex as from_flex
    from attngen.importers import from_sdpa as from_sdpa
    from attngen.ir.spec import AttentionSpec as AttentionSpec
    from attngen.jit.blocks import block_map as block_map
    from attngen.jit.kernel import Attention as Attention
    from attngen.jit.merge import merge as merge
    from attngen.jit.notice import AttngenNotice as AttngenNotice
    from attngen.jit.notice import AttngenWarning as AttngenWarning
    from attngen.options import Options as Options
    from attngen.source import KernelSource as KernelSource
    from attngen.syntax import make_spec as make_spec


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'attngen' has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
