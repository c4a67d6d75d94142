"""Readers of the host code's operations: one line of the LLVM dialect to one step.

Semantics: MLIR's LLVM dialect and LLVM's LangRef. What the LangRef calls poison or undefined is an error here.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ptxcheck.hosttypes import HostError, Type, Value, decode, empty, encode, parse_type, zero

if TYPE_CHECKING:
    from ptxcheck.hostir import HostCode

Env = dict[str, Value]
#: What a block's last operation gives: the next block with its arguments, or the function's result.
Leave = tuple[str | None, "list[Value] | Value"]
Step = Callable[["HostCode", Env], "Leave | None"]
Read = Callable[["HostCode", Env], Value]

NAME = r'@(?:"(?P<q>(?:[^"\\]|\\.)*)"|(?P<n>[\w$.\-]+))'
_INT_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "intr.umax": max,
    "intr.umin": min,
}
_FLOAT_BINARY: dict[str, Callable[[float, float], float]] = {
    "fadd": operator.add,
    "fsub": operator.sub,
    "fmul": operator.mul,
}
_COMPARE = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt}
_COMPARE["ge"] = operator.ge


def unquote(text: str) -> bytes:
    """The bytes of a string attribute: `\\0A` is a byte in hex."""
    raw = text.encode("latin-1", "replace")
    for written, byte in ((b"\\\\", b"\\5C"), (b'\\"', b"\\22"), (b"\\n", b"\\0A"), (b"\\t", b"\\09")):
        raw = raw.replace(written, byte)
    return raw.replace(b"\\", b"\\x").decode("unicode_escape").encode("latin-1")


def symbol(m: re.Match[str]) -> str:
    return m["n"] if m["q"] is None else m["q"]


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def read(line: str) -> Step:
    m = re.match(r"(?:(%\w+) = )?llvm\.([\w.]+)\s*", line)
    if m is None:
        return _unknown(line)
    result, op, rest = m[1], m[2], line[m.end() :]
    if op in _LEAVE:
        return _LEAVE[op](rest)
    if op in _EFFECT:
        return _EFFECT[op](result, rest)
    value = _value(op, rest)
    if value is None or result is None:
        return _unknown(line)

    def step(host: HostCode, env: Env) -> None:
        env[result] = value(host, env)

    return step


def _unknown(line: str) -> Step:
    def step(host: HostCode, env: Env) -> None:
        raise HostError(f"no reading of the host operation {line[:200]!r}")

    return step


def _value(op: str, rest: str) -> Read | None:
    if op in _SPECIAL:
        return _SPECIAL[op](rest)
    rest = re.sub(r"^(?:overflow<[^>]*>|exact|disjoint|nneg)\s*|\s*\{[^{}]*\}(?= :)", "", rest)
    operands, _, types = rest.partition(" : ")
    names = re.findall(r"%\w+", operands)
    if op in _CAST:
        source, target = (parse_type(t) for t in types.split(" to "))
        cast = _CAST[op]
        return lambda host, env: cast(env[names[0]], source, target)
    if op in _INT_BINARY or op in _INT_SIGNED:
        kind = parse_type(types.removeprefix("(").split(",")[0].split(")")[0])
        mask, bits, (a, b) = (1 << kind.bits) - 1, kind.bits, names
        if op in _INT_BINARY:
            plain = _INT_BINARY[op]
            return lambda host, env: plain(env[a], env[b]) & mask
        signed = _INT_SIGNED[op]
        return lambda host, env: signed(env[a], env[b], bits) & mask
    if op in _FLOAT_BINARY:
        kind, (a, b) = parse_type(types), names
        joined = _FLOAT_BINARY[op]
        return lambda host, env: decode(kind, encode(kind, joined(env[a], env[b])))
    return None


def _divide(signed: bool, remainder: bool) -> Callable[[int, int, int], int]:
    def run(a: int, b: int, bits: int) -> int:
        if b == 0:
            raise HostError("division by zero on the host")
        if not signed:
            return a % b if remainder else a // b
        x, y = _signed(a, bits), _signed(b, bits)
        quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        return x - quotient * y if remainder else quotient

    return run


def _shift(run: Callable[[int, int, int], int]) -> Callable[[int, int, int], int]:
    def checked(a: int, b: int, bits: int) -> int:
        if b >= bits:
            raise HostError(f"a shift of {bits} bits by {b} on the host (poison)")
        return run(a, b, bits)

    return checked


_INT_SIGNED: dict[str, Callable[[int, int, int], int]] = {
    "udiv": _divide(False, False),
    "urem": _divide(False, True),
    "sdiv": _divide(True, False),
    "srem": _divide(True, True),
    "shl": _shift(lambda a, b, bits: a << b),
    "lshr": _shift(lambda a, b, bits: a >> b),
    "ashr": _shift(lambda a, b, bits: _signed(a, bits) >> b),
    "intr.smax": lambda a, b, bits: max(_signed(a, bits), _signed(b, bits)),
    "intr.smin": lambda a, b, bits: min(_signed(a, bits), _signed(b, bits)),
}


def _to_int(value: float, source: Type, target: Type) -> int:
    if not math.isfinite(value):
        raise HostError(f"the host converts {value} to an integer (poison)")
    return int(value) & ((1 << target.bits) - 1)


_CAST: dict[str, Callable[[Any, Type, Type], Value]] = {
    "sext": lambda v, s, t: _signed(v, s.bits) & ((1 << t.bits) - 1),
    "zext": lambda v, s, t: v,
    "trunc": lambda v, s, t: v & ((1 << t.bits) - 1),
    "ptrtoint": lambda v, s, t: v & ((1 << t.bits) - 1),
    "inttoptr": lambda v, s, t: v,
    "addrspacecast": lambda v, s, t: v,
    "bitcast": lambda v, s, t: decode(t, encode(s, v)),
    "fptrunc": lambda v, s, t: decode(t, encode(t, v)),
    "fpext": lambda v, s, t: v,
    "sitofp": lambda v, s, t: decode(t, encode(t, float(_signed(v, s.bits)))),
    "uitofp": lambda v, s, t: decode(t, encode(t, float(v))),
    "fptosi": _to_int,
    "fptoui": _to_int,
}


def _constant(rest: str) -> Read:
    body, _, kind_text = rest.rpartition(") : ")
    body, kind = body[1:], parse_type(kind_text)
    value: Value
    if body in ("true", "false"):
        value = int(body == "true")
    elif m := re.match(r'"((?:[^"\\]|\\.)*)"', body):
        value = tuple(unquote(m[1]))
    elif m := re.match(r"dense<(-?\d+)> : vector", body):
        value = (int(m[1]) & ((1 << kind.items[0].bits) - 1),) * kind.count
    elif m := re.match(r"dense<\[([-\d, ]+)\]> : vector", body):
        value = tuple(int(x) & ((1 << kind.items[0].bits) - 1) for x in m[1].split(","))
    elif m := re.match(r"(-?\d+) : i\d+$", body):
        value = int(m[1]) & ((1 << kind.bits) - 1)
    elif m := re.match(r"([-+.\deE]+|0x[0-9A-F]+) : b?f\d+$", body):
        bits = kind.bits // 8
        value = decode(kind, int(m[1], 16).to_bytes(bits, "little")) if "x" in m[1] else float(m[1])
    else:
        raise HostError(f"cannot read the constant {rest[:100]!r}")
    return lambda host, env: value


def _compare(rest: str) -> Read:
    m = re.match(r'"(\w+)" (%\w+), (%\w+) : (.*)', rest)
    if m is None:
        raise HostError(f"cannot read the comparison {rest!r}")
    kind, a, b = parse_type(m[4]), m[2], m[3]
    if kind.kind == "float":
        test, unordered = _COMPARE[m[1][1:]], m[1][0] == "u"
        return lambda host, env: int(unordered if math.isnan(env[a]) or math.isnan(env[b]) else test(env[a], env[b]))
    if m[1][0] == "s":
        test, bits = _COMPARE[m[1][1:]], kind.bits
        return lambda host, env: int(test(_signed(env[a], bits), _signed(env[b], bits)))
    test = _COMPARE[m[1].removeprefix("u") if m[1] != "ne" else "ne"]
    return lambda host, env: int(test(env[a], env[b]))


def _extract(rest: str) -> Read:
    m = re.match(r"(%\w+)\[([\d, ]+)\]", rest)
    if m is None:
        raise HostError(f"cannot read extractvalue {rest!r}")
    name, path = m[1], [int(x) for x in m[2].split(",")]

    def run(host: HostCode, env: Env) -> Value:
        value = env[name]
        for i in path:
            value = None if value is None else value[i]
        return value

    return run


def _insert(rest: str) -> Read:
    m = re.match(r"(%\w+), (%\w+)\[([\d, ]+)\]", rest)
    if m is None:
        raise HostError(f"cannot read insertvalue {rest!r}")
    part, whole, path = m[1], m[2], [int(x) for x in m[3].split(",")]

    def put(value: Value, new: Value, where: list[int]) -> Value:
        if not where:
            return new
        i = where[0]
        return (*value[:i], put(value[i], new, where[1:]), *value[i + 1 :])

    return lambda host, env: put(env[whole], env[part], path)


def _alloca(rest: str) -> Read:
    m = re.match(r"(%\w+) x (.*?)(?: \{[^{}]*\})? : \(", rest)
    if m is None:
        raise HostError(f"cannot read alloca {rest!r}")
    count, kind = m[1], parse_type(m[2])
    return lambda host, env: host.memory.allocate(env[count] * kind.size)


def _element(rest: str) -> Read:
    m = re.match(
        r"(?:inbounds(?:\|\w+)*\s*|nuw\s*|nusw\s*)*(%\w+)\[(.*?)\] : \((.*?)\) -> !llvm\.ptr(?:<\d+>)?, (.*)", rest
    )
    if m is None:
        raise HostError(f"cannot read getelementptr {rest!r}")
    base, indices, kind = m[1], [x.strip() for x in m[2].split(",")], parse_type(m[4])
    dynamic = [parse_type(t).bits for t in m[3].split(", ")[1:]]

    def run(host: HostCode, env: Env) -> Value:
        widths = iter(dynamic)
        numbers = [_signed(env[x], next(widths)) if x[0] == "%" else int(x) for x in indices]
        at, inner = numbers[0] * kind.size, kind
        for i in numbers[1:]:
            step, inner = inner.step(i)
            at += step
        return env[base] + at

    return run


def _load(rest: str) -> Read:
    m = re.match(r"(?:volatile )?(%\w+)(?: \w+)*(?: \{[^{}]*\})? : !llvm\.ptr(?:<\d+>)? -> (.*)", rest)
    if m is None:
        raise HostError(f"cannot read load {rest!r}")
    at, kind = m[1], parse_type(m[2])
    return lambda host, env: decode(kind, host.memory.read(env[at], kind.size))


def _select(rest: str) -> Read:
    c, a, b = re.findall(r"%\w+", rest)[:3]
    return lambda host, env: env[a] if env[c] else env[b]


def _addressof(rest: str) -> Read:
    m = re.match(NAME, rest)
    if m is None:
        raise HostError(f"cannot read addressof {rest!r}")
    name = symbol(m)
    return lambda host, env: host.address_of(name)


def _of_type(make: Callable[[Type], Value]) -> Callable[[str], Read]:
    def read(rest: str) -> Read:
        value = make(parse_type(rest.removeprefix(": ")))
        return lambda host, env: value

    return read


def _freeze(rest: str) -> Read:
    name, kind = re.findall(r"%\w+", rest)[0], parse_type(rest.partition(" : ")[2])
    return lambda host, env: zero(kind) if env[name] is None else env[name]


_SPECIAL: dict[str, Callable[[str], Read]] = {
    "mlir.constant": _constant,
    "mlir.zero": _of_type(zero),
    "mlir.poison": _of_type(empty),
    "mlir.undef": _of_type(empty),
    "mlir.addressof": _addressof,
    "icmp": _compare,
    "fcmp": _compare,
    "extractvalue": _extract,
    "insertvalue": _insert,
    "alloca": _alloca,
    "getelementptr": _element,
    "load": _load,
    "select": _select,
    "freeze": _freeze,
}


def _store(result: str | None, rest: str) -> Step:
    m = re.match(r"(?:volatile )?(%\w+), (%\w+)(?: \w+)*(?: \{[^{}]*\})? : (.*), !llvm\.ptr(?:<\d+>)?$", rest)
    if m is None:
        raise HostError(f"cannot read store {rest!r}")
    value, at, kind = m[1], m[2], parse_type(m[3])
    return lambda host, env: host.memory.write(env[at], encode(kind, env[value]))


def _call(result: str | None, rest: str) -> Step:
    m = re.match(rf"(?:tail )?(?:{NAME}|(?P<p>%\w+))\((?P<a>[^)]*)\)", rest)
    if m is None:
        raise HostError(f"cannot read call {rest!r}")
    name, pointer = ("", m["p"]) if m["p"] else (symbol(m), None)
    arguments = re.findall(r"%\w+", m["a"])

    def step(host: HostCode, env: Env) -> None:
        callee = name if pointer is None else host.name_at(env[pointer])
        value = host.call(callee, [env[x] for x in arguments])
        if result is not None:
            env[result] = value

    return step


_EFFECT: dict[str, Callable[[str | None, str], Step]] = {"store": _store, "call": _call}


def _target(text: str) -> tuple[str, list[str]]:
    m = re.match(r"\^(bb\d+)(?:\((.*)\))?$", text.strip())
    if m is None:
        raise HostError(f"cannot read the branch target {text!r}")
    return m[1], re.findall(r"%\w+", (m[2] or "").partition(" : ")[0])


def _branch(rest: str) -> Step:
    label, names = _target(rest)
    return lambda host, env: (label, [env[x] for x in names])


def _cond_branch(rest: str) -> Step:
    m = re.match(r"(%\w+)(?: weights\([^)]*\))?, (\^bb\d+(?:\([^)]*\))?), (\^bb\d+(?:\(.*\))?)$", rest)
    if m is None:
        raise HostError(f"cannot read cond_br {rest!r}")
    condition, (yes, a), (no, b) = m[1], _target(m[2]), _target(m[3])
    return lambda host, env: (yes, [env[x] for x in a]) if env[condition] else (no, [env[x] for x in b])


def _return(rest: str) -> Step:
    names = re.findall(r"%\w+", rest)
    return lambda host, env: (None, env[names[0]] if names else None)


def _stop(rest: str) -> Step:
    def step(host: HostCode, env: Env) -> Leave:
        raise HostError("the host code gives up (trap)")

    return step


_LEAVE: dict[str, Callable[[str], Step]] = {
    "br": _branch,
    "cond_br": _cond_branch,
    "return": _return,
    "unreachable": _stop,
    "intr.trap": _stop,
}
