"""Rows of the code table: E05 toolchain, cache and environment; E06 arguments of a call."""

from __future__ import annotations

from attngen.diag.row import Code

ENVIRONMENT: tuple[Code, ...] = (
    Code(
        "E0501",
        "bad-setting",
        "an environment variable holds a value that it does not take",
        "The ATTNGEN_ variables are read once, at first use. `attngen doctor` lists them.\n"
        "\n"
        "ATTNGEN_LOG=loud attngen compile causal.attn      # ATTNGEN_LOG is `loud`, which is no log level\n"
        "\n"
        "Set one of the values that the message lists, or unset the variable.",
    ),
    Code(
        "E0502",
        "unknown-option",
        "build or compile was given an option that does not exist",
        "Options are the fields of `attngen.options.Options`: head_dim, dtype, tile, stages, and so on.\n"
        "\n"
        '    attngen.build("causal.attn", tiles="128x128")     # did you mean `tile`?\n'
        "\n"
        "Params and tensors of the spec are arguments of the call (`attn(q, k, v, window=512)`), not of "
        "build.",
    ),
    Code(
        "E0503",
        "bad-option-value",
        "an option's value has the wrong type or is out of range",
        "Every option has a type and a range.\n"
        "\n"
        '    attngen.build("causal.attn", stages=0)            # must be at least 1\n'
        "\n"
        "The message gives the reason; `auto` leaves the choice to the planner where it stands.",
    ),
    Code(
        "E0504",
        "no-such-spec",
        "the spec cannot be found",
        "A string without a newline or a brace is a path; anything else is the text of a spec.\n"
        "\n"
        '    attngen.build("exmaples/causal.attn")             # there is no file\n'
        "\n"
        "Correct the path, or pass the text itself.",
    ),
    Code(
        "E0505",
        "no-plan",
        "an Attention that was made from a kernel file was asked for its plan",
        "A kernel file carries the outcome of planning, not the plan. Build the spec to see the plan and its "
        "rejected candidates.",
    ),
    Code(
        "E0510",
        "no-dsl",
        "the CuTe DSL is missing or broken",
        "attngen emits source; NVIDIA's nvidia-cutlass-dsl, installed on this machine, compiles it. Without "
        "it `compile`, `check`, `explain` and CPU tensors work, a kernel cannot be built.\n"
        "\n"
        "    pip install 'nvidia-cutlass-dsl[cu13]'",
    ),
    Code(
        "E0511",
        "no-ffi",
        "apache-tvm-ffi is missing or broken",
        "Compiled kernels are called through TVM-FFI, a small library that also loads them.\n"
        "\n"
        "    pip install apache-tvm-ffi",
    ),
    Code(
        "E0512",
        "dsl-refused",
        "the CuTe DSL rejected a generated kernel",
        "For an unedited file this is a fault of attngen: please report it with `attngen doctor`'s output "
        "and the kernel file, whose path the message gives. For an edited kernel the note is the DSL's own "
        "message about the edit.",
    ),
    Code(
        "E0513",
        "compiler-died",
        "the process that compiles a kernel ended or hung",
        "The DSL's compiler runs in a process of its own, so that its end is not yours. Out of memory is the "
        "common cause: a plan takes up to 2 GB while it compiles. Try again with memory free.",
    ),
    Code(
        "E0514",
        "load-failed",
        "a compiled kernel cannot be loaded",
        "The library in the cache was built, checked against its hash, and yet does not load: often the "
        "DSL's runtime library was removed or replaced. `attngen doctor` shows where it is looked for.",
    ),
    Code(
        "E0516",
        "other-gpu",
        "the tensors are on a GPU that does not run the kernel's code",
        "Code for an `a` target such as sm_90a runs on exactly that compute capability, neither on older nor "
        "on newer GPUs. Build for the GPU's own target if attngen has it (the README lists them), or move "
        "the tensors.",
    ),
    Code(
        "E0520",
        "no-storage",
        "neither the cache nor a temporary folder can be written",
        "A compiled kernel is a file that is loaded. When the cache folder cannot be written a temporary "
        "folder takes its place, with a warning; this error means that it could not be written either. A few "
        "megabytes in TMPDIR or ATTNGEN_CACHE_DIR are enough.",
    ),
    Code(
        "E0530",
        "edited-kernel",
        "a generated file that was edited would be overwritten",
        "A generated file states the hash of its body. This one's body has another: somebody tuned it by "
        "hand. Write to another file, or pass `--force` (`force=True`) to lose the edits.",
    ),
    Code(
        "E0531",
        "not-a-kernel",
        "a file that attngen did not generate would be overwritten",
        "The file has no ATTN_META table. Write to another file, or pass `--force` (`force=True`).",
    ),
    Code(
        "E0532",
        "cannot-write",
        "the kernel file cannot be written",
        "The system's reason is in the message. The folder must exist.",
    ),
)

