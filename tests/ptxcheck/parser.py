"""PTX text to the data of ptx.py.

Covers the syntax that NVVM and inline assembly produce for compute kernels (PTX ISA, "Syntax", "State Spaces, Types,
and Variables", "Instruction Operands"): nested scopes with their own registers and labels, vectors, addresses with an
offset, tensor addresses, predicate pairs and guards, `.loc` with `inlined_at`. Device functions are not covered: a call
is reported as an unknown instruction.
"""

from __future__ import annotations

import re

from ptxcheck.ptx import (
    Addr,
    Imm,
    Inst,
    Kernel,
    Label,
    Labels,
    Module,
    Neg,
    Operand,
    Pair,
    Param,
    PtxSyntaxError,
    Reg,
    Sink,
    Special,
    Sym,
    TensorAddr,
    Variable,
    Vec,
)

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_ID = r"[A-Za-z_$%][\w$]*"
_STATEMENT = re.compile(
    r"\s*(?:"
    r"(?P<open>\{)|(?P<close>\})"
    r"|\.loc\s+(?P<loc>[^\n]*)\n"
    r"|(?P<label>[A-Za-z_$%][\w$]*)\s*:(?!:)"
    r"|(?P<directive>\.[^;]*);"
    r"|(?:@(?P<neg>!?)\s*(?P<guard>[%\w$]+)\s+)?(?P<op>[a-z]\w*(?:\.[\w:]+)*)\s*(?P<args>[^;]*);"
    r"|(?P<empty>;))",
    re.S,
)
_FILE = re.compile(r"^\s*\.file\s+(\d+)\s+\"([^\"]*)\"", re.M)
_ENTRY = re.compile(r"\.entry\s+(" + _ID + r")\s*(?:\(([^)]*)\))?([^{;]*)\{", re.S)
_LOC = re.compile(r"(\d+)\s+(\d+)\s+(\d+)(?:\s*,\s*function_name\s+[^,]*,\s*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_VARIABLE = re.compile(
    r"(?P<extern>\.extern\s+)?(?:\.(?:visible|weak|common)\s+)?\.(?P<space>shared|local|global|const)\s+"
    r"(?:\.attribute\([^)]*\)\s*)?(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+(?P<name>" + _ID + r")"
    r"(?P<dims>(?:\[\d*\])*)\s*(?:=\s*(?P<init>.*))?$",
    re.S,
)
_MODULE_VARIABLE = re.compile(
    r"^[ \t]*((?:\.(?:extern|visible|weak|common)\s+)*\.(?:shared|global|const)\s[^;]*);", re.M
)
_SPECIALS = """
    tid ntid laneid warpid nwarpid ctaid nctaid smid nsmid gridid clusterid nclusterid cluster_ctaid cluster_nctaid
    cluster_ctarank cluster_nctarank is_explicit_cluster lanemask_eq lanemask_le lanemask_lt lanemask_ge lanemask_gt
    clock clock_hi clock64 globaltimer globaltimer_lo globaltimer_hi reserved_smem_offset_begin
    reserved_smem_offset_end reserved_smem_offset_cap total_smem_size aggr_smem_size dynamic_smem_size
    current_graph_exec
"""
_SPECIAL_HEADS = frozenset(_SPECIALS.split())


def type_bytes(type_: str) -> int:
    """Bytes of a PTX type in memory."""
    if type_ in ("f16x2", "bf16x2"):
        return 4
    if type_ == "pred":
        return 1
    digits = re.search(r"\d+", type_.removeprefix("bf").removeprefix("tf"))
    if digits is None:
        raise PtxSyntaxError(f"not a type: .{type_}")
    return int(digits.group()) // 8


def _variable(text: str) -> tuple[Variable, bool] | None:
    m = _VARIABLE.match(" ".join(text.split()))
    if m is None:
        return None
    width = type_bytes(m["type"])
    count = 1
    for d in re.findall(r"\[(\d*)\]", m["dims"]):
        count *= int(d or "0")
    init = None
    if m["init"]:
        values = [int(x, 0) for x in re.findall(r"-?\b(?:0[xX][0-9a-fA-F]+|\d+)\b", m["init"])]
        init = b"".join((v & ((1 << (8 * width)) - 1)).to_bytes(width, "little") for v in values)
        init = init.ljust(count * width, b"\0")
    return Variable(m["name"], m["space"], count * width, int(m["align"] or width), init), bool(m["extern"])


