"""What from_flex cannot trace: the code, the place in the user's function, the reason and the mend."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as flex

import attngen
from attngen.diag.codes import CODES
from attngen.diag.diagnostic import AttnError, Diagnostic

BIAS = torch.zeros(4, 8, 8)
INTS = torch.zeros(8, dtype=torch.int32)
ROW = torch.zeros(8)
STEP, OTHER = 3, 4


def fault(score: Any = None, mask: Any = None, **options: Any) -> Diagnostic:
    with pytest.raises(AttnError) as caught:
        attngen.from_flex(score, mask, **{"head_dim": 64, **options})
    (found,) = caught.value.diagnostics
    assert found.code in CODES and found.helps
    return found


def under(d: Diagnostic) -> str:
    """The text that the caret stands under."""
    assert d.primary is not None
    span = d.primary.span
    assert span.source.name.endswith("test_importers_faults.py")
    return span.source.text[span.start : span.end]


Mod = Callable[[Any, Any, Any, Any, Any], Any]
#: (code, function, text under the caret, words of the message, words of the mend)
CASES: tuple[tuple[str, Mod, str, str, str], ...] = (
    ("E0701", lambda s, b, h, q, k: s + torch.sin(q / 2), "torch.sin(q / 2)", "`sin`", "tensor, and index"),
    ("E0701", lambda s, b, h, q, k: torch.stack([s, s]), "torch.stack([s, s])", "`stack`", "tensor, and index"),
    ("E0701", lambda s, b, h, q, k: s + (q | k), "q | k", "`|` of int and int", "compare"),
    ("E0701", lambda s, b, h, q, k: s * ~q, "~q", "`~` of int", "~(a > 0)"),
    ("E0701", lambda s, b, h, q, k: s // 0, "s // 0", "divides by zero", "another number"),
    ("E0701", lambda s, b, h, q, k: s + 2**q, "2**q", "power", "float base"),
    ("E0701", lambda s, b, h, q, k: s**q, "s**q", "power", "exp(b * log(a))"),
    ("E0701", lambda s, b, h, q, k: s + math.nan, "s + math.nan", "nan", "finite"),
    ("E0701", lambda s, b, h, q, k: s.detach(), "s.detach()", "detach", "captures it"),
    ("E0701", lambda s, b, h, q, k: torch.tanh(torch.where(q > k, s, -math.inf)), "torch.tanh", "-inf", "last thing"),
    ("E0701", lambda s, b, h, q, k: s + (q << k), "q << k", "`<<`", "multiply"),
    ("E0701", lambda s, b, h, q, k: s + (q + (1 << 40)), "q + (1 << 40)", "32-bit", "float"),
    ("E0701", lambda s, b, h, q, k: s + s.grad_fn, "s.grad_fn", "grad_fn", "index"),
    ("E0701", lambda s, b, h, q, k: s * torch.isin(q, INTS), "torch.isin(q, INTS)", "`isin`", "(q_idx == 1)"),
    ("E0701", lambda s, b, h, q, k: s * torch.any(q > k), "torch.any(q > k)", "`any`", "`|` and `&`"),
    ("E0702", lambda s, b, h, q, k: s * (q in (1, 2)), "q in (1, 2)", "branches", "(q_idx == 1)"),
    ("E0702", lambda s, b, h, q, k: s if q >= k else 0.0, "q >= k", "branches", "torch.where"),
    ("E0702", lambda s, b, h, q, k: s * (q > k and k > 3), "q > k", "branches", "`&`, `|` and `~`"),
    ("E0702", lambda s, b, h, q, k: s * (k < q < 5), "k < q < 5", "branches", "(a <= b) & (b < c)"),
    ("E0702", lambda s, b, h, q, k: s + max(q, k), "max(q, k)", "branches", "torch.minimum and torch.maximum"),
    ("E0702", lambda s, b, h, q, k: s + q.item(), "q.item()", "`item`", "tensor operations"),
    ("E0702", lambda s, b, h, q, k: s + int(q), "int(q)", "`int`", "tensor operations"),
    ("E0702", lambda s, b, h, q, k: s + math.exp(s), "math.exp(s)", "`float`", "torch's functions replace math's"),
    ("E0702", lambda s, b, h, q, k: s + sum(range(q)), "range(q)", "`index`", "a Python number"),
    ("E0702", lambda s, b, h, q, k: s + [1.0, 2.0][q], "[1.0, 2.0][q]", "`index`", "torch tensors"),
    ("E0702", lambda s, b, h, q, k: s + ROW.numpy()[q], "ROW.numpy()[q]", "`array`", "torch tensors"),
    ("E0702", lambda s, b, h, q, k: print(s), "print(s)", "printed", "remove"),
    ("E0702", lambda s, b, h, q, k: f"{q}", "{q}", "printed", "remove"),
    ("E0703", lambda s, b, h, q, k: s.add_(1), "s.add_(1)", "in place", "x = x + 1"),
    ("E0703", lambda s, b, h, q, k: ROW.mul_(2)[k] + s, "ROW.mul_(2)", "in place", "x = x + 1"),
    ("E0703", lambda s, b, h, q, k: ROW.__setitem__(q, s), "ROW.__setitem__(q, s)", "in place", "x = x + 1"),
    ("E0703", lambda s, b, h, q, k: torch.exp(s, out=ROW), "torch.exp(s, out=ROW)", "in place", "x = x + 1"),
    ("E0705", lambda s, b, h, q, k: s + BIAS[h], "s + BIAS[h]", "2 of its axes", "every axis"),
    ("E0705", lambda s, b, h, q, k: s + ROW, "s + ROW", "shape (8,)", "every axis"),
    ("E0705", lambda s, b, h, q, k: s + BIAS[h, q, k, b], "BIAS[h, q, k, b]", "4 indices", "(4, 8, 8)"),
    ("E0705", lambda s, b, h, q, k: s + ROW[s], "ROW[s]", "by a float", "torch.int32"),
    ("E0705", lambda s, b, h, q, k: s + ROW[q > k], "ROW[q > k]", "by a bool", "torch.int32"),
    ("E0705", lambda s, b, h, q, k: s + BIAS[h, 1:, k], "BIAS[h, 1:, k]", "a slice", "slice the tensor before"),
    ("E0705", lambda s, b, h, q, k: s + BIAS[h, q, 8], "BIAS[h, q, 8]", "outside axis 2", "correct"),
    ("E0705", lambda s, b, h, q, k: s[0], "s[0]", "traced number", "captured"),
)


@pytest.mark.parametrize("code, mod, caret, message, mend", CASES, ids=[f"{c[0]}-{c[2]}" for c in CASES])
def test_says_what_where_and_how_to_mend(code: str, mod: Mod, caret: str, message: str, mend: str) -> None:
    found = fault(mod)
    assert (found.code, found.message.count(message)) == (code, 1)
    assert mend in found.helps[0]
    assert caret in under(found) and len(under(found)) < 60


def test_augmented_assignment() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        s += BIAS[h, q, k]
        return s

    found = fault(mod)
    assert found.code == "E0703" and "+=" in found.message and under(found) == "s += BIAS[h, q, k]"


def test_the_innermost_function_of_the_user_is_named() -> None:
    def inner(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k if q > 3 else k

    assert under(fault(mask=flex.and_masks(lambda b, h, q, k: q > k, inner))) == "q > 3"


@pytest.mark.parametrize(
    "score, mask, message, mend",
    [
        (lambda s, b, h, q: s, None, "does not take (score, b, h, q_idx, kv_idx)", "as mask_mod="),
        (None, lambda s, b, h, q, k: q > k, "does not take (b, h, q_idx, kv_idx)", "as score_mod="),
        (lambda s, b, h, q, k, bias: s, None, "does not take (score, b, h, q_idx, kv_idx)", "functools.partial"),
        (lambda s, b, h, q, k: None, None, "returns nothing", "one number"),
        (lambda s, b, h, q, k: (s, s), None, "returns a tuple", "one number"),
        (lambda s, b, h, q, k: BIAS, None, "returns a tensor of shape (4, 8, 8)", "one number"),
        (None, lambda b, h, q, k: q - k, "the mask_mod returns a int", "condition"),
        (lambda s, b, h, q, k: s + undefined, None, "raised NameError", "0-dimensional"),  # noqa: F821
        (lambda s, b, h, q, k: s + round(s), None, "raised TypeError", "0-dimensional"),
    ],
)
def test_bad_functions(score: Any, mask: Any, message: str, mend: str) -> None:
    found = fault(score, mask)
    assert found.code == "E0704" and message in found.message and mend in found.helps[0]
    assert "lambda" in under(found) or under(found) in ("undefined", "round(s)")


def test_what_is_no_function() -> None:
    found = fault(mask=3)
    assert found.code == "E0704" and "not a callable" in found.message and found.primary is None


def test_captured_tensors_without_a_declaration() -> None:
    complex_ = torch.zeros(8, dtype=torch.complex64)
    found = fault(lambda s, b, h, q, k: s + complex_[k])
    assert found.code == "E0705" and "complex64" in found.message
    large = torch.full((8,), 1 << 40)
    found = fault(lambda s, b, h, q, k: s + large[k])
    assert found.code == "E0705" and "32 bits" in found.message


def test_expressions_that_explode_are_stopped() -> None:
    def doubling(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for _ in range(60):
            s = s + s * 0.5
        return s

    found = fault(doubling)
    assert found.code == "E0701" and "20000 operations" in found.message and under(found) == "s + s * 0.5"


def test_params_and_promises_that_name_nothing() -> None:
    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < STEP

    assert "did you mean `STEP`?" in fault(mask=mod, params=["STEPS"]).helps[0]
    assert fault(mask=mod, sorted=["doc"]).code == "E0706"
    assert "no field `least`" in fault(mask=mod, params={"STEP": {"least": 1}}).message
    config = SimpleNamespace(window=4)
    held = fault(mask=lambda b, h, q, k: q - k < config.window, params=["window"])
    assert "do not read it" in held.message and "config.window" in held.helps[0]
    assert "`Sq`: is no axis" in fault(mask=mod, sizes={"Sq": 4}).message
    both = flex.and_masks(functools.partial(lambda b, h, q, k, n: q - k < n, n=1), lambda b, h, q, k, n=2: k - q < n)
    assert "several values" in fault(mask=both, params=["n"]).message


def test_block_masks() -> None:
    blocks = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, device="cpu")
    assert fault(mask=lambda b, h, q, k: q >= k, block_mask=blocks).code == "E0706"
    assert "Tensor" in fault(block_mask=torch.zeros(1)).message
    assert "lost" in fault(block_mask=blocks[:, :, :1]).message


def test_a_source_that_cannot_be_read() -> None:
    scope: dict[str, Any] = {}
    exec("def mod(s, b, h, q, k):\n    return s if q > k else s\n", scope)
    found = fault(scope["mod"])
    assert found.code == "E0702" and found.primary is None
