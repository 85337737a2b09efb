"""The scan over the tokens."""

from collections.abc import Sequence

import mlx.core as mx

from gdkernels.portable.program import Program, read_text
from gdkernels.recurrent.layout import layout_of, span_array, spans
from gdkernels.sizes import Sizes

PROGRAM = Program(
    name="gated_delta_recurrent_scan",
    inputs=("q", "k", "v", "log_decay", "beta", "state", "span"),
    outputs=("y", "starts", "last_state"),
    source=read_text("gdkernels.recurrent", "scan.metal"),
    headers=("lanes.h",),
)


def forward(primals: Sequence[mx.array], C: int) -> tuple[mx.array, mx.array, mx.array]:
    """y (B, T, Hv, Dv), final state (B, Hv, Dv, Dk), states at the start of the chunks (N, B, Hv, Dv, Dk)."""
    *tokens, state = primals
    q, v = tokens[0], tokens[2]
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    sizes, threads = Sizes(B, T, Hk, Hv, Dk, Dv, q.dtype, C), layout_of(Dk)
    constants: dict[str, int | mx.Dtype] = {
        "KEY_DIM": Dk,
        "VALUE_DIM": Dv,
        "LANE_ROWS": threads.lane_rows,
        "SIMD_GROUPS": threads.simd_groups,
        "ELEMENT": q.dtype,
    }
    ys, starts = [], []
    for first, last in spans(T, C, 0, 4 * B * Hv * Dv * Dk):
        y, S0, state = PROGRAM(
            [*tokens, state, span_array(sizes, first, last)],
            [
                ((B, last - first, Hv, Dv), q.dtype),
                ((-(-(last - first) // C), B, Hv, Dv, Dk), mx.float32),
                (state.shape, mx.float32),
            ],
            constants=constants,
            groups=(threads.blocks(Dv), Hv, B),
            threads=threads.threads,
        )
        ys.append(y)
        starts.append(S0)
    return mx.concatenate(ys, axis=1), state, mx.concatenate(starts)
