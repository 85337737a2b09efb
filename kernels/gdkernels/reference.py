"""The recurrence, one step at a time: the specification that every other backend is tested against.

Left to automatic differentiation it keeps several states for every token, so it is for tests and short rows only.
"""

import mlx.core as mx


def reference(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array, chunk_size: int
) -> tuple[mx.array, mx.array]:
    """Readout y (B, T, Hv, Dv) in q's dtype and final state (B, Hv, Dv, Dk) float32.

    Shapes as in the package docstring; `state` is required and `chunk_size` has no effect, there being no chunks.
    """
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    S = state.reshape(B, Hk, Hv // Hk, Dv, Dk)
    ys = []
    for t in range(T):
        S, y = step(S, *(load_token(x, t, Hk) for x in (q, k, v, log_decay, beta)))
        ys.append(y.reshape(B, Hv, Dv))
    return mx.stack(ys, axis=1).astype(q.dtype), S.reshape(B, Hv, Dv, Dk)


def step(
    S: mx.array, q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array
) -> tuple[mx.array, mx.array]:
    """One token, float32: S (B, Hk, G, Dv, Dk); q, k (B, Hk, 1, Dk); v (B, Hk, G, Dv); gates (B, Hk, G)."""
    S = mx.exp(log_decay)[..., None, None] * S
    delta = beta[..., None] * (v - matvec(S, k))
    S = S + delta[..., None] * k[..., None, :]
    return S, matvec(S, q)


def matvec(S: mx.array, k: mx.array) -> mx.array:
    """S k for every head: (B, Hk, G, Dv, Dk) and (B, Hk, 1, Dk) give (B, Hk, G, Dv)."""
    return (S * k[..., None, :]).sum(axis=-1)


def load_token(x: mx.array, t: int, Hk: int) -> mx.array:
    """Token t in float32 with heads split into (Hk, heads per key head)."""
    x = x[:, t].astype(mx.float32)
    return x.reshape(x.shape[0], Hk, x.shape[1] // Hk, *x.shape[2:])
