"""Reads a compiled function's host code (MLIR's LLVM dialect, `f.ir_module` as text): its functions, globals, calls.

No native code runs: the text is evaluated operation by operation with its own memory. `hostcalls.launches` enters it
at the function's TVM-FFI wrapper with the argument records that a caller would pass; so argument checks, tensor maps,
grid, cluster and parameter bytes are the compiler's own, and nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ptxcheck.hostops import NAME, Env, Leave, Step, read, symbol, unquote
from ptxcheck.hosttypes import HostError, HostMemory, Value, encode, parse_type


class _Function:
    """Where a function's blocks are in the text; they are read when first entered."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        self.name, self.arguments = name, arguments
        self.lines: dict[str, list[str]] = {}
        self.block_arguments: dict[str, list[str]] = {}
        self.steps: dict[str, list[tuple[Step, str]]] = {}


class HostCode:
    """The functions and globals of one module, ready to be called.

    `externals` gives the functions that the module only declares: name -> f(host code, argument values) -> value.
    """

    def __init__(self, text: str, externals: dict[str, Callable[[HostCode, list[Value]], Value]]) -> None:
        self.functions: dict[str, _Function] = {}
        self.externals = externals
        self._globals: dict[str, str] = {}
        self._initials: dict[str, bytes] = {}  # of globals, read when first asked for
        self._addresses: dict[str, int] = {}
        self._at: dict[int, str] = {}
        self.memory = HostMemory()
        self.steps_left = 10_000_000
        self._index(text)

    def reset(self) -> None:
        """Fresh memory and globals: every call of the compiled function starts from the loaded module."""
        self.memory, self._addresses, self._at = HostMemory(), {}, {}

    def _index(self, text: str) -> None:
        inside: _Function | None = None
        block: list[str] = []
        for line in text.splitlines():
            if inside is not None:
                if line == "  }":
                    inside = None
                elif m := re.match(r"  \^(bb\d+)(?:\((.*)\))?:", line):
                    block = inside.lines[m[1]] = []
                    inside.block_arguments[m[1]] = re.findall(r"(%\w+):", m[2] or "")
                elif line[:4] == "    ":
                    block.append(line[4:])
                continue
            if line.startswith("  llvm.mlir.global ") and (m := re.search(NAME, line)):
                self._globals[symbol(m)] = line[m.end() :]
            elif line.startswith("  llvm.func ") and line.endswith("{") and (m := re.search(NAME, line)):
                inside = _Function(symbol(m), re.findall(r"(%arg\d+):", line))
                block = inside.lines["bb0"] = []
                inside.block_arguments["bb0"] = inside.arguments
                self.functions[inside.name] = inside

    # ---- globals and calls

    def address_of(self, name: str) -> int:
        """Address of a global (placed when first asked for) or of a function."""
        if name not in self._addresses:
            rest = self._globals.get(name)
            at = self.memory.allocate(1) if rest is None else self.memory.place(self._initial(name, rest))
            self._addresses[name] = at
            self._at[at] = name
        return self._addresses[name]

    def _initial(self, name: str, rest: str) -> bytes:
        if name not in self._initials:
            self._initials[name] = self._read_initial(name, rest)
        return self._initials[name]

    def _read_initial(self, name: str, rest: str) -> bytes:
        if m := re.match(r'\("((?:[^"\\]|\\.)*)"\)', rest):
            return unquote(m[1])
        kind = parse_type(rest[rest.rindex("} : ") + 4 :])
        if m := re.match(r"\((-?\d+) : i\d+\)", rest):
            return encode(kind, int(m[1]))
        if rest.startswith("()"):
            return bytes(kind.size)
        raise HostError(f"cannot read the initial value of the global @{name}")

    def name_at(self, address: int) -> str:
        """Whose address this is."""
        return self._at[address]

    def call(self, name: str, arguments: list[Value]) -> Value:
        """Call a function of the module, or what stands for a declared one."""
        function = self.functions.get(name)
        if function is None:
            if name not in self.externals:
                raise HostError(f"the host code calls @{name}, which this checker does not know")
            return self.externals[name](self, arguments)
        env: Env = {}
        label: str = "bb0"
        while True:
            env.update(zip(function.block_arguments[label], arguments, strict=True))
            steps = function.steps.get(label)
            if steps is None:
                steps = function.steps[label] = [(read(line), line) for line in function.lines[label]]
            leave: Leave | None = None
            for step, line in steps:
                self.steps_left -= 1
                try:
                    leave = step(self, env)
                except HostError as fault:
                    if not fault.args[1:]:
                        fault.args = (f"{fault.args[0]}\n  in @{name}: {line[:160]}", True)
                    raise
                if leave is not None:
                    break
            if self.steps_left < 0:
                raise HostError(f"the host code of @{name} does not come to an end")
            if leave is None:
                raise HostError(f"a block of @{name} does not say where to go")
            if leave[0] is None:
                return leave[1]
            label, arguments = leave[0], leave[1]
