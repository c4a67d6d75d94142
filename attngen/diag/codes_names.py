"""Rows of the code table: E02, names, shapes and dtypes."""

from __future__ import annotations

from attngen.diag.row import Code

NAMES: tuple[Code, ...] = (
    Code(
        "E0201",
        "unknown-name",
        "an expression reads a name that nothing declares",
        """    mask = kv_idx <= qpos            # did you mean `q_pos`?

An expression sees the index atoms (b h h_kv q_idx kv_idx q_pos d) and sizes (batch heads_q heads_kv seqlen_q
seqlen_kv head_dim head_dim_v), what its attention declares with param, tensor and let, and defs. A def sees only its
arguments, the atoms and other defs, so what it needs of an attention is passed to it:

    def window(keys: int >= 1) = q_pos - kv_idx < keys""",
    ),
    Code(
        "E0202",
        "unknown-function",
        "an expression calls something that is no function and no def",
        """    score = softcap(s, 50.0)         # needs: include "std.attn"

The functions of the language are listed in grammar/README.md; everything else is a def of this file or of an included
one. A tensor is indexed with brackets, `bias[b, h]`, not called.""",
    ),
    Code(
        "E0203",
        "declared-twice",
        "one name is declared a second time in the same place",
        """    param  window: int = 128
    tensor window: i32[batch]        # rename one of them

A block that extends another may declare a name of its base again: it replaces it.""",
    ),
    Code(
        "E0204",
        "reserved-name",
        "a name is kept for the language, for Python, or for generated kernels",
        """Names of params and tensors become arguments of the kernel and of the Python callable, so they may not be
Python keywords or builtins, words of the language, or names that those two use themselves (q, k, v, lse, out, torch,
cute, …).

    param scale: float               # scale is an argument of every call; choose another name
    param logit_scale: float""",
    ),
    Code(
        "E0205",
        "unknown-value",
        "a clause or entry is given a word that it does not take",
        """    dtype = float16                  # did you mean `fp16`?

dtype: bf16 fp16 f32. layout: bshd bhsd packed_qkv varlen padded paged. normalizer: softmax sigmoid relu. target:
names such as sm_90a. order: lpt linear.""",
    ),
    Code(
        "E0206",
        "given-twice",
        "a clause or an entry stands twice in one block",
        """    mask = kv_idx <= q_pos
    mask = q_pos - kv_idx < 128      # join the conditions: kv_idx <= q_pos and q_pos - kv_idx < 128""",
    ),
    Code(
        "E0207",
        "unknown-entry",
        "a block has no such entry",
        """    schedule { stage = 2 }           # did you mean `stages`?

schedule: tile tile_m tile_n stages order persistent cluster split_kv pack_gqa sm_margin pingpong. output: dtype
max_logit. block_sparse: q kv lists. backward: deterministic. A branch takes score, mask, sink and weight; a segment
score and mask.""",
    ),
    Code(
        "E0208",
        "bad-entry",
        "an entry of a block has a value that it does not take",
        """    schedule { tile = 128 }          # a shape: tile = 128 x 128
    block_sparse { q = 128 }         # both sides are needed: q = 128, kv = 128""",
    ),
    Code(
        "E0209",
        "no-head-dim",
        "an attention does not say its head dim",
        """Head dims are compile-time: they choose the kernel.

    attention full { head_dim = 128 }            # K and V alike
    attention mla { head_dim = 192, v = 128 }    # V of its own""",
    ),
    Code(
        "E0210",
        "head-dim-range",
        "a head dim is not between 1 and 4096",
        """    head_dim = 0                     # the columns of one head, such as 64 or 128

Which head dims a GPU's kernels serve is another matter, decided at planning time (E04xx).""",
    ),
    Code(
        "E0211",
        "wrong-argument-count",
        "a function or def is given too many or too few arguments",
        """    mask = causal()                  # a def without arguments is a bare name: causal
    mask = window                    # window needs its argument: window(128)""",
    ),
    Code(
        "E0212",
        "wrong-index-count",
        "a tensor is read with more or fewer indices than it has axes",
        """    tensor bias: f32[heads_q, seqlen_q, seqlen_kv]
    score = s + bias[q_idx, kv_idx]  # three axes: bias[h, q_idx, kv_idx]

An axis that does not vary is still indexed; give the tensor with extent 1 there and it is broadcast.""",
    ),
    Code(
        "E0213",
        "index-not-int",
        "an index of a tensor is not an int",
        """    score = s + table[log(float(kv_idx + 1))]    # int(…) truncates: table[int(log(float(kv_idx + 1)))]""",
    ),
    Code(
        "E0214",
        "index-out-of-range",
        "a literal index lies outside of its axis",
        """    tensor table: f32[32]
    score = s + table[32]            # indices are 0 to 31; there is no counting from the end""",
    ),
    Code(
        "E0215",
        "tensor-or-number",
        "a tensor is used without an index, or a number with one",
        """    tensor sinks: f32[heads_q]
    sink = sinks                     # one element: sinks[h]""",
    ),
    Code(
        "E0216",
        "bad-tensor",
        "a tensor declaration cannot be",
        """Element types: f32 bf16 fp16 i32 bool. One to eight axes; an axis is one that q, k and v give (batch
heads_q heads_kv seqlen_q seqlen_kv head_dim head_dim_v), an extent of at least 1, or a free name. Only float tensors
take `grad`.

    tensor doc: int64[batch, seqlen_kv]          # write i32""",
    ),
    Code(
        "E0217",
        "bad-declaration",
        "a param declaration, or an argument of a def, cannot be",
        """    param window: int >= 1 = 0       # the default must keep the bounds
    param cap: f32 = 50.0            # types are bool, int and float""",
    ),
    Code(
        "E0218",
        "bad-extends",
        "an attention extends one that does not exist, or itself",
        """    attention local extends globl { … }          # did you mean `global_layer`?

The base stands in the same file, before or after, or in an included one.""",
    ),
    Code(
        "E0219",
        "include-not-found",
        "an include names no file that a spec may read",
        """An include reads the spec's own folder and folders below it, the folders given as include_dirs, and the
shipped library; nothing else, since a spec is untrusted text.

    include "../masks.attn"          # give its folder: load_spec(path, include_dirs=[…])
    include "std.attn"               # the shipped library, wherever the spec lies""",
    ),
    Code(
        "E0220",
        "include-circle",
        "files include each other",
        """    a.attn: include "b.attn"
    b.attn: include "a.attn"         # move what both need into a third file

Including one file by two ways is fine: it is read once.""",
    ),
    Code(
        "E0221",
        "recursive-definition",
        "a def or let is defined through itself",
        """Both are inlined, so they cannot recurse.

    def f(x) = f(x - 1)              # write the expression out""",
    ),
    Code(
        "E0222",
        "no-such-attention",
        "the file declares no attention, or none of the name asked for",
        """A file's last attention block is taken unless a name is given: load_spec("layers.attn", name="local").
Blocks of included files are there to extend, not to be chosen.""",
    ),
    Code(
        "E0223",
        "bad-override",
        "a clause given from outside the file does not exist or cannot take the value",
        """    load_spec("causal.attn", overrides={"headdim": 64})      # did you mean `head_dim`?

Known: head_dim head_dim_v dtype layout normalizer target out_dtype max_logit deterministic, and the entries of
schedule.""",
    ),
    Code(
        "W0201",
        "free-axis-name",
        "an axis of a tensor has a free name that looks like a known axis",
        """    tensor doc: i32[batch, seqlen_k]             # the known axis is seqlen_kv

A free name takes whatever extent the tensor has, so a misspelt axis would never be checked against q, k and v.""",
    ),
)
