"""Plans of the fused backend, on machines that need not be there."""

import mlx.core as mx
from gdkernels.fused import plan

M1, M4 = 13, 16  # generations: M1 stages operands in threadgroup memory, M4 reads them directly
STAGES = ("intra", "pairs", "keys", "gates", "sweep", "delta")


def plan_of(machine, size, dtype=mx.float32, exact=True):
    _, C, B, Hk, Hv, Dk, Dv = size
    Dk, Dv = (-(-D // plan.HEAD_DIM_STEP) * plan.HEAD_DIM_STEP for D in (Dk, Dv))
    return plan.plan(machine, exact, B, Hk, Hv, Dk, Dv, plan.fitting_chunk(machine, Dk, C), dtype)
