"""Decays between the tokens of a chunk, and the gradient of log_decay.

Every decay is the exponential of its own sum of log_decay, which runs away from the diagonal. Differences of one prefix
sum would lose the digits of mild decays behind a strong one, and give NaN (inf - inf) where log_decay is -inf.
"""

from typing import NamedTuple

import mlx.core as mx


class Decay(NamedTuple):
    """Float32, never above 1, exactly 0 across a token with log_decay = -inf."""

    between: mx.array  # D_ij = exp(sum over j < l <= i) for j <= i, else 0: (..., G, C, C)
    from_start: mx.array  # Gamma_i = exp(sum over l <= i): (..., C, G)
    to_end: mx.array  # E_j = D_Cj: (..., C, G)
    whole: mx.array  # Gamma_C: (..., G)


def decays(log_decay: mx.array) -> Decay:
    """Decays of chunks from log_decay (..., C, G) float32."""
    C = log_decay.shape[-2]
    by_head = log_decay.swapaxes(-1, -2)
    below_diagonal = mx.tri(C, k=-1, dtype=mx.bool_)
    sums = mx.cumsum(mx.where(below_diagonal, by_head[..., None], 0.0), axis=-2)
    between = mx.where(mx.tri(C, dtype=mx.bool_), mx.exp(sums), 0.0)
    from_start = mx.exp(mx.cumsum(log_decay, axis=-2))
    return Decay(between, from_start, between[..., -1, :].swapaxes(-1, -2), from_start[..., -1, :])


def log_decay_gradient(R: mx.array, u: mx.array, e: mx.array, whole: mx.array) -> mx.array:
    """Gradient of log_decay (..., C, G): token l has a part in every decay that spans it.

    Args:
        R: (..., G, C, C) gradient times value of D_ij, zero on and above the diagonal or multiplied by zero there.
        u, e: (..., C, G) the same for Gamma_i and E_j; whole: (..., G) for Gamma_C.

    The double sum over i >= l > j is taken directly: reverse cumulative sums of row sums minus column sums cancel, and
    were 6e-2 wrong for strong decays where this is within 1e-4.
    """
    C = R.shape[-1]
    # spanning_il = sum over j < l of R_ij
    spanning = mx.cumsum(R, axis=-1, inclusive=False)
    inner = mx.where(mx.tri(C, dtype=mx.bool_), spanning, 0.0).sum(axis=-2)
    return (
        inner.swapaxes(-1, -2)
        + mx.cumsum(u, axis=-2, reverse=True)
        + mx.cumsum(e, axis=-2, inclusive=False)
        + whole[..., None, :]
    )
