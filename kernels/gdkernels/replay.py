"""Chunk replay in plain operations: bounded memory for any shape, the states of one chunk alive at a time.

The forward keeps the state at the start of every chunk. The backward takes the chunks from last to first, replays one
from its state and walks back through it with the gradient of a single step. Gradients of the steps are collected and
stacked: a scatter-add into a preallocated array reads its update with a wrong batch stride in MLX 0.31.2, which made
every batch row but the first wrong.
"""

from collections.abc import Sequence

import mlx.core as mx

from gdkernels.custom import join_spans, with_gradient
from gdkernels.reference import load_token, matvec, step


def replay(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array, chunk_size: int
) -> tuple[mx.array, mx.array]:
    """Readout y (B, T, Hv, Dv) in q's dtype, final state (B, Hv, Dv, Dk) float32; shapes as in the package docstring.

    Kept for the backward: the inputs, and the state at the start of every chunk.
    """
    y, final, _ = with_gradient(_forward, _backward, chunk_size)(q, k, v, log_decay, beta, state)
    return y, final


def _forward(primals: Sequence[mx.array], chunk_size: int) -> tuple[mx.array, mx.array, mx.array]:
    *tokens, state = primals
    q, v = tokens[0], tokens[2]
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    S = state.reshape(B, Hk, Hv // Hk, Dv, Dk)
    starts: list[mx.array] = []
    ys: list[mx.array] = []
    for t in range(T):
        if t % chunk_size == 0:
            # Readouts first: otherwise MLX runs ahead with the states and keeps them all for the readouts.
            S = mx.depends([S], ys[-chunk_size:])[0]
            starts.append(S)
        S, y = step(S, *(load_token(x, t, Hk) for x in tokens))
        ys.append(y.astype(q.dtype))
    return mx.stack(ys, axis=1).reshape(v.shape), S.reshape(state.shape), mx.stack(starts)


def _backward(
    primals: Sequence[mx.array], dy: mx.array, d_final: mx.array, starts: mx.array, chunk_size: int
) -> tuple[mx.array, ...]:
    # Without the two dependencies MLX would replay every chunk before it finishes the first: memory as of the loop.
    *tokens, state = mx.depends(list(primals), [dy, d_final])
    T, Hk = tokens[0].shape[1:3]
    dS = d_final.reshape(starts.shape[1:])
    chunks = []
    for first in reversed(range(0, T, chunk_size)):
        chunk = [x[:, first : first + chunk_size] for x in (*tokens, dy)]
        *grads, dS = _chunk_backward(chunk, starts[first // chunk_size], dS, Hk)
        dS, *tokens = mx.depends([dS, *tokens], grads)
        chunks.append(grads)
    chunks.reverse()
    return (*join_spans(chunks, tokens), dS.reshape(state.shape))


def _chunk_backward(chunk: list[mx.array], S: mx.array, dS: mx.array, Hk: int) -> tuple[mx.array, ...]:
    """Gradients of one chunk's q, k, v, log_decay, beta (B, C, ...) in their own dtypes, and of its first state."""
    dtypes = [x.dtype for x in chunk[:5]]
    steps = []
    states = [S]
    for t in range(chunk[0].shape[1]):
        token = [load_token(x, t, Hk) for x in chunk]
        states.append(step(states[-1], *token[:5])[0])
        steps.append(token)
    grads = []
    while steps:
        after = states.pop()
        *grad, dS = _step_backward(states[-1], after, dS, *steps.pop())
        grads.append([g.astype(dtype) for g, dtype in zip(grad, dtypes, strict=True)])
    grads.reverse()
    return (*(mx.stack(list(parts), axis=1) for parts in zip(*grads, strict=True)), dS)


def _step_backward(
    before: mx.array,
    after: mx.array,
    dS: mx.array,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    dy: mx.array,
) -> tuple[mx.array, ...]:
    """Reverse of `reference.step`, given the states around it. Nothing is divided by g or beta: both may be zero."""
    g = mx.exp(log_decay)[..., None, None]
    decayed = g * before
    error = v - matvec(decayed, k)
    dS = dS + dy[..., None] * q[..., None, :]
    d_delta = matvec(dS, k)
    d_error = beta[..., None] * d_delta
    delta = beta[..., None] * error
    # Value heads that share a key head add their dq and dk.
    dq = (after * dy[..., None]).sum(axis=(2, 3))[:, :, None]
    dk = (dS * delta[..., None] - decayed * d_error[..., None]).sum(axis=(2, 3))[:, :, None]
    dS = dS - d_error[..., None] * k[..., None, :]
    return dq, dk, d_error, (dS * decayed).sum(axis=(-2, -1)), (d_delta * error).sum(axis=-1), g * dS
