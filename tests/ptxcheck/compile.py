"""Kernels for tests: generated files and specs, compiled in this process, once a session of all processes together.

The DSL's compiler is used as the package uses it; nothing is launched and no GPU is needed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from filelock import FileLock

import attngen
from attngen.ir.spec import AttentionSpec
from attngen.verify.machine import MachineCode, inspect_ptx
from ptxcheck.ptx import Module, parse

#: Without and with the places in the source, which reports of faults name; they take half as long again, and leave
#: instructions as they are.
PLAIN, OPTIONS = "--keep-ptx", "--keep-ptx --generate-line-info"
#: Whether all that is compiled from now on has them: pytest's --source-lines.
source_lines = False


@dataclass(frozen=True, repr=False)
class Code:
    """What the compiler made of one function: PTX of its kernels and the host code that launches them."""

    ptx: str
    host: str

    @cached_property
    def module(self) -> Module:
        """The parsed PTX."""
        return parse(self.ptx)

    @cached_property
    def machine_code(self) -> MachineCode:
        """What ptxas makes of it."""
        return inspect_ptx(self.ptx)


def code_of(function: Any) -> Code:
    """The code of a function that `cute.compile` returned, compiled with --keep-ptx and --enable-tvm-ffi."""
    return function if isinstance(function, Code) else Code(function.__ptx__, str(function.ir_module))


@lru_cache(maxsize=1)
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ptxcheck-", ignore_cleanup_errors=True)


def scratch_folder() -> str:
    """A folder of this process for the files that the DSL dumps."""
    return _scratch().name


def load_text(text: str, name: str = "kernel") -> ModuleType:
    """Import a generated file from its text. The path carries a hash of it: the DSL reads sources lazily."""
    stem = f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if stem in sys.modules:
        return sys.modules[stem]
    path = Path(_scratch().name) / f"{stem}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[stem] = module
    spec.loader.exec_module(module)
    return module


_META = re.compile(r"^ATTN_META = \{$.*?^\}$", re.DOTALL | re.MULTILINE)
_PLANS = re.compile(r"^PLANS = \($(.*?)^\)$", re.DOTALL | re.MULTILINE)
_PLAN = re.compile(r"^    TilePlan\($.*?^    \),$", re.DOTALL | re.MULTILINE)


def seen_by_compiler(text: str, plan: int) -> str:
    """What the compiler reads of a generated file for one of its plans: neither the words about it at its head, nor the
    name and facts for tools, nor the other plans and their limits, nor the self-check.

    So examples of one kernel by several names, and a plan that files of several sets share, are compiled once.
    """
    head, tail = text.find("\nimport "), text.find("\n# ---- self-check ----")
    meta, plans = _META.search(text), _PLANS.search(text)
    if -1 in (head, tail) or meta is None or plans is None:  # a kernel that is not generated
        return f"{text} plan {plan}"
    limits = text.index("\n", plans.end() + 1)
    rest = text[head : meta.start()] + text[meta.end() : plans.start()] + text[limits:tail]
    return rest + _PLAN.findall(plans[1])[plan]


#: Where code is kept from one session to the next, and for the other processes of this one; None: it is not.
cache: Path | None = None
_compiled: dict[str, Code] = {}


def compiled(module: ModuleType, what: str, make: Callable[[str], Any], *, plan: int = 0, lines: bool = False) -> Code:
    """Code of a function of a generated module: `make(options)` compiles it for a plan of the file; `what` tells it
    from others of the module. `lines`: with places in the source, whatever the session wants.

    The compiler is deterministic: what it reads of the text (all of it where places are wanted), `what`, the options
    and its version name an entry of the cache. Kernels have the name of the module that was compiled first.
    """
    options = OPTIONS if lines or source_lines else PLAIN
    version = importlib.metadata.version("nvidia-cutlass-dsl")
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    text = f"{text} plan {plan}" if options == OPTIONS else seen_by_compiler(text, plan)
    key = hashlib.sha256(f"{text} {what} {version} {options}".encode()).hexdigest()[:32]
    if key not in _compiled:
        path = cache / f"{key}.json" if cache else None
        with FileLock(path.with_suffix(".lock")) if path else nullcontext():  # another process may be at it
            if path and path.exists():
                _compiled[key] = Code(**json.loads(path.read_text(encoding="utf-8")))
                return _compiled[key]
            code = _compiled[key] = code_of(make(f"{options} --dump-dir {_scratch().name}"))
            if path:
                new = path.with_suffix(f".{os.getpid()}")
                new.write_text(json.dumps({"ptx": code.ptx, "host": code.host}), encoding="utf-8")
                new.replace(path)  # whole or not at all
    return _compiled[key]


def compile_module(module: ModuleType, plan: int = 0, *, lines: bool = False) -> Code:
    """Plan `plan` of a generated module."""
    return compiled(module, "forward", lambda options: module.compile_plan(plan, options), plan=plan, lines=lines)


def compile_backward(
    module: ModuleType, wanted: Sequence[str] = ("q", "k", "v"), plan: int = 0, *, lines: bool = False
) -> Code:
    """Plan `plan` of the backward of `wanted` of a generated module."""
    what, of = "backward of " + "".join(wanted), tuple(wanted)

    def make(options: str) -> Any:
        return module.compile_backward(plan, options, wanted=of)

    return compiled(module, what, make, plan=plan, lines=lines)


def compile_file(path: Path, plan: int = 0, *, lines: bool = False) -> tuple[ModuleType, Code]:
    """Plan `plan` of a generated file."""
    module = load_text(path.read_text(encoding="utf-8"), path.name.split(".")[0])
    return module, compile_module(module, plan, lines=lines)


def compile_spec(spec: AttentionSpec, plan: int = 0) -> tuple[ModuleType, Code]:
    """Plan `plan` of the forward that attngen generates for `spec`."""
    module = load_text(attngen.compile(spec, only="forward").text, spec.name)
    return module, compile_module(module, plan)