CALL: tuple[Code, ...] = (
    Code(
        "E0601",
        "unknown-argument",
        "a call names a param or tensor that the spec does not declare",
        "    attn(q, k, v, windw=512)      # did you mean `window`?\n"
        "\n"
        "The spec's params and tensors are the keywords of a call.",
    ),
    Code(
        "E0602",
        "missing-argument",
        "a call leaves out a tensor, or a param without a default",
        "Every captured tensor, and every param declared without a default, is passed by name: attn(q, k, v, "
        "sinks=sinks).",
    ),
    Code(
        "E0603",
        "bad-param",
        "a param has the wrong type or is out of range",
        "A param is one Python number (a NumPy scalar or a CPU tensor without axes will do) of the declared "
        "type within the declared bounds; an int fits 32 bits. An int is accepted where a float is declared, "
        "nothing else is converted.",
    ),
    Code(
        "E0604",
        "not-a-tensor",
        "an argument that must be a torch tensor is something else",
        "q, k, v and captured tensors are torch tensors. Convert other arrays with torch.as_tensor.",
    ),
    Code(
        "E0605",
        "wrong-device",
        "tensors of a call are on different devices, or on one that attngen does not run on",
        "One launch reads all its tensors from one GPU. CUDA tensors run the kernel, CPU tensors the reference.",
    ),
    Code(
        "E0606",
        "wrong-dtype",
        "a tensor's dtype is not the one the spec takes",
        "q, k and v are all bfloat16 or all float16, whichever of the two the spec names: the other one gets "
        "a kernel of its own at its first call. torch.autocast converts them. Captured tensors have exactly "
        "their declared dtype.",
    ),
    Code(
        "E0607",
        "wrong-shape",
        "a tensor's rank or an extent does not fit the call",
        "Axes are read in the spec's layout: bshd is (batch, seqlen, heads, head_dim), bhsd is (batch, "
        "heads, seqlen, head_dim). Swapped axes are the common cause. A captured tensor may have extent 1 "
        "where an axis is declared: it is broadcast.",
    ),
    Code(
        "E0608",
        "head-counts",
        "the query heads do not divide into the KV heads",
        "Query head h reads KV head h // (heads_q / heads_kv), so heads_q is a multiple of heads_kv: 32 and "
        "8, 71 and 1.",
    ),
    Code(
        "E0609",
        "strides",
        "a tensor's strides cannot be loaded by TMA",
        "The head dimension is contiguous and every other stride is a multiple of 16 bytes (8 elements of "
        "bf16); zero is one, so expanded tensors are fine. attngen never copies q, k or v silently: pass "
        ".contiguous(), or allocate rows padded to a multiple of 8.",
    ),
    Code(
        "E0610",
        "alignment",
        "a tensor does not start at a multiple of 16 bytes",
        "Slicing in the middle of a 16-byte unit moves the base: x.flatten()[1:]. Slice at multiples of 8 "
        "elements or .clone().",
    ),
    Code(
        "E0611",
        "gradient-not-declared",
        "a captured tensor requires a gradient that the spec does not declare",
        "    tensor bias: f32[heads_q] grad\n"
        "\n"
        "A captured tensor that requires a gradient is declared `grad` in the spec, or passed as bias.detach(): its "
        "gradient would be lost otherwise.",
    ),
    Code(
        "E0612",
        "func-transform",
        "a call inside torch.func.vmap, grad or the like, or of forward-mode differentiation",
        "The kernel works on plain tensors. Attention has a batch axis: fold the mapped axis into it. Gradients come "
        "from torch.autograd in reverse mode, without is_grads_batched.",
    ),
    Code(
        "E0613",
        "nan-input",
        "check=True found NaN in an input",
        "A NaN in q spoils one row of the output, one in k or v all rows that see the key.",
    ),
    Code(
        "E0614",
        "not-sorted",
        "check=True found that a `sorted` tensor decreases",
        "`sorted` lets the compiler skip tiles by the first and last value. Where the promise is broken, "
        "keys are lost silently.",
    ),
    Code(
        "E0616",
        "bad-output",
        "`out` or `lse` does not fit the result",
        "out has q's shape with v's head dimension and the spec's output dtype, lse is float32 (batch, "
        "heads_q, seqlen_q); both are on q's device and not expanded. out has memory of its own: written over q, "
        "k or v it would change what other rows still read.",
    ),
    Code(
        "E0617",
        "unknown-handle",
        "a torch operator names an attention that this process has not built",
        "Compiled graphs name an attention by the hash of its spec and source. Build it before running the graph.",
    ),
    Code(
        "E0618",
        "launch-refused",
        "a launch failed for a reason that no check explains",
        "The note is the launcher's own message. A CUDA error may belong to an earlier kernel: "
        "CUDA_LAUNCH_BLOCKING=1 tells.",
    ),
)

