"""A small CuTe-DSL kernel of sm_100a for the checker: the product of one tile by one or two CTAs."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import make_fake_compact_tensor

THREADS = 128


class Product:
    """D = A B^T of one tile by `group` CTAs: TMA, one accumulator in tensor memory, tensor memory loads of `load`."""

    def __init__(self, tile: Any, types: Any, mn_major: tuple[bool, bool], group: int, load: Any) -> None:
        self.tile, self.types, self.group, self.load = tile, types, group, load
        self.majors = tuple(OperandMajorMode.MN if x else OperandMajorMode.K for x in mn_major)

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor):
        m, n, _ = self.tile
        a_type, b_type, d_type = self.types
        pair = tcgen05.CtaGroup.TWO if self.group == 2 else tcgen05.CtaGroup.ONE
        mma = sm100.make_trivial_tiled_mma(a_type, b_type, *self.majors, d_type, pair, (m, n))
        lA = sm100.make_smem_layout_a(mma, self.tile, a_type, 1)
        lB = sm100.make_smem_layout_b(mma, self.tile, b_type, 1)
        cluster = cute.tiled_divide(cute.make_layout((self.group, 1, 1)), (mma.thr_id.shape,))
        op = cpasync.CopyBulkTensorTileG2SOp(pair)
        first = [0, 1, 2]
        aA, tA = cute.nvgpu.make_tiled_tma_atom_A(op, mA, cute.select(lA, mode=first), self.tile, mma, cluster.shape)
        aB, tB = cute.nvgpu.make_tiled_tma_atom_B(op, mB, cute.select(lB, mode=first), self.tile, mma, cluster.shape)
        self.kernel(mma, aA, tA, aB, tB, mD, lA, lB, cluster).launch(
            grid=[self.group, 1, 1], block=[THREADS, 1, 1], cluster=[self.group, 1, 1]
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        aA: cute.CopyAtom,
        tA: cute.Tensor,
        aB: cute.CopyAtom,
        tB: cute.Tensor,
        mD: cute.Tensor,
        lA: cute.ComposedLayout,
        lB: cute.ComposedLayout,
        cluster: cute.Layout,
    ):
        m, n, k = self.tile
        a_type, b_type, d_type = self.types
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        smem = cutlass.memory.SmemAllocator()
        bars = smem.allocate_array(Int64, 8)
        hold = smem.allocate_array(Int32, 1)
        sA = smem.allocate_tensor(a_type, lA.outer, 1024, swizzle=lA.inner)
        sB = smem.allocate_tensor(b_type, lB.outer, 1024, swizzle=lB.inner)
        tmem = cutlass.memory.TmemAllocator(
            hold,
            barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=THREADS),
            is_two_cta=self.group == 2,
            two_cta_tmem_dealloc_mbar_ptr=bars + 4,
        )
        one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        everyone = pipeline.CooperativeGroup(pipeline.Agent.Thread, THREADS * self.group)
        nbytes = self.group * (
            cute.size_in_bytes(a_type, cute.select(lA, mode=[0, 1, 2]))
            + cute.size_in_bytes(b_type, cute.select(lB, mode=[0, 1, 2]))
        )
        load_p, load_c = pipeline.PipelineTmaUmma.create(
            num_stages=1,
            producer_group=one,
            consumer_group=one,
            tx_count=nbytes,
            barrier_storage=bars,
            cta_layout_vmnk=cluster,
            defer_sync=True,
        ).make_participants()
        acc_p, acc_c = pipeline.PipelineUmmaAsync.create(
            num_stages=1,
            producer_group=one,
            consumer_group=everyone,
            barrier_storage=bars + 2,
            cta_layout_vmnk=cluster,
        ).make_participants()
        tmem.allocate(256)
        part = mma.get_slice(rank % self.group)
        gA = part.partition_A(cute.local_tile(tA, (m, k), (0, 0)))
        gB = part.partition_B(cute.local_tile(tB, (n, k), (0, 0)))
        gD = part.partition_C(cute.local_tile(mD, (m, n), (0, 0)))
        alone = cute.make_layout(1)
        sAt, gAt = cpasync.tma_partition(aA, 0, alone, cute.group_modes(sA, 0, 3), cute.group_modes(gA, 0, 3))
        sBt, gBt = cpasync.tma_partition(aB, 0, alone, cute.group_modes(sB, 0, 3), cute.group_modes(gB, 0, 3))
        rA, rB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
        fD = mma.make_fragment_C(mma.partition_shape_C((m, n)))
        tmem.wait_for_alloc()
        base = tmem.retrieve_ptr(d_type)
        tD = cute.make_tensor(base, fD.layout)
        if warp == 0:
            handle = load_p.acquire_and_advance()
            cute.copy(aA, gAt, sAt[None, 0], tma_bar_ptr=handle.barrier)
            cute.copy(aB, gBt, sBt[None, 0], tma_bar_ptr=handle.barrier)
            if rank % self.group == 0:
                loaded = load_c.wait_and_advance()
                result = acc_p.acquire_and_advance()
                for step in cutlass.range_constexpr(cute.size(rA, mode=[2])):
                    mma.set(tcgen05.Field.ACCUMULATE, step != 0)
                    cute.gemm(mma, tD, rA[None, None, step, 0], rB[None, None, step, 0], tD)
                loaded.release()
                result.commit()
        tmem.relinquish_alloc_permit()
        ready = acc_c.wait_and_advance()
        flat = tD[(None, None), 0, 0]
        copy = tcgen05.make_tmem_copy(cute.make_copy_atom(self.load, d_type), flat).get_slice(tid)
        to = copy.partition_D(gD[(None, None), 0, 0])
        values = cute.make_rmem_tensor(to.shape, d_type)
        cute.copy(copy, copy.partition_S(flat), values)
        cute.arch.fence_view_async_tmem_load()
        out = cute.make_rmem_tensor(to.shape, Float32)
        out.store(values.load().to(Float32))
        cute.autovec_copy(out, to)
        ready.release()
        pipeline.sync(barrier_id=2)
        tmem.free(base)


def compile_product(tile: Any, types: Any, mn_major: tuple[bool, bool], group: int, load: Any, scratch: object) -> Any:
    """`f(a, b, d)`: A (m, k), B (n, k) and D (m, n) in fp32. `scratch`: where the compiler may dump files."""
    m, n, k = tile

    def tensor(type_: Any, rows: int, columns: int, mn: bool) -> Any:
        order = (0, 1) if mn else (1, 0)
        return make_fake_compact_tensor(type_, (rows, columns), stride_order=order, assumed_align=16)

    return cute.compile(
        Product(tile, types, mn_major, group, load),
        tensor(types[0], m, k, mn_major[0]),
        tensor(types[1], n, k, mn_major[1]),
        tensor(Float32, m, n, False),
        options=f"--enable-tvm-ffi --gpu-arch sm_100a --keep-ptx --generate-line-info --dump-dir {scratch}",
    )
