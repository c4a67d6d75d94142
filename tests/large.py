"""A spec that has a forward and no backward."""


def large(count: int = 180) -> str:
    """A spec with a forward only: its epilogue, a product of many learned elements, has derivatives of 10^5 nodes."""
    level = [f"(o + x[{i}, h])" for i in range(count)]
    while len(level) > 1:
        rest = level[len(level) // 2 * 2 :]
        level = [f"({a} * {b})" for a, b in zip(level[::2], level[1::2], strict=False)] + rest
    return (
        "attn 1\nattention gated {\n  head_dim = 64\n  tensor x: f32[512, heads_q] grad\n  mask = kv_idx <= q_pos\n"
        f"  epilogue = {level[0]}\n}}\n"
    )


#: Why.
TOO_LARGE = "the derivatives of the epilogue have more than 100000 nodes, or are nested too deeply"