def _params(text: str) -> tuple[tuple[Param, ...], int]:
    out: list[Param] = []
    end = 0
    for item in filter(None, (p.strip() for p in text.split(","))):
        m = re.match(
            r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)*(?:\.align\s+\d+\s+)?)?(.*)", item
        )
        m2 = re.search(r"(" + _ID + r")\s*(?:\[(\d+)\])?$", item)
        if m is None or m2 is None:
            raise PtxSyntaxError(f"parameter: {item}")
        width = type_bytes(m[2])
        size = int(m2[2]) * width if m2[2] else width
        align = int(m[1] or width)
        end = -(-end // align) * align
        out.append(Param(m2[1], end, size, align))
        end += size
    return tuple(out), end


class _Scope:
    """Names of one pair of braces; registers and labels of inner scopes get unique names."""

    __slots__ = ("labels", "names", "parent", "suffix")

    def __init__(self, parent: _Scope | None, suffix: str) -> None:
        self.parent, self.suffix = parent, suffix
        self.names: dict[str, str] = {}
        self.labels: dict[str, int] = {}

    def reg(self, name: str) -> str | None:
        s: _Scope | None = self
        while s is not None:
            if name in s.names:
                return s.names[name]
            s = s.parent
        return None

    def label(self, name: str) -> int | None:
        s: _Scope | None = self
        while s is not None:
            if name in s.labels:
                return s.labels[name]
            s = s.parent
        return None


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    if "{" not in text and "[" not in text and "(" not in text:
        return [t.strip() for t in text.split(",")] if text.strip() else []
    out, depth, start = [], 0, 0
    for k, c in enumerate(text):
        if c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        elif c == "," and depth == 0:
            out.append(text[start:k].strip())
            start = k + 1
    out.append(text[start:].strip())
    return out


class _Operands:
    """Operand texts of one kernel to operands; common ones are shared."""

    def __init__(self) -> None:
        self.cache: dict[str, Operand] = {}

    def parse(self, t: str, scope: _Scope) -> Operand:
        if scope.parent is None:
            found = self.cache.get(t)
            if found is None:
                found = self.cache[t] = self._parse(t, scope)
            return found
        return self._parse(t, scope)

    def _parse(self, t: str, scope: _Scope) -> Operand:
        head = t[:1]
        if head in ("{", "("):
            return Vec(tuple(self.parse(x, scope) for x in _split(t[1:-1])))
        if head == "[":
            return self._address(t[1:-1].strip(), scope)
        if t == "_":
            return Sink()
        if "|" in t:
            a, b = t.split("|")
            return Pair(self.parse(a.strip(), scope), self.parse(b.strip(), scope))
        if head == "!" or (head == "-" and t[1:].strip()[:1] == "%"):
            reg = scope.reg(t[1:].strip())
            if reg is None:
                raise PtxSyntaxError(f"undeclared register {t}")
            return Neg(Reg(reg))
        reg = scope.reg(t)
        if reg is not None:
            return Reg(reg)
        if head == "%":
            if t[1:].split(".")[0] in _SPECIAL_HEADS:
                return Special(t)
            raise PtxSyntaxError(f"undeclared register {t}")
        if head.isdigit() or head in "-+.":
            return Imm(t)
        target = scope.label(t)
        if target is not None:
            return Label(target, t)
        if re.fullmatch(_ID, t):
            return Sym(t)
        raise PtxSyntaxError(f"operand: {t!r}")

    def _address(self, t: str, scope: _Scope) -> Operand:
        parts = _split(t)
        if len(parts) > 1:
            coords = self.parse(parts[1], scope)
            if not isinstance(coords, Vec):
                raise PtxSyntaxError(f"tensor address [{t}]")
            return TensorAddr(
                self.parse(parts[0], scope), coords, self.parse(parts[2], scope) if len(parts) > 2 else None
            )
        m = re.fullmatch(r"([%\w$]+)\s*(?:([+-])\s*(-?\s*\w+))?", t)
        if m is None:
            raise PtxSyntaxError(f"address [{t}]")
        base = self.parse(m[1], scope)
        if not isinstance(base, Reg | Sym | Imm):
            raise PtxSyntaxError(f"address [{t}]")
        offset = int(m[3].replace(" ", ""), 0) if m[3] else 0
        return Addr(base, -offset if m[2] == "-" else offset)


def _declare(text: str, scope: _Scope, regs: dict[str, str]) -> None:
    """`.reg .b32 %r<9>, x;`"""
    m = re.match(r"\.reg\s+(?:\.v\d\s+)?\.(\w+)\s+(.*)", text, re.S)
    if m is None:
        raise PtxSyntaxError(text)
    for item in m[2].split(","):
        n = re.fullmatch(r"([%\w$]+)\s*(?:<(\d+)>)?", item.strip())
        if n is None:
            raise PtxSyntaxError(text)
        for name in [f"{n[1]}{k}" for k in range(int(n[2]))] if n[2] else [n[1]]:
            scope.names[name] = name + scope.suffix
            regs[name + scope.suffix] = m[1]


def _location(text: str, files: dict[int, str]) -> tuple[str | None, int | None, tuple[tuple[str, int], ...]]:
    m = _LOC.match(text.strip())
    if m is None:
        return None, None, ()
    at = ((files.get(int(m[4]), "?"), int(m[5])),) if m[4] else ()
    return files.get(int(m[1]), "?"), int(m[2]), at


def _body(text: str, pos: int, name: str, files: dict[int, str]) -> tuple[list[Inst], dict[str, str], list[Variable]]:
    """Statements from after the opening brace to its closing one."""
    scope = _Scope(None, "")
    regs: dict[str, str] = {}
    variables: list[Variable] = []
    raw: list[tuple[re.Match[str], _Scope, tuple[str | None, int | None, tuple[tuple[str, int], ...]]]] = []
    tables: dict[str, tuple[str, _Scope]] = {}
    loc: tuple[str | None, int | None, tuple[tuple[str, int], ...]] = (None, None, ())
    scopes, pending = 0, ""
    while True:
        m = _STATEMENT.match(text, pos)
        if m is None:
            raise PtxSyntaxError(f"{name}: {' '.join(text[pos : pos + 120].split())!r}")
        pos = m.end()
        kind = m.lastgroup
        if kind == "args":
            raw.append((m, scope, loc))
        elif kind == "loc":
            loc = _location(m["loc"], files)
        elif kind == "label":
            scope.labels[m["label"]] = len(raw)
            pending = m["label"]
        elif kind == "open":
            scopes += 1
            scope = _Scope(scope, f"@{scopes}")
        elif kind == "close":
            if scope.parent is None:
                break
            scope = scope.parent
        elif kind == "directive":
            d = m["directive"]
            if d.startswith(".reg"):
                _declare(d, scope, regs)
            elif d.startswith(".branchtargets"):
                tables[pending] = (d.removeprefix(".branchtargets"), scope)
                del scope.labels[pending]
            elif (v := _variable(d)) is not None:
                variables.append(v[0])
            elif not d.startswith(".pragma"):
                raise PtxSyntaxError(f"{name}: directive {d!r}")
    operands = _Operands()
    insts = []
    for k, (m, sc, (file, line, at)) in enumerate(raw):
        stmt = " ".join(m[0].split())
        ops: list[Operand] = []
        for t in _split(m["args"]):
            if t in tables:
                names, owner = tables[t]
                ops.append(Labels(tuple(_target(x.strip(), owner) for x in names.split(","))))
            else:
                ops.append(operands.parse(t, sc))
        guard = None
        if m["guard"]:
            reg = sc.reg(m["guard"])
            if reg is None:
                raise PtxSyntaxError(f"{name}: undeclared guard in {stmt}")
            guard = (Reg(reg), bool(m["neg"]))
        insts.append(Inst(k, m["op"], tuple(m["op"].split(".")), tuple(ops), guard, file, line, stmt, at))
    return insts, regs, variables


def _target(name: str, scope: _Scope) -> Label:
    index = scope.label(name)
    if index is None:
        raise PtxSyntaxError(f"unknown label {name}")
    return Label(index, name)


def _triple(text: str) -> tuple[int, int, int]:
    n = [int(x) for x in re.findall(r"\d+", text)]
    x, y, z = [*n, 1, 1, 1][:3]
    return x, y, z


def parse_module(text: str) -> Module:
    """Parse one PTX module."""
    files = {int(k): v for k, v in _FILE.findall(text)}
    version, target = re.search(r"\.version\s+(\S+)", text), re.search(r"\.target\s+(\w+)", text)
    if version is None or target is None:
        raise PtxSyntaxError("no .version or no .target")
    code = _COMMENT.sub("", text)
    code = re.sub(r"^\s*\.section\s.*", "", code, flags=re.M | re.S)  # debug sections come last
    entries = list(_ENTRY.finditer(code))
    globals_: dict[str, Variable] = {}
    extern: list[Variable] = []
    static: list[Variable] = []
    spans = [m.start() for m in entries]
    for m in _MODULE_VARIABLE.finditer(code, 0, spans[0] if spans else len(code)):
        found = _variable(m[1])
        if found is None:
            raise PtxSyntaxError(m[1])
        v, is_extern = found
        if v.space == "shared":
            (extern if is_extern or v.size == 0 else static).append(v)
        else:
            globals_[v.name] = v
    kernels = {}
    for m in entries:
        insts, regs, variables = _body(code, m.end(), m[1], files)
        params, size = _params(m[2] or "")
        directives = {d: v.strip() for d, v in re.findall(r"\.(\w+)([^.]*)", m[3])}
        kernels[m[1]] = Kernel(
            m[1],
            params,
            size,
            tuple(insts),
            regs,
            tuple(static + [v for v in variables if v.space == "shared"]),
            tuple(extern),
            tuple(v for v in variables if v.space == "local"),
            _triple(directives["reqntid"]) if "reqntid" in directives else None,
            _triple(directives["reqnctapercluster"]) if "reqnctapercluster" in directives else None,
            directives,
        )
        for v in variables:
            if v.space in ("global", "const"):
                globals_[v.name] = v
    return Module(version[1], target[1], kernels, globals_)
