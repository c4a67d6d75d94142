"""Callables whose arguments are not a kernel's q, k and v: one packed qkv, or a k whose columns v is a view of.

Each is a thin front of an Attention on the same memory: no kernel, no copy and no operator of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Union

from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit import contract, views
from attngen.jit.kernel import Attention
from attngen.jit.recipe import Made, Recipe

if TYPE_CHECKING:
    from attngen.jit.selected import SelectedAttention
    from attngen.jit.several import SeveralAttention

#: What a front is a front of.
Inner = Union["Attention", "SeveralAttention", "SelectedAttention"]


class Composed(Made):
    """Attention as `spec` says it, by way of `inner`, whose plans, source, path and backward are its own."""

    __call__: Callable[..., Any]

    def __init__(self, spec: AttentionSpec, inner: Inner, recipe: Recipe) -> None:
        self.spec = spec
        self.inner = inner
        self._recipe = recipe

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":  # before __init__, as copy and pickle ask
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def kernels(self) -> tuple[Attention, ...]:
        """The Attention of each kernel behind it."""
        return (self.inner,) if isinstance(self.inner, Attention) else self.inner.kernels

    def compile(
        self, device: int | None = None, *, backward: bool | Sequence[str] = False, group: int | None = None
    ) -> Composed:
        """As `Attention.compile`."""
        self.inner.compile(device, backward=backward, group=group)
        return self

    def __repr__(self) -> str:
        return f"<attngen {type(self).__name__} {self.spec.name} {self.inner!r}>"


class PackedAttention(Composed):
    """Attention on one tensor of q, k and v (`layout = packed_qkv`).

    `attn(qkv, heads_q=None, **keywords)` takes the keywords of `Attention`.
    Shapes: qkv (batch, seqlen, 3, heads, D), or (batch, seqlen, heads_q + 2 heads_kv, D) with `heads_q`: the query
    heads first, then the heads of k, then those of v. o is (batch, seqlen, heads_q, D), contiguous.
    Strides: D contiguous, others multiples of 16 bytes; nothing is copied.
    Gradients: one tensor like qkv, contiguous; the kernel writes dq, dk and dv into it where they lie.
    Raises: AttnError E0604, E0607, E0608 (qkv), and as `Attention`.
    """

    def __init__(self, spec: AttentionSpec, inner: Inner, recipe: Recipe) -> None:
        super().__init__(spec, inner, recipe)
        if isinstance(inner, Attention):
            inner.backward.joint = True

    def __call__(self, qkv: Any, *more: Any, heads_q: int | None = None, **keywords: Any) -> Any:
        """See the class."""
        if more:
            raise contract.another_count(self.spec, "one qkv", 1 + len(more))
        q, k, v = views.unpack(self.spec, qkv, heads_q)
        return self.inner(q, k, v, **keywords)


class ViewAttention(Composed):
    """Attention whose V is columns of K (`v = k[a:b]`).

    `attn(q, k, **keywords)` takes the arguments of `Attention` without v. V's memory is K's; dk holds the gradient of v
    in its columns, both rounded before they are added, as torch does.
    Raises: AttnError E0604, E0607 (k), and as `Attention`.
    """

    def __call__(self, q: Any, k: Any = None, *more: Any, **keywords: Any) -> Any:
        """See the class."""
        if more or k is None:
            found = 1 if k is None else 2 + len(more)
            raise contract.another_count(self.spec, "q and k, whose columns are v", found)
        if self.spec.branches:  # the first branch's k
            first, v = views.keys_and_values(self.spec, k[0])
            k = (first, *k[1:])
        else:
            k, v = views.keys_and_values(self.spec, k)
        return self.inner(q, k, v, **keywords)


def front(spec: AttentionSpec, inner: Inner, recipe: Recipe) -> Composed:
    """The callable of a spec whose kernel's spec (`passes.parts.kernel_spec`) is another one, that of `inner`."""
    kind = PackedAttention if spec.layout is Layout.PACKED_QKV else ViewAttention
    return kind(spec, inner, recipe)
