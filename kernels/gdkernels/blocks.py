"""Layouts of the chunked form: rows cut into chunks of C tokens, consecutive chunks into blocks of n.

The value heads of one key head lie side by side, so that every product with q, k or the state is one matrix product per
key head, and q and k are never repeated for its G value heads. Everything is float32.

    keys    (n, B, Hk, C, Dk)       q, k and their gradients
    wide    (n, B, Hk, C, G, Dv)    v, y, delta, x and their gradients; gates the same without Dv
    heads   (n, B, Hk, G, C, Dv)    the same, for products with the (C, C) matrices of a value head
    states  (n, B, Hk, Dk, G, Dv)   transposed, so that reading and writing need no transposed copy
"""

from collections.abc import Iterator
from typing import NamedTuple

import mlx.core as mx

# Scratch of one block in the backward: larger blocks give a GPU more to do at once, smaller ones bound the memory.
# Forward + backward, bf16, (Hk, Hv, Dk, Dv) = (16, 32, 128, 128), T = 2048, H200, MLX 0.32.4, 2026-11-30: 49.5 ms and
# 0.47 GB with 128 MiB, 24.8 ms and 1.10 GB with 512, 18.3 ms and 1.66 GB with 1024; T = 512 fits one block of 512.
_BLOCK_BYTES = 512 * 2**20


class Block(NamedTuple):
    """n consecutive chunks: q and k as keys; v, log_decay and beta wide."""

    q: mx.array
    k: mx.array
    v: mx.array
    log_decay: mx.array
    beta: mx.array


def spans(q: mx.array, v: mx.array, C: int) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) token of every block: as many chunks as fit into the scratch."""
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    # Floats alive per chunk of the backward. Measured: 0.88 to 1.03 of it (5 shapes, C 32 and 64, CPU, MLX 0.32.4).
    floats = B * (Hv * (8 * C * C + 12 * C * Dv + 3 * Dk * Dv) + 6 * Hk * C * Dk)
    tokens = C * max(1, _BLOCK_BYTES // (4 * floats))
    for first in range(0, T, tokens):
        yield first, min(T, first + tokens)


def load(tokens: list[mx.array], first: int, last: int, C: int) -> Block:
    """Tokens [first, last) of q, k, v, log_decay and beta, (B, T, H, ...) each."""
    q, k, *wide = (cut(x, first, last, C, tokens[0].shape[2]) for x in tokens)
    return Block(q.squeeze(4), k.squeeze(4), *wide)


def cut(x: mx.array, first: int, last: int, C: int, Hk: int) -> mx.array:
    """Tokens [first, last) of x (B, T, H, ...) in chunks, as (n, B, Hk, C, H // Hk, ...) float32.

    The last chunk is filled with tokens of beta = 0 and log_decay = 0, which do nothing.
    """
    x = x[:, first:last]
    B, length, H = x.shape[:3]
    if length % C:
        x = mx.pad(x, [(0, 0), (0, C - length % C), *[(0, 0)] * (x.ndim - 2)])
    x = x.astype(mx.float32).reshape(B, -1, C, Hk, H // Hk, *x.shape[3:])
    return x.moveaxis(1, 0).swapaxes(2, 3)


def join(x: mx.array, length: int) -> mx.array:
    """The first `length` tokens of keys or wide x, as (B, length, Hk, ...)."""
    x = x.moveaxis(3, 2)
    n, B, C = x.shape[:3]
    return x.swapaxes(0, 1).reshape(B, n * C, *x.shape[3:])[:, :length]


def heads(x: mx.array) -> mx.array:
    """Wide to heads, and back."""
    return x.swapaxes(-3, -2)


def read(keys: mx.array, states: mx.array) -> mx.array:
    """S k for every key: wide."""
    return (keys @ states.flatten(-2)).reshape(*keys.shape[:-1], *states.shape[-2:])


def write(keys: mx.array, wide: mx.array) -> mx.array:
    """Sum over the chunk of the outer products of keys and wide rows: states."""
    return (keys.swapaxes(-1, -2) @ wide.flatten(-2)).reshape(*keys.shape[:-2], keys.shape[-1], *wide.shape[-2:])


def read_back(wide: mx.array, states: mx.array) -> mx.array:
    """The transpose of `read`, summed over the value heads of a key head: keys."""
    return wide.flatten(-2) @ states.flatten(-2).swapaxes(-1, -2)


def to_states(state: mx.array, Hk: int) -> mx.array:
    """(B, Hv, Dv, Dk) as (B, Hk, Dk, G, Dv)."""
    B, Hv, Dv, Dk = state.shape
    return state.reshape(B, Hk, Hv // Hk, Dv, Dk).moveaxis(-1, 2)


def from_states(states: mx.array) -> mx.array:
    """(B, Hk, Dk, G, Dv) as (B, Hv, Dv, Dk)."""
    B, Hk, Dk, G, Dv = states.shape
    return states.moveaxis(2, -1).reshape(B, Hk * G, Dv, Dk)
