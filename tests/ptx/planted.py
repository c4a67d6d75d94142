"""The faults that are planted: in forwards and backwards of the gallery, and in products on sm_100a.

Barriers of a forward, by their place behind the first: q_full 0 8, q_empty 16 24, K full 32 40, empty 48 56, V full 64
72, empty 80 88, mailbox full 96, empty 104 (tile 128 x 128). Arrivals and waits are counted in the order of the code:
of a backward the load warp, the reducers one after the other, the zeroer, the consumers.
"""

from __future__ import annotations

from inject import NUMBERS, Edit, Planted, always, drop, early, flip, skip_wait, sub, twice, unguard

F, G, W = "causal 128x128", "causal 192x80", "window and sink"
B, D, Z = "backward", "deterministic backward", "zeros ahead"
ONE, TWO = "product", "pair's product"
MAIN, PREPARE, FINISH = r"_1\($", "prepare", "finish"

Q_FULL, K_FULL, K_EMPTY, V_FULL, TOLD_FULL, TOLD_EMPTY = 0, 32, 48, 64, 96, 104
Q_FREE, K_FREE, V_FREE = (rf"mbarrier\.arrive\.shared\.b64 .*\+{n}\]" for n in (16, 48, 80))
STORE = r"bar\.sync\s+%r\d+, 128"
EXPECT = r"mbarrier\.arrive\.expect_tx"
LOAD = r"cp\.async\.bulk\.tensor.*global\.tile\.mbarrier"
# of a backward: waits, and arrivals of one lane of a warp, by their place among all
ANY = ""
V_FREED, K_FREED, DV_STAGED = 3, 4, 12
DS_FREED, DS_THERE, SLOT_FREED, TOLD = 30, 31, 35, 37
ONE_LANE = r"@%p\d+ mbarrier\.arrive"
IN_FRONT = -6  # of the warps' meetings: where dS of a step is there, in the loop
TOLD_READ, DS_WRITTEN, V_READ, K_READ = 10, 11, 19, 22
FENCE, COMMIT, WAIT = r"wgmma\.fence", r"wgmma\.commit_group", r"wgmma\.wait_group"


def fault(
    name: str, kernel: str, about: str, does: str, kinds: str, *edits: Edit, host: tuple[Edit, ...] = ()
) -> Planted:
    return Planted(name, kernel, about, does, tuple(kinds.split(", ")), edits, host)


