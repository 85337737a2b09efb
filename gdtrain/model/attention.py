"""Causal attention whose backward never holds the T x T scores of a head: block by block of queries, recomputed.

Softmax and everything between the matrix products is float32. Scores are matrix products of float32 copies of the
operands, because bfloat16 ones would be rounded to 8 bits before the exponential: relative L2 of the gradients, scores
of standard deviation 4, bfloat16: 2.9e-3 at most against 1.0e-2 (CPU, MLX 0.32.4, 2026-12-01). TF32, in which MLX
multiplies float32 matrices on CUDA, holds bfloat16 values exactly.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import cast

import mlx.core as mx

# float32 scores of a block, all heads. Several arrays of that size are alive in the backward: nine on a CPU (MLX
# 0.32.4: 18 MB with blocks of 2 MB, because MLX allocates ahead of the computation), seven on an H200.
_BLOCK_BYTES = 256 * 2**20

# Queries of a block at most: the products above the diagonal, which are in vain, are those within a block. Forward +
# backward, float32, (H, Hkv, D) = (4, 2, 64), two cores of a Xeon 2.8 GHz, MLX 0.32.4, 2026-12-01: T = 128: 24 ms with
# 64, 30 with 128; T = 512: 198, 226 and 366 with 512; MLX's own gradient 24 and 279. (16, 4, 256), T = 512: 3.9 s, 4.5,
# 7.3; MLX 5.7. A GPU wants fewer and larger steps: (16, 4, 256), bfloat16, an H200, MLX 0.32.4, 2026-12-01, T = 2048:
# 8.0, 5.0 and 3.8 ms with 256, 512 and 1024, T = 4096: 19.9, 13.1 and 10.1 ms and 1.3, 1.6 and 1.8 GB; MLX's own
# gradient, whose scores are bfloat16, 1.3 and 5.1 ms, 0.5 and 1.8 GB.
_CPU_QUERIES, _GPU_QUERIES = 64, 1024


def causal_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    segments: mx.array | None = None,
    *,
    queries: int | None = None,
) -> mx.array:
    """softmax(scale q k^T) v over each token's past and itself, with gradients for q, k and v.

    Args:
        q: (B, H, T, D); k, v: (B, Hkv, T, D) in q's dtype, head h reading key head h // (H // Hkv).
        segments: (B, T) int32; a token sees those of its own number only. None: all.
        queries: of a block; None for what fits the memory set aside.

    Returns:
        (B, H, T, D) in q's dtype. Gradients have the dtype of their inputs.

    Kept for the backward: the inputs.
    """
    queries = _queries_of_a_block(q) if queries is None else queries
    inputs = [q, k, v] if segments is None else [q, k, v, segments]
    return _attention(scale, queries)(*inputs)


@lru_cache
def _attention(scale: float, queries: int) -> Callable[..., mx.array]:
    @mx.custom_function
    def attention(*primals: mx.array) -> mx.array:
        return _forward(primals, scale, queries)

    @attention.vjp
    def gradient(primals: Sequence[mx.array], dy: mx.array, _: mx.array) -> tuple[mx.array, ...]:
        return _backward(primals, dy, scale, queries)

    return cast(Callable[..., mx.array], attention)


def _forward(primals: Sequence[mx.array], scale: float, queries: int) -> mx.array:
    q, k, v, *segments = primals
    ys: list[mx.array] = []
    for first, last in _blocks(q, queries):
        # One after another: where MLX has no fused kernel, a block's scores are an array.
        q, k, v = mx.depends([q, k, v], ys[-1:])
        mask = _visible(first, last, *segments) if segments else "causal"
        y = mx.fast.scaled_dot_product_attention(
            q[:, :, first:last], k[:, :, :last], v[:, :, :last], scale=scale, mask=mask
        )
        ys.append(y)
    return mx.concatenate(ys, axis=2)


def _backward(primals: Sequence[mx.array], dy: mx.array, scale: float, queries: int) -> tuple[mx.array, ...]:
    """From the last block of queries to the first: the gradients of its own keys are complete when it is done."""
    q, k, v, *segments = primals
    # Otherwise MLX recomputes before it has the cotangent, and every block before it finishes one.
    q, k, v, dy = mx.depends([q, k, v, dy], [dy])
    dk, dv = (mx.zeros(x.shape, mx.float32) for x in (k, v))
    parts: list[tuple[mx.array, mx.array, mx.array]] = []
    for first, last in reversed(list(_blocks(q, queries))):
        block = (q[:, :, first:last], k[:, :, :last], v[:, :, :last], dy[:, :, first:last])
        dq, dk_block, dv_block = _block_backward(*block, _visible(first, last, *segments), scale)
        dk, dv = dk[:, :, :last] + dk_block, dv[:, :, :last] + dv_block
        part = (dq, dk[:, :, first:].astype(k.dtype), dv[:, :, first:].astype(v.dtype))
        q, k, v, dy, dk, dv = mx.depends([q, k, v, dy, dk, dv], [*part, dk, dv])
        parts.append(part)
    gradients = [mx.concatenate(list(blocks), axis=2) for blocks in zip(*reversed(parts), strict=True)]
    return (*gradients, *(mx.zeros_like(x) for x in segments))


def _block_backward(
    q: mx.array, k: mx.array, v: mx.array, dy: mx.array, visible: mx.array, scale: float
) -> tuple[mx.array, mx.array, mx.array]:
    """dq of a block of queries in q's dtype, and its share of dk and dv, (B, Hkv, keys, D) float32.

    The query heads of a key head are further rows of its matrix products: k and v are never repeated for them, and
    their dk and dv are summed by the product.
    """
    B, H, queries, D = q.shape
    Hkv, keys = k.shape[1:3]
    q, dy = (x.reshape(B, Hkv, -1, D) for x in (q, dy))
    scores = (scale * q.astype(mx.float32)) @ k.astype(mx.float32).swapaxes(-1, -2)
    scores = scores.reshape(B, H, queries, keys)
    p = mx.softmax(mx.where(visible, scores, -mx.inf), axis=-1)
    dp = (scale * dy.astype(mx.float32)) @ v.astype(mx.float32).swapaxes(-1, -2)
    dp = dp.reshape(B, H, queries, keys)
    # dy . y is the same sum, but y is rounded: gradients of bfloat16 would err by 1.4e-2 instead of 3e-3.
    mean = (p * dp).sum(axis=-1, keepdims=True)
    d_scores = _softmax_gradient(p, dp, mean).astype(q.dtype)  # with `scale` in it
    p, d_scores = (x.reshape(B, Hkv, -1, keys) for x in (p.astype(q.dtype), d_scores))
    dk, dv = (x.swapaxes(-1, -2) @ rows for x, rows in ((d_scores, q), (p, dy)))
    return (d_scores @ k).reshape(B, H, queries, D), dk.astype(mx.float32), dv.astype(mx.float32)


@partial(mx.compile, shapeless=True)
def _softmax_gradient(p: mx.array, dp: mx.array, mean: mx.array) -> mx.array:
    return p * (dp - mean)


def _visible(first: int, last: int, segments: mx.array | None = None) -> mx.array:
    """Keys up to the query itself, (queries, keys) bool; with segments those of its document, (B, 1, queries, keys)."""
    past = mx.arange(first, last)[:, None] >= mx.arange(last)
    if segments is None:
        return past
    return (past & (segments[:, first:last, None] == segments[:, None, :last]))[:, None]


def _blocks(q: mx.array, queries: int) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) query of every block."""
    T = q.shape[2]
    return ((first, min(T, first + queries)) for first in range(0, T, queries))


def _queries_of_a_block(q: mx.array) -> int:
    B, H, T, _ = q.shape
    most = _CPU_QUERIES if mx.default_device() == mx.cpu else _GPU_QUERIES
    return max(1, min(most, _BLOCK_BYTES // (4 * B * H * T)))