GRADIENTS: tuple[Code, ...] = (
    Code(
        "E0619",
        "out-with-gradients",
        "a call with `out` or `lse` needs gradients",
        "As with torch's own out= functions, results that are written into given tensors are not attached to the "
        "graph. Leave `out` and `lse` out, or call under torch.no_grad().",
    ),
    Code(
        "E0620",
        "double-backward",
        "a gradient of attention was differentiated again",
        "Gradients are computed by a kernel that has no derivative of its own. create_graph=True is harmless as long "
        "as nothing differentiates what comes out of attention; for a gradient penalty or a Hessian evaluate "
        "attention in plain torch operations.",
    ),
    Code(
        "E0621",
        "backward-in-capture",
        "a CUDA graph is being captured and the backward is not compiled",
        "The backward of a set of gradients is compiled when it is first needed, which is no work of a stream. Run "
        "forward and backward once before the capture, as torch.cuda.graph asks anyway, or call "
        "attn.compile(backward=True).",
    ),
    Code(
        "E0622",
        "not-deterministic",
        "torch.use_deterministic_algorithms is on and the backward adds in any order",
        "dQ and some gradients of captured tensors are reduced by atomic additions, whose order differs from run to "
        "run and with it the last bits. `backward { deterministic = true }` in the spec orders them. Gradients of k "
        "and v alone are deterministic in any case.",
    ),
)
RAGGED: tuple[Code, ...] = (
    Code(
        "E0623",
        "lengths",
        "check=True found lengths of sequences that cannot be",
        "cu_seqlens begin at 0, never decrease, and end within the packed rows or keys; seqused is from 0 to the "
        "padded length. Without check=True a kernel holds them within the tensors and reads nothing else, but what it "
        "computes then is of no use.",
    ),
)
LISTS: tuple[Code, ...] = (
    Code(
        "E0626",
        "bad-block-lists",
        "lists of blocks have a count or a number out of range, out of order, or twice",
        "block_map(counts, indices, blocks_kv, check=True) looks at every list: `counts` at most the length of a list, "
        "numbers in 0..blocks_kv - 1, rising. Without `check` what is outside is dropped and what stands twice counts "
        "once: no kernel ever reads a list.",
    ),
)
SELECTED: tuple[Code, ...] = (
    Code(
        "E0628",
        "bad-key-list",
        "check=True found a number in a list of keys that is outside, or stands twice",
        "`block_sparse` of single keys, or for single rows, takes `blocks`: lists of the blocks of keys that each "
        "block of rows sees, filled up with -1. Without `check` a number outside the keys counts as none and one "
        "that stands twice as one; no memory outside of k and v is read.",
    ),
)
RUN: tuple[Code, ...] = (*ENVIRONMENT, *CALL, *GRADIENTS, *RAGGED, *LISTS, *SELECTED)
