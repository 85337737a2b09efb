"""The two gates of the rule, from the layer's raw projections, in float32 whatever the activations are.

In bfloat16 a decay of 0.999 is exactly 1.0: a head that should forget never would.
"""

import mlx.core as mx

# exp(A_log) beyond this would overflow to inf and turn a zero gradient into NaN; at 60 the decay is 0 for any step
# size above 1e-24, so that nothing a model can express is changed.
_MAX_A_LOG = 60.0


def gates(a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array) -> tuple[mx.array, mx.array]:
    """Log-decay and beta of every token and value head.

    Args:
        a, b: (B, T, Hv), any floating dtype: the layer's in_proj_a and in_proj_b.
        A_log, dt_bias: (Hv,), any floating dtype.

    Returns:
        log_decay = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), both (B, T, Hv) float32.
    """
    rate = mx.exp(mx.minimum(A_log.astype(mx.float32), _MAX_A_LOG))
    step = mx.logaddexp(a.astype(mx.float32) + dt_bias.astype(mx.float32), 0.0)
    return -rate * step, mx.sigmoid(b.astype(mx.float32))
