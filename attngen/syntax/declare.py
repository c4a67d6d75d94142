"""Declarations of an attention block: params, tensors, lets, head dims, each checked by itself."""

from __future__ import annotations

from collections.abc import Sequence

from attngen.diag.diagnostic import Label, Severity
from attngen.diag.span import Span
from attngen.ir.spec import ParamDecl, TensorDecl
from attngen.ir.types import KNOWN_DIMS, DType, Type
from attngen.syntax import ast, limits, words
from attngen.syntax.collect import Faults
from attngen.syntax.faults import closest, quoted
from attngen.syntax.reserved import reason
from attngen.syntax.scope import Scope
from attngen.syntax.values import Names


def declare(block: ast.Attention, scope: Scope, faults: Faults) -> Names:
    """All names that `block` declares."""
    names = Names()
    count = 0
    for clause in block.clauses:
        if not isinstance(clause, ast.Param | ast.Tensor | ast.Let):
            continue
        count += 1
        if count == limits.DECLARATIONS + 1:
            faults.add(
                "E0108",
                f"more than {limits.DECLARATIONS} declarations in one attention",
                clause.name.span,
                "one too many",
                helps=("put many numbers into one captured `tensor`",),
            )
        _check_name(clause, scope, faults)
        name = clause.name.text
        if isinstance(clause, ast.Let):
            names.lets[name] = clause
        elif isinstance(clause, ast.Param):
            param = _param(clause, faults)
            names.params[name] = param or ParamDecl(name=name, type=Type.INT)
            if param is None:
                del names.params[name]
                names.broken.add(name)
        else:
            tensor = _tensor(clause, block, faults)
            if tensor is None:
                names.broken.add(name)
            else:
                names.tensors[name] = tensor
    return names


def _check_name(clause: ast.Param | ast.Tensor | ast.Let, scope: Scope, faults: Faults) -> None:
    name = clause.name
    why = reason(name.text, inlined=isinstance(clause, ast.Let))
    define = scope.defs.get(name.text)
    if why:
        faults.add(
            "E0204",
            f"`{name.text}` is {why}",
            name.span,
            "cannot be declared",
            helps=(f"choose another name, such as `my_{name.text.strip('_')}`",),
        )
    elif define is not None and define.formals is None:
        faults.add(
            "E0203",
            f"`{name.text}` already names a def",
            name.span,
            "hides the def",
            also=(Label(define.name.span, "defined here"),),
            helps=("rename one of them",),
        )


def literal(node: ast.Number | ast.Bool, kind: Type, what: str, faults: Faults) -> bool | int | float | None:
    """The value of a literal of a declared type; an int literal serves as a float."""
    value = node.value
    fits = (
        isinstance(node, ast.Bool)
        if kind is Type.BOOL
        else isinstance(node, ast.Number) and (isinstance(value, int) or kind is Type.FLOAT)
    )
    if not fits:
        found = "bool" if isinstance(node, ast.Bool) else "float" if isinstance(value, float) else "int"
        faults.add(
            "E0217",
            f"{what} must be `{kind}`, found `{found}`",
            node.span,
            f"this is `{found}`",
            helps=(
                {"bool": "write `true` or `false`", "int": "write a whole number", "float": "write a number"}[kind],
            ),
        )
        return None
    if kind is Type.INT and value > limits.INT32_MAX:
        faults.add(
            "E0111",
            f"number {value} does not fit a 32-bit int",
            node.span,
            "out of range",
            helps=("positions are 32-bit",),
        )
        return None
    return float(value) if kind is Type.FLOAT else value


def _param(clause: ast.Param, faults: Faults) -> ParamDecl | None:
    name, kind = clause.name.text, clause.type
    if kind.text not in list(Type):
        meant = closest(kind.text, list(Type)) or {"i32": "int", "f32": "float"}.get(kind.text)
        faults.add(
            "E0217",
            f"unknown type `{kind.text}` of param `{name}`",
            kind.span,
            "not a type",
            helps=(f"did you mean `{meant}`?" if meant else f"write {quoted(list(Type))}",),
        )
        return None
    type_ = Type(kind.text)
    if type_ is Type.BOOL and clause.bounds:
        faults.add(
            "E0217",
            f"a bool param has no bounds (`{name}`)",
            clause.bounds[0].span,
            "nothing to bound",
            helps=("remove the bound",),
        )
        return None
    values = []
    for bound in clause.bounds:
        for side in (bound.low, bound.high):
            values.append(literal(side, type_, f"a bound of `{name}`", faults) if side is not None else 0)
    default = literal(clause.default, type_, f"the default of `{name}`", faults) if clause.default is not None else None
    if None in values or (clause.default is not None and default is None):
        return None
    low, high = words.range_of(clause.bounds)
    if type_ is Type.FLOAT:
        low, high = (float(x) if x is not None else None for x in (low, high))
    if low is not None and high is not None and low > high:
        faults.add(
            "E0217",
            f"bounds of `{name}` leave no value",
            clause.bounds[-1].span,
            f"lower bound {low}, upper bound {high}",
            helps=("give a lower bound that is not above the upper one",),
        )
        return None
    if default is not None and clause.default is not None and not _inside(default, low, high):
        faults.add(
            "E0217",
            f"default {default} of `{name}` is not {words.interval(low, high)}",
            clause.default.span,
            "out of its bounds",
            notes=words.negative_note(default),
            helps=(f"give a default that is {words.interval(low, high)}",),
        )
        return None
    return ParamDecl(name=name, type=type_, default=default, minimum=low, maximum=high, span=clause.span)