# fmt: off
PLANTED = (
    # --- deadlock
    fault("k-not-released", F, "deadlock", "drops the consumers' release of K", "deadlock", drop(K_FREE, 1)),
    fault("v-not-released", G, "deadlock", "drops the release of the last V of a row tile", "deadlock",
          drop(r"mbarrier\.arrive\.shared\.b64", -2)),
    fault("q-not-released", F, "deadlock", "never gives Q's slice back", "deadlock", drop(Q_FREE)),
    fault("k-not-announced", F, "deadlock", "drops arrive.expect_tx of K", "deadlock, barrier-transaction",
          drop(EXPECT, 0)),
    fault("k-half-loaded", F, "deadlock", "drops the second half of a K tile's copy", "deadlock", drop(LOAD, 1)),
    fault("empty-count-9", F, "deadlock", "K's empty barrier counts 9 consumer warps of 8", "deadlock",
          sub(r"\[%r1\+48\], %r\d+", "[%r1+48], 9")),
    fault("full-count-2", F, "deadlock", "V's full barrier counts two producers", "deadlock",
          sub(r"(init.*\[%r1\+64\]), %r\d+", r"\1, 2")),
    fault("first-turn-missing", F, "deadlock", "nobody gives warpgroup 0 its first turn", "deadlock",
          drop(r"bar\.arrive 1, 256")),
    fault("turn-not-passed-on", F, "deadlock", "a warpgroup keeps its turn after its GEMMs", "deadlock",
          drop(r"bar\.arrive %r\d+, 256", 1)),
    fault("mailbox-not-rung", F, "deadlock", "the next tile's number is written, and never signalled", "deadlock",
          drop(r"mbarrier\.arrive\.shared\.b64 .*\+96\]")),
    fault("ds-not-signalled", B, "deadlock", "one warpgroup never says that its dS is there", "deadlock",
          drop(ONE_LANE, DS_WRITTEN, MAIN)),
    fault("k-tile-not-given-back", B, "deadlock", "a consumer never says that it has read a KV tile's K", "deadlock",
          drop(ONE_LANE, K_READ, MAIN)),
    fault("walk-not-given-back", B, "deadlock", "consumers never say that they know their KV tile",
          "deadlock, barrier-unfinished",
          drop(ONE_LANE, TOLD_READ, MAIN)),
    fault("dq-not-given-back", B, "deadlock", "the warp that adds up dQ never frees its buffer", "deadlock",
          drop(r"mbarrier\.arrive\.shared\.b64 %rd\d+, \[%r\d+\], ", 0, MAIN)),
    fault("turn-never-counted", D, "deadlock", "dQ's turn counter is not increased", "livelock, deadlock",
          drop(r"atom\.global\.release\.add", 1)),

    fault("zeros-never-counted", Z, "deadlock", "dQ is zeroed, and nobody told", "livelock, deadlock",
          drop(r"atom\.global\.release\.add", 0, MAIN)),
    fault("zeros-not-awaited", Z, "missing wait", "a reducer adds to dQ that may not be zero", "race, wrong numbers",
          always(r"ld\.acquire\.gpu", 0, MAIN), sub(r"ld\.acquire\.gpu", "ld.relaxed.gpu", 0, MAIN)),
    fault("zeros-not-released", Z, "memory order", "dQ's zeros are counted without a release", "race, wrong numbers",
          sub(r"atom\.global\.release\.add", "atom.global.add", 0, MAIN)),

    # --- counts, parities
    fault("expect-too-few", F, "transaction count", "announces half of V's bytes", "barrier-transaction",
          sub(f"({EXPECT}.*), %r\\d+;", r"\1, 16384;", -1)),
    fault("expect-too-many", F, "transaction count", "announces 16 bytes of K too many", "deadlock",
          sub(f"({EXPECT}.*), %r\\d+;", r"\1, 32784;", 0)),
    fault("stats-too-short", B, "transaction count", "copies 304 of 320 announced bytes of row statistics",
          "deadlock", sub(r"(cp\.async\.bulk\.shared::cluster.*), 320, ", r"\1, 304, ", 0, MAIN)),
    fault("stats-too-long", B, "transaction count", "copies 336 bytes of row statistics where 320 are announced",
          "barrier-transaction, race, missing-grid-dependency",
          sub(r"(cp\.async\.bulk\.shared::cluster.*), 320, ", r"\1, 336, ", 0, MAIN)),
    fault("released-twice", F, "over-arrival", "each warp releases K twice", "barrier-over-arrival, race, deadlock",
          twice(K_FREE, 3)),
    fault("released-by-32", F, "over-arrival", "all 32 lanes release V", "barrier-over-arrival, race",
          unguard(V_FREE, 1)),
    fault("empty-count-7", F, "over-arrival", "K's empty barrier counts 7 consumer warps of 8",
          "race, barrier-unfinished, barrier-over-arrival", sub(r"\[%r1\+48\], %r\d+", "[%r1+48], 7")),
    fault("full-parity", F, "wrong parity", "waits for the phase before: K is read too early",
          "race, uninitialised-read, deadlock", flip(K_FULL, 1)),
    fault("empty-parity", F, "wrong parity", "the producer waits for a round that nobody has begun", "deadlock",
          flip(K_EMPTY)),
    fault("threads-128", F, "named barrier", "a turn's barrier counts 128 threads for one side, 256 for the other",
          "barrier-misuse, deadlock", sub(r"bar\.sync(\s+%r\d+), 256", r"bar.sync\1, 128", 1)),

    # --- races
    fault("k-not-waited-for", F, "race", "the first tile's GEMM does not wait for K", "race, uninitialised-read",
          skip_wait(K_FULL, 1)),
    fault("v-not-waited-for", F, "race", "the second GEMM does not wait for V", "race, uninitialised-read",
          skip_wait(V_FULL, 1)),
    fault("k-stage-not-free", F, "overwritten while read",
          "the producer loads K without waiting until its stage is free", "race, barrier-over-arrival",
          skip_wait(K_EMPTY, 1)),
    fault("k-released-early", F, "overwritten while read", "K is released while the GEMM that reads it runs", "race",
          early(K_FREE, COMMIT, 1, 0)),
    fault("v-released-early", F, "overwritten while read", "the last V is released before its GEMM is waited for",
          "race", early(V_FREE, r"wgmma\.wait_group\.sync\.aligned\s+0", -1, -1)),
    fault("q-released-early", F, "overwritten while read", "Q is given back before the first GEMM", "race",
          early(Q_FREE, r"wgmma\.commit_group", 0, 0)),
    fault("o-written-early", F, "overwritten while read", "O's slice is written while the last tile's store reads it",
          "race", drop(r"cp\.async\.bulk\.wait_group\.read", 0)),
    fault("o-no-barrier-before-write", F, "race", "no barrier between the store's wait and the writes of O", "race",
          drop(STORE, 0)),
    fault("o-no-barrier-before-store", F, "missing barrier before a TMA store",
          "no barrier between the writes of O and its store", "race", drop(STORE, 1)),
    fault("o-no-proxy-fence", F, "missing proxy fence", "no fence between the writes of O and its store",
          "missing-proxy-fence", drop(r"fence\.proxy\.async")),
    fault("mailbox-not-waited-for", F, "race, generic", "reads the next tile's number before it is signalled",
          "race, uninitialised-read", skip_wait(TOLD_FULL)),
    fault("mailbox-not-free", F, "race, generic",
          "writes the next tile's number while some warp has yet to read the last", "race, deadlock",
          skip_wait(TOLD_EMPTY)),
    fault("mailbox-read-by-one-lane", F, "race, lanes",
          "lane 0 says that its warp has read the next tile's number, and has not met the others", "race",
          drop(r"bar\.warp\.sync", -1)),
    fault("ds-of-one-lane", B, "race, lanes", "lane 0 says that its warp's dS is there, and has not met the others",
          "race", drop(r"bar\.warp\.sync", IN_FRONT, MAIN)),
    fault("ds-no-proxy-fence", B, "missing proxy fence", "dS is written and read by a GEMM without a fence",
          "missing-proxy-fence", drop(r"fence\.proxy\.async\.shared", 1, MAIN)),
    fault("dq-no-proxy-fence", B, "missing proxy fence", "dQ is written and added up by a bulk copy without a fence",
          "missing-proxy-fence", drop(r"fence\.proxy\.async\.shared", 2, MAIN)),
    fault("dkv-no-proxy-fence", B, "missing proxy fence", "dK and dV are written and stored without a fence",
          "missing-proxy-fence", drop(r"fence\.proxy\.async\.shared", -1, MAIN)),
    fault("dv-not-staged", B, "missing barrier before a TMA store", "dV is stored while warps still write it",
          "race, uninitialised-read", skip_wait(ANY, DV_STAGED, MAIN)),
    fault("slot-not-free", B, "overwritten while read", "dV is staged where dQ is still added up from", "race",
          skip_wait(ANY, SLOT_FREED, MAIN)),
    fault("slot-of-k", B, "wrong address", "dK is stored from the bytes of K", f"race, {NUMBERS}",
          sub(r"(tensor\.4d\.global\.shared::cta.*\}\], )\[%r\d+\], ", r"\1[%r1+2048], ", 2, MAIN)),
    fault("k-tile-not-free", B, "overwritten while read", "the next KV tile's K lands while this one's is read",
          "race, barrier-over-arrival", skip_wait(ANY, K_FREED, MAIN)),
    fault("v-tile-not-free", B, "overwritten while read", "the next KV tile's V lands while this one's is read",
          "race, barrier-over-arrival", skip_wait(ANY, V_FREED, MAIN)),
    fault("v-given-back-early", B, "overwritten while read", "V is given back before a KV tile's steps", "race",
          early(ONE_LANE, r"wgmma\.fence", V_READ, 0, MAIN, at="%r1+24")),
    fault("walk-not-waited-for", B, "race, generic", "consumers read the next KV tile before it is told",
          "race, uninitialised-read", skip_wait(ANY, TOLD, MAIN)),
    fault("ds-not-waited-for", B, "race", "the GEMM of dQ does not wait for the other warpgroup's dS",
          "race, uninitialised-read", skip_wait(ANY, DS_THERE, MAIN)),
    fault("ds-not-free", B, "overwritten while read", "dS is overwritten while the GEMM of dQ reads it", "race",
          skip_wait(ANY, DS_FREED, MAIN)),
    fault("dq-given-back-early", B, "overwritten while read",
          "dQ's buffer is given back while the bulk reduction reads it", "race",
          drop(r"cp\.async\.bulk\.wait_group\.read", 0, MAIN)),
    fault("turn-not-waited-for", D, "race", "adds to dQ without waiting for its turn", NUMBERS,
          always(r"ld\.acquire", 0), always(r"ld\.acquire", 2)),
    fault("k-into-v", F, "race", "a copy of K lands in V's stage", "race, uninitialised-read",
          sub(r"\[(%r\d+)\+66560\]", r"[\1+132096]")),

    # --- wgmma, registers
    fault("wgmma-no-fence", F, "wgmma", "no wgmma.fence before the GEMMs of a step", "wgmma-order", drop(FENCE, 1)),
    fault("wgmma-no-commit", F, "wgmma", "the last GEMM is not committed", "register-in-flight, wgmma-order",
          drop(COMMIT, -1)),
    fault("wgmma-no-wait", F, "register of a wgmma in flight", "S is read without waiting for its GEMM",
          "register-in-flight", drop(WAIT, 0)),
    fault("wgmma-waits-too-little", F, "register of a wgmma in flight",
          "waits for all groups but two: S is still being computed", "register-in-flight",
          sub(r"(wait_group\.sync\.aligned\s+)1", r"\g<1>2", 0)),
    fault("p-overwritten", F, "register of a wgmma in flight",
          "P is packed while the GEMM before still reads its registers", "register-in-flight",
          sub(r"(wait_group\.sync\.aligned\s+)0", r"\g<1>1", 1)),
    fault("dv-not-waited-for", B, "register of a wgmma in flight", "the backward's last GEMM is not waited for",
          "register-in-flight, wgmma-order", drop(WAIT, -1, MAIN)),
    fault("accumulates-nothing", F, "uninitialised register", "the first GEMM adds to registers that hold nothing",
          "uninitialised-register", sub(r"setp\.ne(\.b32 p, %r\d+, 0;)", r"setp.eq\1")),
    fault("sum-not-started", F, "uninitialised register", "a register is used before it is set",
          "uninitialised-register", drop(r"mul\.f32\s+%r\d+, %r\d+, 0f3FB8AA3B")),

    # --- shared memory, bounds, addresses
    fault("mailbox-empty", F, "uninitialised shared memory", "the next tile's number is never written",
          "uninitialised-read", drop(r"st\.shared\.b32")),
    fault("lse-past-the-end", F, "out of bounds", "LSE is written for rows past seqlen_q", "out-of-bounds",
          sub(r"or\.pred(\s+%p\d+), (%p\d+), %p\d+;", r"or.pred\1, \2, \2;", -1)),
    fault("prepare-past-the-end", B, "out of bounds", "O and dO are read for rows past seqlen_q", "out-of-bounds",
          sub(r"min\.s32(\s+%r\d+), %r\d+, (\d+);", r"mov.b32\1, \2;", 0, PREPARE)),
    fault("counter-index", F, "out of bounds", "the tile counter is reset one element too far", "out-of-bounds",
          sub(r"(st\.global\.b32\s+\[%rd\d+)\], 0", r"\1+4], 0")),
    fault("finish-past-the-end", B, "out of bounds", "dQ is written for rows past seqlen_q", "out-of-bounds",
          drop(r"@%p\d+ bra", -1, FINISH)),
    fault("stats-misaligned", B, "misaligned", "a bulk copy lands 4 bytes off", "misaligned",
          sub(r"(cp\.async\.bulk\.shared::cluster\.global.*) \[(%r\d+)\]", r"\1 [\2+4]", 0, MAIN)),
    fault("shared-over-budget", F, "over budget", "asks for 240 KB of shared memory", "shared-over-budget",
          host=(sub("197632", "245760", None),)),
    fault("registers-over-budget", F, "over budget", "consumers ask for 248 registers",
          "register-over-budget, deadlock", sub(r"(setmaxnreg\.inc.*)240", r"\g<1>248")),
    fault("registers-not-given-back", F, "over budget", "the producer's warpgroup keeps its registers",
          "register-over-budget, deadlock", drop(r"setmaxnreg\.dec")),

    # --- start and end
    fault("init-not-fenced", F, "init", "no fence after the barriers' initialisation", "barrier-unsynchronised",
          drop(r"fence\.mbarrier_init")),
    fault("init-no-barrier", F, "init", "warps use barriers that another may not have initialised",
          "barrier-unsynchronised, barrier-uninitialised", drop(r"bar\.sync\s+0")),
    fault("not-initialised", F, "init", "one barrier is never initialised", "barrier-uninitialised",
          drop(r"init.*\[%r\d+\], ", 1)),
    fault("o-not-waited-for", F, "unwaited at exit", "the CTA ends while its last store reads shared memory",
          "async-in-flight", drop(r"cp\.async\.bulk\.wait_group\.read", -1)),
    fault("o-not-committed", F, "unwaited at exit", "the store of O belongs to no group, and no wait covers it",
          "async-in-flight, race", drop(r"cp\.async\.bulk\.commit_group")),
    fault("dkv-not-waited-for", B, "unwaited at exit",
          "the CTA ends while the store of dK reads shared memory", "async-in-flight, race",
          drop(r"cp\.async\.bulk\.wait_group\.read", -1, MAIN), drop(r"cp\.async\.bulk\.wait_group\s", -1, MAIN)),
    fault("q-loaded-for-nobody", F, "unreleased at exit", "the producer loads a Q that nobody waits for",
          "unwaited-data, barrier-unfinished, deadlock, race, uninitialised-read", skip_wait(Q_FULL)),
    fault("main-not-after-prepare", B, "missing griddepcontrol.wait",
          "the main kernel reads what the launch before may still write", "missing-grid-dependency",
          drop(r"griddepcontrol\.wait", 0, MAIN)),
    fault("finish-not-after-main", B, "missing griddepcontrol.wait",
          "dQ is read while the main kernel may still add to it", "missing-grid-dependency",
          drop(r"griddepcontrol\.wait", 0, FINISH)),

    # --- numbers
    fault("tile-skipped", B, "wrong state", "every other KV tile is handed out to nobody", NUMBERS,
          sub(r"(atom\.global\.add\.u32.*), 1;", r"\1, 2;", 0, MAIN)),
    fault("finish-wrong-lane", B, "wrong lane", "finish: a row's last exchange is with the wrong lane", NUMBERS,
          sub(r"(shfl\.sync\.bfly\.b32\s.*), 2, ", r"\1, 1, ", 0, FINISH)),
    fault("swizzle-64", F, "wrong descriptor", "K's descriptor names the 64-byte swizzle", NUMBERS,
          sub(r"(mov\.b32\s+%r\d+), 1073741888", r"\1, -2147483584")),
    fault("stride-half", F, "wrong descriptor", "K's rows of eight lie 512 bytes apart", NUMBERS,
          sub(r"(mov\.b32\s+%r\d+), 1073741888", r"\1, 1073741856")),
    fault("k-coordinate", F, "wrong coordinate", "the second half of K is loaded from its first", NUMBERS,
          sub(r"(tile\.mbarrier.*\+82944\], \[%rd\d+, \{)%r\d+,", r"\1 0,")),
    fault("window-edge", W, "wrong mask", "one column of the window's near edge is kept too long", NUMBERS,
          sub(r"(shl\.b32 %r\d+, )0xffffffff", r"\g<1>0xfffffffe", None)),
    fault("counter-not-reset", F, "wrong state", "the tile counter is not set back to zero", NUMBERS,
          drop(r"st\.global\.b32\s+\[%rd\d+\], 0")),

    # --- sm_100a: one CTA, and pairs
    fault("tmem-not-freed", ONE, "TMEM not freed", "the allocation is kept at exit", "tmem-allocation",
          drop(r"tcgen05\.dealloc")),
    fault("tmem-too-small", ONE, "TMEM", "allocates 32 columns of 64 that the accumulator takes", "tmem-allocation",
          sub(r"mov\.b32(\s+%r\d+), 256;", r"mov.b32\1, 32;", None)),
    fault("tmem-load-not-waited-for", ONE, "register in flight", "values are used before tcgen05.wait::ld",
          "register-in-flight", drop(r"tcgen05\.wait::ld")),
    fault("tmem-accumulates-nothing", ONE, "uninitialised TMEM",
          "the first MMA adds to tensor memory that holds nothing", "uninitialised-tmem",
          sub(r"mov\.pred(\s+%p\d+), 0", r"mov.pred\1, -1")),
    fault("tmem-read-early", ONE, "race, TMEM", "the accumulator is read without waiting for the MMA",
          "tmem-race, uninitialised-tmem", skip_wait(".*", -1)),
    fault("mma-not-committed", ONE, "deadlock", "nobody is told that the accumulator is there", "deadlock",
          drop(r"tcgen05\.commit", -1)),
    fault("mma-before-its-operands", ONE, "race", "the MMA does not wait for its operands",
          "race, uninitialised-read", skip_wait(".*", 1)),
    fault("mma-shape", ONE, "wrong descriptor", "the instruction descriptor says N = 32",
          f"{NUMBERS}, uninitialised-tmem", sub("135275664, 135267472", "134751376, 134743184")),
    fault("pair-no-cluster-barrier", TWO, "missing cluster barrier",
          "the CTAs of a cluster do not meet after they have initialised their barriers",
          "barrier-unsynchronised, barrier-uninitialised, exited-peer", drop(r"barrier\.cluster\.arrive"),
          drop(r"barrier\.cluster\.wait")),
    fault("pair-no-handshake", TWO, "exited peer", "a CTA frees tensor memory and ends without waiting for its peer",
          "exited-peer, tmem-allocation, tmem-race, barrier-unfinished", skip_wait(".*", -1)),
    fault("pair-not-released", TWO, "deadlock", "the peer is not told that tensor memory may be freed", "deadlock",
          drop(r"mbarrier\.arrive\.shared::cluster", -1)),
    fault("pair-half-announced", TWO, "transaction count", "the leader announces its own bytes and not its peer's",
          "barrier-transaction, deadlock", sub("49152", "24576")),
    fault("pair-multicast", TWO, "deadlock", "the MMA's end is signalled to one CTA of the pair", "deadlock",
          sub(r"mov\.b16(\s+%rs\d+), 3;", r"mov.b16\1, 1;")),
    fault("pair-wrong-peer", TWO, "DSMEM", "arrives on its own barrier in place of its peer's",
          "deadlock, exited-peer", sub(r"xor\.b32(\s+%r\d+, %r5), 1", r"xor.b32\1, 0")),
    fault("pair-init-not-fenced", TWO, "init", "no fence after the initialisation of barriers that peers use",
          "barrier-unsynchronised", drop(r"fence\.mbarrier_init", None)),
)
# fmt: on
