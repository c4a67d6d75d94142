"""KernelPlans by hand: any tile and walk, for tests of what executes plans."""

from __future__ import annotations

from attngen.ir.expr import Atom
from attngen.ir.plan import ComputePlan, Cost, KernelPlan, LaunchPlan, MaskPlan, MemoryPlan, Rescale, SchedulePlan
from attngen.ir.spec import AttentionSpec
from attngen.passes.mask_form import mask_form


def make_plan(
    spec: AttentionSpec,
    tile_m: int = 128,
    tile_n: int = 80,
    *,
    growth: float = 0.0,
    headroom: float = 0.0,
    test: str | None = None,
    ranges_per_warpgroup: bool | None = None,
) -> KernelPlan:
    """A plan of `spec` with the given tile; what stays None follows from the spec."""
    form = mask_form(spec)
    score = not isinstance(spec.score, Atom)
    one = len(form.clauses) == 1
    return KernelPlan(
        name=f"{tile_m}x{tile_n}",
        compute=ComputePlan(
            dtype=spec.dtype, tile_m=tile_m, tile_n=tile_n, warpgroups=tile_m // 64,
            head_dim_qk=spec.head_dim_qk, head_dim_v=spec.head_dim_v,
            head_dim_qk_padded=-(-spec.head_dim_qk // 16) * 16, head_dim_v_padded=-(-spec.head_dim_v // 8) * 8,
            rescale=Rescale.ON_GROWTH, growth=growth, headroom=headroom, has_score=score,
        ),
        mask=MaskPlan(
            form=form, walk="interval" if one else "runs", test=test or ("limits" if form.is_exact else "elements"),
            has_right_edge=True, has_interior=True, has_left_edge=True,
            ranges_per_warpgroup=one if ranges_per_warpgroup is None else ranges_per_warpgroup,
        ),
        schedule=SchedulePlan(
            roles=(), pipelines=(), named_barriers=(), pingpong=False, order="linear", l2_group_bytes=0
        ),
        memory=MemoryPlan(
            kv_stages=2, buffers=(), smem_bytes=0, smem_limit=0, o_in_q=False, fragment_registers=0, register_limit=0
        ),
        launch=LaunchPlan(threads=384, cluster=(1, 1, 1), launch_registers=168),
        cost=Cost(mma_cycles=0.0, exp_cycles=0.0, smem_cycles=0.0, issue_cycles=0.0, efficiency=0.0),
    )  # fmt: skip
