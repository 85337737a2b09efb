"""The gated delta rule by the stages of the fused backend, with its gradient."""

from collections.abc import Iterator, Sequence

import mlx.core as mx

from gdkernels.custom import join_spans, with_gradient
from gdkernels.fused import stages
from gdkernels.fused.plan import CHUNKS, HEAD_DIM_STEP, MAX_HEAD_DIM, Plan, fitting_chunk, plan
from gdkernels.fused.stages import Span
from gdkernels.portable.machine import Machine, machine, rounds_to_tf32
from gdkernels.portable.program import MAX_GROUPS, body_text, header_text
from gdkernels.sizes import Sizes

# Scratch of a span of the backward. Spans bound the memory where it is short: MLX then waits for the GPU, which frees a
# span's scratch when it has finished it. Where memory is plenty the program runs ahead of the GPU: (16, 64, 192, 128),
# T = 16384, bf16, on an H200 (2026-11-30): all seven spans alive and a peak of 7.8 GB, 15.4 ms; with a memory limit of
# 5 GB, 5.1 GB and 16.5 ms.
_SPAN_BYTES = 512 * 2**20
# Multiply-adds of a launch. A display that waits too long for the GPU ends the run; 50 GFLOP take about 50 ms on an M1.
_LAUNCH_PRODUCTS = 25e9


def refusal(sizes: Sizes) -> str | None:
    """Why it cannot run here with these sizes, or None."""
    if machine() is None:
        return "it needs a GPU as MLX's default device"
    if max(sizes.Dk, sizes.Dv) > MAX_HEAD_DIM:
        return f"head dimensions up to {MAX_HEAD_DIM} are accepted, not Dk = {sizes.Dk}, Dv = {sizes.Dv}"
    if sizes.B * sizes.Hv > MAX_GROUPS:
        return f"B * Hv up to {MAX_GROUPS} are accepted, not {sizes.B * sizes.Hv}"
    if sizes.C not in CHUNKS:
        return f"chunk_size {', '.join(map(str, CHUNKS))} are accepted, not {sizes.C}"
    return None


def text() -> str:
    """All kernel texts."""
    return "".join(
        header_text(program, where, ()) + body_text(program, where)
        for program in stages.PROGRAMS
        for where in ("metal", "cuda")
    )


def products() -> str:
    """How floats are multiplied here, where that is less than exact."""
    if machine() != "cuda" or not rounds_to_tf32():
        return ""
    return "floats multiplied as two bfloat16 each, relative error about 5e-6 (MLX_ENABLE_TF32=0: three, exact)"


def rule(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array, chunk_size: int
) -> tuple[mx.array, mx.array]:
    """Readout y (B, T, Hv, Dv) in q's dtype, final state (B, Hv, Dv, Dk) float32; shapes as in the package docstring.

    On Metal head dimensions above 192 take chunks of less than chunk_size, so that they fit into registers.
    """
    Dk, Dv = q.shape[-1], v.shape[-1]
    q, k, v = (_pad(x, -1) for x in (q, k, v))
    state = _pad(_pad(state, -1), -2)
    C = fitting_chunk(_machine(), q.shape[-1], chunk_size)
    y, final, _ = with_gradient(_forward, _backward, C)(q, k, v, log_decay, beta, state)
    return y[..., :Dv], final[..., :Dv, :Dk]


def _pad(x: mx.array, axis: int) -> mx.array:
    """x with zeros up to a multiple of HEAD_DIM_STEP. Zero columns of q, k and v leave everything else as it is."""
    missing = -x.shape[axis] % HEAD_DIM_STEP
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return mx.pad(x, widths)


def _machine() -> Machine:
    where = machine()
    if where is None:
        raise RuntimeError("the fused backend needs a GPU as MLX's default device")
    return where


def _plan(q: mx.array, v: mx.array, C: int) -> Plan:
    B, _, Hk, Dk = q.shape
    return plan(_machine(), not rounds_to_tf32(), B, Hk, v.shape[2], Dk, v.shape[3], C, q.dtype)


def _forward(primals: Sequence[mx.array], C: int) -> tuple[mx.array, mx.array, mx.array]:
    *tokens, state = primals
    q, k, v, log_decay, beta = tokens
    sizes = _plan(q, v, C)
    ys, starts = [], []
    for span in _spans(sizes, q.shape[1], memory=False):
        within = stages.intra(sizes, q, k, log_decay, beta, span)
        y, start, state = stages.forward(sizes, q, k, v, within, state, span)
        ys.append(y)
        starts.append(start)
        state, q, k, v, log_decay, beta = mx.depends([state, q, k, v, log_decay, beta], [y])
    return mx.concatenate(ys, axis=1), state, mx.concatenate(starts, axis=2)


def _backward(
    primals: Sequence[mx.array], dy: mx.array, d_final: mx.array, starts: mx.array, C: int
) -> tuple[mx.array, ...]:
    # Nothing may start before the cotangents are there, or MLX keeps all that it recomputes.
    dy, *tokens = mx.depends([dy, *primals[:5]], [dy, d_final])
    sizes = _plan(tokens[0], tokens[2], C)
    parts = []
    d_state = d_final
    for span in reversed(list(_spans(sizes, tokens[0].shape[1], memory=True))):
        grads, d_state = _span_backward(sizes, tokens, dy, starts, d_state, span)
        # The next span waits for this one, so that the scratch of one is enough.
        d_state, dy, *tokens = mx.depends([d_state, dy, *tokens], grads)
        parts.append(grads)
    parts.reverse()
    return (*join_spans(parts, tokens), d_state)


def _spans(sizes: Plan, T: int, *, memory: bool) -> Iterator[Span]:
    """Spans of about equal numbers of chunks, one at least, of at most _LAUNCH_PRODUCTS and, if asked, _SPAN_BYTES."""
    C, Dk, Dv, chunks = sizes.C, sizes.Dk, sizes.Dv, -(-T // sizes.C)
    heads = sizes.B * sizes.Hv
    fit = _LAUNCH_PRODUCTS // (heads * C * (3 * Dk * Dv + C * (Dk + 2 * Dv)))
    if memory:
        floats = heads * (2 * C * C + 2 * C * Dv + Dv * Dk) + sizes.B * sizes.Hk * 6 * C * C
        fit = min(fit, _SPAN_BYTES // (4 * floats))
    length = -(-chunks // -(-chunks // max(1, int(fit))))
    for first in range(0, chunks, length):
        yield Span(first, min(length, chunks - first), T)


def _span_backward(
    sizes: Plan, tokens: Sequence[mx.array], dy: mx.array, starts: mx.array, d_end: mx.array, span: Span
) -> tuple[list[mx.array], mx.array]:
    """Gradients of q, k, v, log_decay and beta of the span, and of the state before it, given that of the one after."""
    q, k, v, log_decay, beta = tokens
    within, QK, KK = stages.intra_with_pairs(sizes, q, k, log_decay, beta, span)
    x, d_ends, d_state = stages.reverse(sizes, q, k, dy, within, d_end, span)
    delta = stages.delta(sizes, k, v, within, starts, span)
    pairs = stages.pairs(sizes, v, dy, log_decay, beta, QK, KK, delta, x, span)
    keys = stages.keys(sizes, q, k, dy, within.scales, delta, x, starts, d_ends, pairs.d_pairs, span)
    d_log_decay, d_beta = stages.gates(sizes, pairs, keys, span)
    return [keys.dq, keys.dk, pairs.dv, d_log_decay, d_beta], d_state
