"""The chunked form of the rule with a hand-written gradient, in MLX operations.

Within a chunk the rank-one updates `delta` solve a triangular system (Yang, Kautz and Hatamizadeh, arXiv 2412.06464,
section 3.3); only the state passes from chunk to chunk. With the decays of `decay.py` and layouts of `blocks.py`:

    A_ij  = beta_i D_ij (k_i . k_j) for j < i       M = (I + A)^-1       P_ij = D_ij (q_i . k_j) for j <= i
    error = V - diag(Gamma) K S_0^T                 delta = M diag(beta) error
    Y     = P delta + diag(Gamma) Q S_0^T           S_C = Gamma_C S_0 + delta^T diag(E) K

and backward, from the gradients dY and dS_C, x being the adjoint of the triangular solve:

    x     = M^T (P^T dY + diag(E) K dS_C^T)
    dS_0  = dY^T diag(Gamma) Q + Gamma_C dS_C - x^T diag(beta Gamma) K

Only these products run one chunk after another. The rest is done for a whole block of chunks at once, and one block is
finished before the next begins, so that scratch is bounded whatever T is.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx

from gdkernels.blocks import Block, cut, from_states, heads, join, load, read, read_back, spans, to_states, write
from gdkernels.cores import on_cores
from gdkernels.custom import join_spans, with_gradient
from gdkernels.decay import Decay, decays, log_decay_gradient
from gdkernels.triangular import unit_lower_inverse


def chunked(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array, chunk_size: int
) -> tuple[mx.array, mx.array]:
    """Readout y (B, T, Hv, Dv) in q's dtype, final state (B, Hv, Dv, Dk) float32; shapes as in the package docstring.

    Kept for the backward: the inputs, and the state at the start of every chunk.
    """
    y, final, _ = with_gradient(_forward, _backward, min(chunk_size, q.shape[1]))(q, k, v, log_decay, beta, state)
    return y, final


# Axis of the heads in q, k, v, log_decay, beta, state, and in y, the final state and the states of `blocks.py`.
_AXES, _OUTPUT_AXES = (2, 2, 2, 2, 2, 1), (2, 1, 2)


def _forward(primals: Sequence[mx.array], C: int) -> tuple[mx.array, mx.array, mx.array]:
    y, final, starts = on_cores(partial(_forward_heads, C), primals, _AXES, _OUTPUT_AXES)
    return y, final, starts


def _backward(
    primals: Sequence[mx.array], dy: mx.array, d_final: mx.array, starts: mx.array, C: int
) -> Sequence[mx.array]:
    arrays = [*primals, dy, d_final, starts]
    return on_cores(partial(_backward_heads, C), arrays, (*_AXES, *_OUTPUT_AXES), _AXES)


def _forward_heads(C: int, primals: Sequence[mx.array]) -> tuple[mx.array, mx.array, mx.array]:
    *tokens, state = primals
    q, v = tokens[0], tokens[2]
    S = to_states(state, q.shape[2])
    ys, starts = [], []
    for first, last in spans(q, v, C):
        y, S0, S = _block_forward(load(tokens, first, last, C), S)
        ys.append(join(y, last - first).astype(q.dtype))
        starts.append(S0)
        # The next block waits for this one: otherwise the scratch of all blocks is alive at once.
        S, *tokens = mx.depends([S, *tokens], [ys[-1], S0])
    return mx.concatenate(ys, axis=1).reshape(v.shape), from_states(S), mx.concatenate(starts)


def _backward_heads(C: int, arrays: Sequence[mx.array]) -> tuple[mx.array, ...]:
    *primals, dy, d_final, starts = arrays
    # As in the forward; and nothing may start before the cotangents are there, or MLX keeps all that it recomputes.
    Hk = primals[0].shape[2]
    dy, *tokens = mx.depends([dy, *primals[:5]], [dy, d_final])
    dS = to_states(d_final, Hk)
    parts = []
    for first, last in reversed(list(spans(primals[0], primals[2], C))):
        block = load(tokens, first, last, C)
        wide, dS = _block_backward(block, cut(dy, first, last, C, Hk), starts[first // C : -(-last // C)], dS)
        grads = [join(g, last - first).astype(x.dtype) for g, x in zip(wide, tokens, strict=True)]
        dS, dy, *tokens = mx.depends([dS, dy, *tokens], grads)
        parts.append(grads)
    parts.reverse()
    return (*join_spans(parts, tokens), from_states(dS))


class _Intra(NamedTuple):
    """What the tokens of a chunk do to each other."""

    decay: Decay
    kk: mx.array  # k_i . k_j and q_i . k_j: (n, B, Hk, 1, C, C)
    qk: mx.array
    P: mx.array  # (n, B, Hk, G, C, C)
    M: mx.array


def _intra(block: Block) -> _Intra:
    k_transposed = block.k.swapaxes(-1, -2)
    kk = (block.k @ k_transposed)[:, :, :, None]
    qk = (block.q @ k_transposed)[:, :, :, None]
    decay = decays(block.log_decay)
    A = mx.tril(decay.between * kk * block.beta.swapaxes(-1, -2)[..., None], -1)
    return _Intra(decay, kk, qk, decay.between * qk, unit_lower_inverse(A))


def _block_forward(block: Block, S: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """y (wide), the state at the start of each chunk, and the state after the block."""
    decay, _, _, P, M = _intra(block)
    starts, deltas = [], []
    gamma, beta, to_end = (x[..., None] for x in (decay.from_start, block.beta, decay.to_end))
    for k, v, M_i, gamma_i, beta_i, to_end_i, whole in _by_chunk(block.k, block.v, M, gamma, beta, to_end, decay.whole):
        starts.append(S)
        error = v - gamma_i * read(k, S)
        deltas.append(M_i @ heads(beta_i * error))
        S = _decayed(S, whole) + write(k, to_end_i * heads(deltas[-1]))
    S0 = mx.stack(starts)
    y = heads(P @ mx.stack(deltas)) + gamma * read(block.q, S0)
    return y, S0, S


def _block_backward(block: Block, dy: mx.array, S0: mx.array, dS: mx.array) -> tuple[tuple[mx.array, ...], mx.array]:
    """Gradients of q, k (keys), v, log_decay, beta (wide), and of the state before the block, given that after it."""
    q, k, v, _, beta = block
    decay, kk, qk, P, M = _intra(block)
    gamma, to_end = decay.from_start, decay.to_end
    k_S0 = read(k, S0)
    error = v - gamma[..., None] * k_S0
    delta = M @ heads(beta[..., None] * error)
    d_delta = P.swapaxes(-1, -2) @ heads(dy)
    gamma_dy = gamma[..., None] * dy
    beta_gamma = (beta * gamma)[..., None]

    ends, xs, k_ends = [], [], []
    chunks = list(_by_chunk(q, k, M.swapaxes(-1, -2), d_delta, gamma_dy, beta_gamma, to_end[..., None], decay.whole))
    for q_i, k_i, M_t, d_delta_i, gamma_dy_i, beta_gamma_i, to_end_i, whole in reversed(chunks):
        ends.append(dS)
        k_ends.append(read(k_i, dS))
        xs.append(M_t @ (d_delta_i + heads(to_end_i * k_ends[-1])))
        dS = _decayed(dS, whole) + write(q_i, gamma_dy_i) - write(k_i, beta_gamma_i * heads(xs[-1]))
    dS_C, k_dS_C, x = (mx.stack(parts[::-1]) for parts in (ends, k_ends, xs))

    dP_D = (heads(dy) @ delta.swapaxes(-1, -2)) * decay.between
    dA_D = mx.tril(-(x @ delta.swapaxes(-1, -2)) * decay.between, -1)
    x, delta = heads(x), heads(delta)
    beta_rows = beta.swapaxes(-1, -2)[..., None]
    through_P, through_A = dP_D.sum(axis=3), (beta_rows * dA_D).sum(axis=3)
    dq = through_P @ k + read_back(gamma_dy, S0)
    dk = (
        through_P.swapaxes(-1, -2) @ q
        + (through_A + through_A.swapaxes(-1, -2)) @ k
        + read_back(to_end[..., None] * delta, dS_C)
        - read_back(beta_gamma * x, S0)
    )
    dA_D_kk = dA_D * kk
    dbeta = (x * error).sum(axis=-1) + dA_D_kk.sum(axis=-1).swapaxes(-1, -2)
    d_log_decay = log_decay_gradient(
        dP_D * qk + beta_rows * dA_D_kk,
        (gamma_dy * read(q, S0) - beta_gamma * x * k_S0).sum(axis=-1),
        to_end * (delta * k_dS_C).sum(axis=-1),
        decay.whole * (S0 * dS_C).sum(axis=(-3, -1)),
    )
    return (dq, dk, beta[..., None] * x, d_log_decay, dbeta), dS


def _by_chunk(*arrays: mx.array) -> Iterator[tuple[mx.array, ...]]:
    """Their chunks, all n along the first axis. Views: an index would be an array of its own, and take a copy."""
    return zip(*([x.squeeze(0) for x in mx.split(array, len(array))] for array in arrays), strict=True)


def _decayed(S: mx.array, whole: mx.array) -> mx.array:
    return whole[..., None, :, None] * S
