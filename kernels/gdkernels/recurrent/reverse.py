"""The reverse scan over the chunks, each replayed from its first state."""

from collections.abc import Sequence

import mlx.core as mx

from gdkernels.custom import join_spans
from gdkernels.portable.program import Program, read_text
from gdkernels.recurrent.layout import STEPS, arena_floats, layout_of, span_array, spans
from gdkernels.sizes import Sizes

PROGRAM = Program(
    name="gated_delta_recurrent_reverse",
    inputs=("q", "k", "v", "log_decay", "beta", "dy", "starts", "d_state", "span"),
    outputs=("key_sums", "gate_sums", "dv", "d_start", "saved", "errors"),
    source=read_text("gdkernels.recurrent", "reverse.metal"),
    headers=("lanes.h",),
)


def backward(
    primals: Sequence[mx.array], dy: mx.array, d_final: mx.array, starts: mx.array, C: int
) -> tuple[mx.array, ...]:
    """Gradients of q, k, v, log_decay, beta and state, in the shapes and dtypes of the inputs."""
    T = primals[0].shape[1]
    B, Hv, Dv, Dk = d_final.shape
    sums = layout_of(Dk).blocks(Dv) * 2 * Dk
    # Nothing may start before the cotangents are there, or MLX keeps all that it recomputes.
    dy, *tokens = mx.depends([dy, *primals[:5]], [dy, d_final])
    dS, parts = d_final, []
    for first, last in reversed(list(spans(T, C, 4 * B * Hv * sums, 13 * B * Hv * Dv * Dk))):
        *grads, dS = _span_backward(tokens, dy, starts, dS, (first, last), C)
        # The next launch waits for this one's sums, so that the partial sums of one are enough.
        dS, dy, *tokens = mx.depends([dS, dy, *tokens], grads)
        parts.append(grads)
    parts.reverse()
    return (*join_spans(parts, tokens), dS)


def _span_backward(
    tokens: list[mx.array], dy: mx.array, starts: mx.array, dS: mx.array, span: tuple[int, int], C: int
) -> tuple[mx.array, ...]:
    """Gradients of q, k, v, log_decay and beta for the tokens of the span (B, L, ...), and of the state before it."""
    q, v = tokens[0], tokens[2]
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    sizes, threads = Sizes(B, T, Hk, Hv, Dk, Dv, q.dtype, C), layout_of(Dk)
    blocks, L = threads.blocks(Dv), span[1] - span[0]
    saved = (B * Hv * blocks * -(-C // STEPS), Dk // 32 * threads.lane_rows * threads.threads)
    key_sums, gate_sums, dv, d_start, _, _ = PROGRAM(
        [*tokens, dy, starts, dS, span_array(sizes, *span)],
        [
            ((B, L, Hv, blocks, 2, Dk), mx.float32),
            ((B, L, Hv, blocks, 2), mx.float32),
            ((B, L, Hv, Dv), v.dtype),
            (dS.shape, mx.float32),
            (saved, mx.float32),
            ((B, Hv, C, Dv), mx.float32),
        ],
        constants={
            "KEY_DIM": Dk,
            "VALUE_DIM": Dv,
            "LANE_ROWS": threads.lane_rows,
            "SIMD_GROUPS": threads.simd_groups,
            "BLOCKS": blocks,
            "STEPS": STEPS,
            "ELEMENT": q.dtype,
        },
        groups=(blocks, Hv, B),
        threads=threads.threads,
        arena=arena_floats(Dk, threads.simd_groups),
    )
    # Value heads that share a key head add their dq and dk.
    dq_dk = key_sums.reshape(B, L, Hk, Hv // Hk * blocks, 2, Dk).sum(axis=3).astype(q.dtype)
    gates = gate_sums.sum(axis=3)
    return dq_dk[:, :, :, 0], dq_dk[:, :, :, 1], dv, gates[..., 0], gates[..., 1], d_start
