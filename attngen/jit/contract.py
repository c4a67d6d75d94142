"""What a call's tensors must be, checked slowly and explained: for CPU calls, and GPU calls that the kernel refused."""

from __future__ import annotations

from typing import Any

import torch

from attngen.diag.diagnostic import AttnError, error
from attngen.ir.spec import STARTS, AttentionSpec, TensorDecl
from attngen.ir.types import Layout
from attngen.jit.named import TORCH_DTYPE
from attngen.jit.shapes import Sizes, axes_of, sizes_of

#: TMA moves 16-byte units: bases and strides are multiples of it.
ALIGN_BYTES = 16


def validate(
    spec: AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    tensors: dict[str, Any],
    out: Any = None,
    lse: Any = None,
    *,
    strides: bool = True,
) -> None:
    """Raise the AttnError that says what is wrong with the tensors of a call; return if nothing is.

    Raises: E0604 (not a tensor), E0605 (device), E0606 (dtype), E0607 (rank, shape), E0608 (head counts), E0609
    (strides), E0610 (alignment), E0616 (out, lse).
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        _is_tensor(name, x)
    dtype = TORCH_DTYPE[spec.dtype]
    for name, x in (("q", q), ("k", k), ("v", v)):
        has_rank(spec, name, x)
        _has_device(name, x, q)
        _has_dtype(spec, name, x, dtype)
    _shapes(spec, q, k, v)
    sizes = sizes_of(spec, q, k)
    for decl in spec.lengths:
        captured(decl, tensors[decl.name], q, sizes)
        if decl.dims == (STARTS,):
            _has_an_end(decl.name, sizes[STARTS])
            sizes["batch"] = sizes[STARTS] - 1
    if strides:
        for name, x in (("q", q), ("k", k), ("v", v)):
            _has_strides(spec, name, x)
    extents: Sizes = dict(sizes)
    for decl in spec.tensors:
        captured(decl, tensors[decl.name], q, extents)
    _outputs(spec, q, out, lse, sizes, strides)
    if out is not None and out.numel() and out.data_ptr() in (q.data_ptr(), k.data_ptr(), v.data_ptr()):
        raise overlap(q, k, v, out)


def another_count(spec: AttentionSpec, takes: str, found: int) -> AttnError:
    """E0604 where a call has `found` tensors and the spec takes `takes`."""
    return error("E0604", f"`{spec.name}` takes {takes}, found {found} tensors", helps=(f"pass {takes}",))


def overlap(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> AttnError:
    """E0616: `out` starts where an input does."""
    name = next(n for n, x in (("q", q), ("k", k), ("v", v)) if x is out or x.data_ptr() == out.data_ptr())
    return error(
        "E0616",
        f"`out` is the memory of `{name}`",
        notes=(f"rows of the result are written while `{name}` is still read",),
        helps=("leave `out` out, or give it memory of its own: torch.empty_like(q)",),
    )


def normalized(x: torch.Tensor) -> torch.Tensor:
    """The same elements, with the strides of extent-1 axes as a contiguous tensor would have them (no copy)."""
    strides, expected = list(x.stride()), 1
    for axis in range(x.ndim - 1, -1, -1):
        if x.shape[axis] == 1:
            strides[axis] = expected
        expected = max(expected, strides[axis] * x.shape[axis])
    return x if tuple(strides) == x.stride() else x.as_strided(x.shape, strides)


def loads_by_tma(x: torch.Tensor) -> bool:
    """Whether a 16-bit tensor can be read where it lies: strides and base as `validate` wants them."""
    *outer, d = x.stride()
    return d == 1 and not any(s % (ALIGN_BYTES // 2) for s in outer) and not x.data_ptr() % ALIGN_BYTES


def has_row_steps(x: torch.Tensor) -> bool:
    """Whether sequences of a padded tensor begin whole rows apart, as its kernels count them (`ragged` in a file)."""
    step, row = x.stride(0), x.stride(1)
    return x.shape[0] <= 1 or not step or (row > 0 and not step % row)


def refused(what: str, failure: Exception) -> AttnError:
    """E0618: an entry point's own refusal, which no check explains."""
    lines = str(failure).strip().splitlines() or [repr(failure)]
    return error(
        "E0618",
        f"{what} refused to launch: {lines[0]}",
        notes=tuple(lines[1:4]),
        helps=("a CUDA error here is often an earlier kernel's: run with CUDA_LAUNCH_BLOCKING=1 to see whose",),
    )