def _inside(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def tightened(
    param: ParamDecl, bounds: Sequence[tuple[ast.Bound, ast.Formal, Span]], clause: ast.Param, faults: Faults
) -> ParamDecl:
    """A param with the bounds that the defs it is given to put on it."""
    low, high = words.range_of(tuple(b for b, _, _ in bounds))
    low = max((x for x in (low, param.minimum) if x is not None), default=None)
    high = min((x for x in (high, param.maximum) if x is not None), default=None)
    if param.default is not None and not _inside(param.default, low, high):
        at = clause.default.span if clause.default is not None else clause.span
        also = tuple(Label(f.span, "declared here") for _, f, _ in bounds[:2])
        faults.add(
            "E0310",
            f"default {param.default} of `{param.name}` is not {words.interval(low, high)}",
            at,
            "a def that takes it asks for more",
            also=also,
            notes=words.negative_note(param.default),
            helps=(f"give a default that is {words.interval(low, high)}",),
        )
        return param
    return param.replace(minimum=low, maximum=high)


def _tensor(clause: ast.Tensor, block: ast.Attention, faults: Faults) -> TensorDecl | None:
    name, ok = clause.name.text, True
    if clause.dtype.text not in list(DType):
        alias = {
            "float": "f32",
            "float32": "f32",
            "fp32": "f32",
            "int": "i32",
            "int32": "i32",
            "i64": "i32",
            "int64": "i32",
            "f16": "fp16",
            "float16": "fp16",
            "half": "fp16",
            "bfloat16": "bf16",
            "b8": "bool",
        }.get(clause.dtype.text)
        meant = alias or closest(clause.dtype.text, list(DType))
        faults.add(
            "E0216",
            f"unknown element type `{clause.dtype.text}` of tensor `{name}`",
            clause.dtype.span,
            "not an element type",
            helps=(f"did you mean `{meant}`?" if meant else f"write {quoted(list(DType))}",),
        )
        ok = False
    if len(clause.dims) > limits.TENSOR_RANK:
        faults.add(
            "E0216",
            f"tensor `{name}` has {len(clause.dims)} axes",
            clause.span,
            f"at most {limits.TENSOR_RANK}",
            helps=("flatten some axes and compute the index",),
        )
        ok = False
    dims: list[str | int] = []
    declared = {c.name.text for c in block.clauses if isinstance(c, ast.Param | ast.Tensor | ast.Let)}
    for dim in clause.dims:
        ok = _dim(dim, name, declared, faults) and ok
        dims.append(dim.text if isinstance(dim, ast.Word) else int(dim.value))
    flags = [f.text for f in clause.flags]
    for i, flag in enumerate(clause.flags):
        if flag.text in flags[:i]:
            faults.add("E0206", f"`{flag.text}` is given twice", flag.span, "second time", helps=("keep one of them",))
        elif flag.text == "grad" and ok and DType(clause.dtype.text).type is not Type.FLOAT:
            faults.add(
                "E0216",
                f"a tensor of `{clause.dtype.text}` has no gradient",
                flag.span,
                "only float tensors have one",
                helps=("remove `grad`, or declare the tensor as f32, bf16 or fp16",),
            )
    if not ok:
        return None
    return TensorDecl(
        name=name,
        dtype=DType(clause.dtype.text),
        dims=tuple(dims),
        grad="grad" in flags,
        sorted="sorted" in flags,
        span=clause.span,
    )


def _dim(dim: ast.Word | ast.Number, tensor: str, declared: set[str], faults: Faults) -> bool:
    if isinstance(dim, ast.Number):
        if 1 <= dim.value <= limits.INT32_MAX:
            return True
        faults.add(
            "E0216",
            f"axis of extent {dim.value} in tensor `{tensor}`",
            dim.span,
            "an extent is at least 1, a 32-bit int",
            helps=("give an extent of at least 1, or a name",),
        )
        return False
    if dim.text in KNOWN_DIMS:
        return True
    why = reason(dim.text)
    if why or dim.text in declared:
        why = why or "declared in this block, and an axis is no value"
        meant = closest(dim.text, KNOWN_DIMS)
        faults.add(
            "E0216",
            f"axis `{dim.text}` of tensor `{tensor}`: the name is {why}",
            dim.span,
            "cannot name an axis",
            notes=(f"known axes are {', '.join(KNOWN_DIMS)}; any other name is free and takes the extent given",),
            helps=(f"did you mean `{meant}`?" if meant else f"rename it, such as `{dim.text.strip('_')}_extent`",),
        )
        return False
    meant = {"seqlen_k": "seqlen_kv", "heads_k": "heads_kv"}.get(dim.text) or _near(dim.text)
    if meant:
        faults.add(
            "W0201",
            f"axis `{dim.text}` is a free name, close to the known axis `{meant}`",
            dim.span,
            "takes any extent",
            helps=(f"write `{meant}` if that axis is meant",),
            severity=Severity.WARNING,
        )
    return True


def _near(name: str) -> str | None:
    import difflib

    found = difflib.get_close_matches(name, KNOWN_DIMS, n=1, cutoff=0.8)
    return found[0] if found else None
