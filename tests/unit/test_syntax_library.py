"""The standard library: every def is documented, and keeps the pairs of query and key that counting by hand gives."""

from __future__ import annotations

import math
import re

import pytest
import torch

from attngen import resources
from attngen.ir.expr import Expr
from attngen.ref.evaluate import evaluate
from attngen.syntax import make_spec, print_expr

TEXT = resources.read("grammar/std.attn")
DEFS = re.findall(r"^def (\w+)", TEXT, re.M)


def env(seqlen_q: int, seqlen_kv: int, **params: int) -> dict[str, torch.Tensor]:
    q, k = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_kv)[None, :]
    zero = torch.zeros(1, 1, dtype=torch.int64)
    values = {"q_idx": q, "kv_idx": k, "q_pos": q + seqlen_kv - seqlen_q, "b": zero, "h": zero}
    sizes = {"seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv, **params}
    return values | {n: torch.full((1, 1), v) for n, v in sizes.items()}


def kept(mask: str, seqlen_q: int = 1000, seqlen_kv: int = 1000, **tensors: torch.Tensor) -> int:
    dtypes = {torch.int64: "i32", torch.bool: "bool"}
    declared = {n: {"dtype": dtypes[t.dtype], "dims": [f"{n}_{i}" for i in range(t.dim())]} for n, t in tensors.items()}
    spec = make_spec("a", head_dim=64, mask=mask, tensors=declared)
    values = evaluate(spec.mask, env(seqlen_q, seqlen_kv), tensors)
    return int(values.expand(seqlen_q, seqlen_kv).sum())


@pytest.mark.parametrize(
    "mask, lengths, count",
    [
        ("causal", (1000, 1000), 500500),
        ("causal", (300, 1000), 255150),
        ("causal_top_left", (300, 1000), 45150),
        ("causal", (1000, 300), 45150),
        ("strictly_causal", (1000, 1000), 499500),
        ("causal and window(128)", (1000, 1000), 119872),
        ("window_two_sided(128, 0)", (1000, 1000), 120744),
        ("band(64)", (1000, 1000), 124840),
        ("window_two_sided(64, 64)", (1000, 1000), 124840),
        ("causal and chunk(256)", (1000, 1000), 125716),
        ("causal or prefix(257)", (1000, 1000), 533396),
        ("block_causal(32)", (1000, 1000), 515904),
        ("block_diffusion(256, 16)", (512, 512), 69632),
        ("neighborhood_2d(16, 16, 2)", (256, 256), 6400),
        ("neighborhood_2d_dilated(16, 16, 2, 1)", (256, 256), 6400),
        ("neighborhood_2d_dilated(16, 16, 2, 3)", (256, 256), 6400),
        ("neighborhood_3d(6, 5, 4, 1, 1)", (120, 120), 6 * 3 * 5 * 3 * 4 * 3),
        ("sliding_tiles(5, 4, 8, 1)", (160, 160), 5 * 3 * 4 * 3 * 8 * 8),
        ("causal and dilated_window(3, 4)", (100, 100), sum(min(p // 4 + 1, 3) for p in range(100))),
        ("bigbird(64)", (1024, 1024), 409600),
        ("streaming(128, 4)", (1000, 1000), 119872 + 1 + 2 + 3 + 4 * 869),
        ("causal and dilated(4)", (100, 100), sum(p // 4 + 1 for p in range(100))),
        ("key_length(10)", (7, 30), 70),
        ("causal_shards(100, 50)", (10, 100), sum(min(100, 51 + i) for i in range(10))),
    ],
)
def test_kept_pairs(mask: str, lengths: tuple[int, int], count: int) -> None:
    assert kept(mask, *lengths) == count


def test_kept_pairs_of_masks_with_tensors() -> None:
    lengths = [1, 127, 128, 200, 300, 244]
    doc = torch.repeat_interleave(torch.arange(6), torch.tensor(lengths))[None]
    start = torch.repeat_interleave(torch.tensor([0, 1, 128, 256, 456, 756]), torch.tensor(lengths))[None]
    assert kept("causal and document(doc)", doc=doc) == 111525
    assert kept("causal and document_start(start)", start=start) == 111525
    assert kept("document(doc)", doc=doc) == 222050
    marks = torch.zeros(1, 1000, dtype=torch.bool)
    marks[0, [0, 1, 2, 500]] = True
    assert kept("band(64) or global_tokens(marks)", marks=marks) == 132180
    assert kept("causal and left_padded(start)", start=torch.tensor([100])) == 405450
    parents = [-1, 0, 0, 1, 1, 2, 5]
    ancestors = torch.eye(7, dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            ancestors[i] |= ancestors[parent]
    assert kept("tree(100, ancestors)", 7, 107, ancestors=ancestors) == 718
    words = (ancestors.long() << torch.arange(7)).sum(1, keepdim=True)
    assert kept("tree_bits(100, words)", 7, 107, words=words) == 718
    keep = torch.rand(1, 1, 20, 30) < 0.5
    assert kept("dense_mask(keep)", 20, 30, keep=keep) == int(keep.sum())
    assert kept("key_mask(marks)", 10, 1000, marks=marks) == 40
    assert kept("media(image, 16)", 5, 48, image=torch.tensor([[0, 2, 2, -1, 3]])) == 3 * 16


def value(score: str, names: str = "", **params: float) -> Expr:
    return make_spec("a", head_dim=64, score=score, params={n: {"type": "float"} for n in params}).score


def test_scores() -> None:
    s = torch.linspace(-200, 200, 101, dtype=torch.float64)[:, None]
    assert torch.allclose(evaluate(value("softcap(s, 50.0)"), {"s": s}), 50 * torch.tanh(s / 50))
    at = env(5, 9) | {"s": torch.zeros(5, 9, dtype=torch.float64), "heads_q": torch.tensor(8)}
    at["h"] = torch.tensor(3)
    slope = 2.0 ** (-8 * 4 / 8)
    assert torch.allclose(evaluate(value("alibi(s, alibi_slope)"), at), -slope * (at["q_pos"] - at["kv_idx"]).double())
    assert print_expr(value("log_scaled(s, 8192.0, 0.1)")).startswith("s * (1.0 + 0.1 * log(1.0 + floor(")


@pytest.mark.parametrize("size, radius, dilation", [(16, 2, 3), (15, 3, 2), (7, 1, 2), (12, 2, 1)])
def test_dilated_neighbours(size: int, radius: int, dilation: int) -> None:
    """Each of the `dilation` interleaved axes by itself is an axis that is not dilated."""
    at, key = torch.arange(size)[:, None], torch.arange(size)[None, :]
    e = make_spec("a", head_dim=64, mask=f"dilated_neighbors(q_pos, kv_idx, {size}, {radius}, {dilation})").mask
    got = evaluate(e, env(size, size), {}).expand(size, size)
    want = torch.zeros(size, size, dtype=torch.bool)
    for first in range(dilation):
        cells = torch.arange(first, size, dilation)
        n = len(cells)
        center = torch.arange(n).clamp(radius, n - 1 - radius)[:, None]
        want[cells[:, None], cells[None, :]] = (torch.arange(n)[None, :] - center).abs() <= radius
    assert torch.equal(got, want) and torch.equal((at - key) % dilation * want, torch.zeros_like(want))


def test_shifted_windows_are_those_of_a_rolled_image() -> None:
    """Windows of 4 x 4 on an image of 12 x 8, rolled by 1: two tokens see each other if they were in one window and no
    edge of the image runs between them."""
    side, shift, across, down = 4, 1, 2, 3
    image = torch.arange(96).view(12, 8).roll((-shift, -shift), (0, 1))
    windows = image.unfold(0, side, side).unfold(1, side, side).reshape(across * down, side * side)
    y, x = windows // 8, windows % 8
    near = ((y[:, :, None] - y[:, None]).abs() < side) & ((x[:, :, None] - x[:, None]).abs() < side)
    e = make_spec("a", head_dim=64, mask=f"shifted_windows({side}, {shift}, {across}, {down})").mask
    at = env(side * side, side * side) | {"b": torch.arange(across * down).view(-1, 1, 1)}
    assert torch.equal(evaluate(e, at).expand_as(near), near) and int(near.sum()) < near.numel()


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 20, 32, 40, 71])
def test_alibi_slopes_of_any_number_of_heads(heads: int) -> None:
    """MPT's and the paper's code: slopes of the next power of two, every other one first."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    want = slopes if power == heads else (slopes[1::2] + slopes[::2])[:heads]
    at = env(1, 1) | {"h": torch.arange(heads).view(-1, 1, 1), "heads_q": torch.tensor(heads)}
    got = evaluate(value("alibi_slope_any"), at).flatten()
    assert torch.allclose(got.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-6)


def test_offsets_in_a_window() -> None:
    at = env(49, 49)
    row, column = (evaluate(value(f"{n}_offset(7)"), at).expand(49, 49) for n in ("row", "column"))
    yx = torch.stack(torch.meshgrid(torch.arange(7), torch.arange(7), indexing="ij")).flatten(1)
    dy, dx = (yx[:, :, None] - yx[:, None, :]).double()
    assert torch.equal(row.double(), dy) and torch.equal(column.double(), dx)
    table = (dy + 6) * 13 + dx + 6
    assert table.min() == 0 and table.max() == 168


def t5_bucket(relative: int, bidirectional: bool, buckets: int, farthest: int) -> int:
    """Straight from the T5 paper's published description."""
    bucket = 0
    if bidirectional:
        buckets //= 2
        bucket += buckets if relative > 0 else 0
        distance = abs(relative)
    else:
        distance = max(-relative, 0)
    exact = buckets // 2
    if distance < exact:
        return bucket + distance
    far = exact + int(math.log(distance / exact) / math.log(farthest / exact) * (buckets - exact))
    return bucket + min(far, buckets - 1)


@pytest.mark.parametrize("buckets, farthest", [(32, 128), (16, 64), (8, 20)])
def test_t5_buckets(buckets: int, farthest: int) -> None:
    at = env(150, 300)
    relative = (at["kv_idx"] - at["q_pos"]).expand(150, 300)
    for name, two_sided in (("t5_bucket", False), ("t5_bucket_two_sided", True)):
        # Make the bucket the score: an int is converted.
        ours = evaluate(value(f"{name}({buckets}, {farthest})"), at)
        wanted = [[t5_bucket(int(r), two_sided, buckets, farthest) for r in row] for row in relative]
        assert torch.equal(ours.expand(150, 300).long(), torch.tensor(wanted))


@pytest.mark.parametrize("name", DEFS)
def test_every_def_is_documented_and_its_arguments_are_typed(name: str) -> None:
    lines = TEXT.split("\n")
    at = next(i for i, line in enumerate(lines) if re.match(rf"def {name}\b", line))
    assert lines[at - 1].startswith("# ") and not lines[at - 1].startswith("# --")
    head = lines[at].split(" =")[0]
    if "(" in head:
        for formal in head[head.index("(") + 1 : head.rindex(")")].split(", "):
            assert re.match(r"\w+: (int|float|bool|tensor)( >= \d+)?$", formal)