def _is_tensor(name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise error(
            "E0604", f"`{name}` must be a torch tensor, found {type(x).__name__}", helps=(f"pass {name} as a tensor",)
        )


def has_rank(spec: AttentionSpec, name: str, x: torch.Tensor) -> None:
    """E0607 unless a tensor has the axes of the layout."""
    axes = axes_of(spec)
    if x.ndim != len(axes):
        mend = f"give it the axes ({', '.join(axes)})"
        if x.ndim == len(axes) - 1 == 3:
            mend = "add a batch axis with `.unsqueeze(0)`"
        elif spec.layout is Layout.VARLEN and x.ndim == 4:
            mend = "pack the sequences one behind the other, or build with layout=padded"
        raise error(
            "E0607",
            f"`{name}` has {x.ndim} axes {_shape(x)}, `{spec.name}` needs {len(axes)}: ({', '.join(axes)})",
            helps=(mend,),
        )


def _has_device(name: str, x: torch.Tensor, q: torch.Tensor) -> None:
    if x.device != q.device:
        raise error(
            "E0605",
            f"`{name}` is on {x.device}, q is on {q.device}",
            notes=("one launch reads all its tensors from one device",),
            helps=(f"move it: {name}.to({str(q.device)!r})",),
        )


def _has_dtype(spec: AttentionSpec, name: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype:
        raise error(
            "E0606",
            f"`{name}` is {x.dtype}, `{spec.name}` takes {dtype}",
            notes=("q, k and v share one dtype; both bfloat16 and float16 are served, each by a kernel of its own",),
            helps=(f"convert it: {name}.to({dtype})", "or call under torch.autocast, which converts q, k and v"),
        )


def _shapes(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    axes = axes_of(spec)
    for name, x, want in (("q", q, spec.head_dim_qk), ("k", k, spec.head_dim_qk), ("v", v, spec.head_dim_v)):
        if x.shape[-1] != want:
            raise error(
                "E0607",
                f"`{name}` has head dimension {x.shape[-1]}, `{spec.name}` is built for {want}",
                notes=(f"shape {_shape(x)} is read as ({', '.join(axes)})",),
                helps=(
                    f"build with head_dim{'_v' if name == 'v' else ''}={x.shape[-1]}, or check the order of the axes",
                ),
            )
    seqlen, heads = axes.index("seqlen"), axes.index("heads")
    same_batch = (("k", k, 0, "q", q), ("v", v, 0, "q", q)) if "batch" in axes else ()
    for name, x, axis, other, o in (*same_batch, ("v", v, seqlen, "k", k), ("v", v, heads, "k", k)):
        if x.shape[axis] != o.shape[axis]:
            raise error(
                "E0607",
                f"`{name}` has {axes[axis]} {x.shape[axis]}, {other} has {o.shape[axis]}",
                notes=(f"{name} {_shape(x)}, {other} {_shape(o)}, axes ({', '.join(axes)})",),
                helps=(
                    f'make them equal; a layout with the axes in another order is chosen with layout="{_other(spec)}"',
                ),
            )
    hq, hkv = q.shape[heads], k.shape[heads]
    if (hkv == 0 and hq) or (hkv and hq % hkv):
        raise error(
            "E0608",
            f"{hq} query heads do not divide into {hkv} KV heads",
            notes=("query head h reads KV head h // (heads_q / heads_kv)",),
            helps=("give q a multiple of k's heads", f"axes are read as ({', '.join(axes)}); check the layout"),
        )
    pack = spec.schedule.pack_gqa or 1
    if pack > 1 and hq != pack * hkv:
        raise error(
            "E0608",
            f"{hq} query heads and {hkv} KV heads, where `pack_gqa` says {pack} query heads a KV head",
            helps=("leave `pack_gqa` out: calls that gain by it find it",),
        )


def _has_strides(spec: AttentionSpec, name: str, x: torch.Tensor) -> None:
    axes = axes_of(spec)
    if x.numel() == 0:
        return
    step = ALIGN_BYTES // x.element_size()
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise error(
            "E0609",
            f"`{name}` has stride {x.stride(-1)} along head_dim, which must be contiguous",
            notes=(f"shape {_shape(x)}, strides {x.stride()}; nothing is copied silently",),
            helps=(f"pass {name}.contiguous(), or make head_dim the last axis in memory",),
        )
    for axis in range(x.ndim - 1):
        stride = x.stride(axis)
        if x.shape[axis] > 1 and (stride % step or stride < 0):
            raise error(
                "E0609",
                f"`{name}` has stride {stride} along {axes[axis]}, which must be a multiple of {step} elements",
                notes=(
                    f"shape {_shape(x)}, strides {x.stride()}",
                    f"TMA loads rows that start at multiples of {ALIGN_BYTES} bytes; nothing is copied silently",
                ),
                helps=(f"pass {name}.contiguous(), or pad the rows to a multiple of {step} elements and slice",),
            )
    if spec.layout is Layout.PADDED and not has_row_steps(x):
        raise error(
            "E0609",
            f"`{name}` has stride {x.stride(0)} along batch, no multiple of its stride {x.stride(1)} along seqlen",
            notes=(f"shape {_shape(x)}, strides {x.stride()}; a padded call counts the rows between two sequences",),
            helps=(f"pass {name}.contiguous(), or give the cache a whole number of rows for each batch entry",),
        )
    if x.data_ptr() % ALIGN_BYTES:
        raise error(
            "E0610",
            f"`{name}` starts {x.data_ptr() % ALIGN_BYTES} bytes past a multiple of {ALIGN_BYTES} bytes",
            notes=(f"storage offset {x.storage_offset()} elements; TMA needs a {ALIGN_BYTES}-byte aligned base",),
            helps=(f"pass {name}.clone(), or slice at a multiple of {step} elements",),
        )


def captured(decl: TensorDecl, x: Any, q: torch.Tensor, extents: Sizes) -> None:
    """E0604 to E0607 for a captured tensor; a free axis enters `extents`."""
    declared = f"{decl.name}: {decl.dtype.value}[{', '.join(map(str, decl.dims))}]"
    _is_tensor(decl.name, x)
    _has_device(decl.name, x, q)
    if x.dtype != TORCH_DTYPE[decl.dtype]:
        raise error(
            "E0606",
            f"`{decl.name}` is {x.dtype}, the spec declares `{declared}`",
            helps=(f"convert it: {decl.name}.to({TORCH_DTYPE[decl.dtype]})",),
        )
    if x.ndim != len(decl.dims):
        raise error(
            "E0607",
            f"`{decl.name}` has {x.ndim} axes {_shape(x)}, the spec declares `{declared}`",
            helps=("reshape it; an axis of extent 1 is broadcast",),
        )
    for axis, (dim, extent) in enumerate(zip(decl.dims, x.shape, strict=True)):
        want = dim if isinstance(dim, int) else extents.setdefault(dim, extent)
        if extent == want or (extent == 1 and dim != STARTS):
            continue
        if dim == STARTS:
            raise error(
                "E0607",
                f"`{decl.name}` holds {extent} starts, and this call has {want - 1} sequences, {want} starts",
                helps=("give both tensors of starts one for each sequence, and the end of the last",),
            )
        raise error(
            "E0607",
            f"`{decl.name}` has extent {extent} along {dim} (axis {axis}), which is {want} in this call",
            notes=(f"the spec declares `{declared}`, found {_shape(x)}",),
            helps=(f"give the axis extent {want}, or 1 to broadcast",),
        )


def _has_an_end(name: str, starts: int) -> None:
    if not starts:
        raise error(
            "E0607",
            f"`{name}` is empty: it has one element even where there is no sequence",
            notes=("it holds the row at which each sequence begins, and the end of the last",),
            helps=("give the running sum of the lengths, from 0: torch.tensor([0, *lengths]).cumsum(0).int()",),
        )


def _outputs(spec: AttentionSpec, q: torch.Tensor, out: Any, lse: Any, sizes: Sizes, strides: bool) -> None:
    shape = (*q.shape[:-1], spec.head_dim_v)
    dtype = TORCH_DTYPE[spec.out_dtype or spec.dtype]
    rows: tuple[int, ...] = (sizes["heads_q"], sizes["seqlen_q"])
    if spec.layout is not Layout.VARLEN:
        rows = (sizes["batch"], *rows)
    for name, x, want, kind in (("out", out, shape, dtype), ("lse", lse, rows, torch.float32)):
        if x is None:
            continue
        if not isinstance(x, torch.Tensor) or tuple(x.shape) != want or x.dtype != kind or x.device != q.device:
            found = f"{x.dtype} {_shape(x)} on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise error(
                "E0616",
                f"`{name}` must be {kind} {want} on {q.device}, found {found}",
                helps=(
                    f"allocate it with torch.empty({want}, dtype={kind}, device={str(q.device)!r}), or leave it out",
                ),
            )
        if any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True)):
            raise error(
                "E0616",
                f"`{name}` is an expanded tensor: several results would be written to one element",
                helps=(f"allocate {name} with its full shape",),
            )
        if name == "out" and strides:
            _has_strides(spec, name, x)


def _shape(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _other(spec: AttentionSpec) -> str:
    return (Layout.BHSD if spec.layout is Layout.BSHD else Layout.BSHD).value
