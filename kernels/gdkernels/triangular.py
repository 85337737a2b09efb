"""Inverse of unit lower triangular matrices, without the powers of A that reach 1e18 for equal keys."""

import mlx.core as mx


def unit_lower_inverse(A: mx.array) -> mx.array:
    """(I + A)^-1 for strictly lower triangular A (..., C, C) float32; the result is unit lower triangular.

    On the CPU by substitution (LAPACK strtri); MLX has that nowhere else, so other devices go by `block_inverse`.
    """
    if mx.default_device() == mx.cpu:
        return mx.linalg.tri_inv(mx.eye(A.shape[-1]) + A)
    return block_inverse(A)


def block_inverse(A: mx.array) -> mx.array:
    """As `unit_lower_inverse`, by block recursion: with the inverses X of the diagonal blocks of size s at hand, those
    of size 2s are X - X A' X, where A' is A on the lower left block of every pair and zero elsewhere."""
    index = mx.arange(A.shape[-1])
    X = mx.broadcast_to(mx.eye(A.shape[-1]), A.shape)
    size = 1
    while size < A.shape[-1]:
        block = index // size
        lower_left = (block[:, None] == block[None] + 1) & (block[:, None] % 2 == 1)
        X = X - X @ mx.where(lower_left, A, 0.0) @ X
        size *= 2
    return X
