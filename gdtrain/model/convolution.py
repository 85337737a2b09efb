"""The causal depthwise convolution in front of the rule."""

import mlx.core as mx


def causal_depthwise_convolution(x: mx.array, weight: mx.array) -> mx.array:
    """y_t = sum over w of weight_w x_(t - W + 1 + w), zeros before the first token.

    Args:
        x: (B, T, channels); weight: (channels, W, 1), MLX's layout of a depthwise Conv1d.

    Returns:
        (B, T, channels) in x's dtype, summed in float32 as a convolution primitive would.

    One shifted product per tap: the gradient is exact for any T, also T < W, and forward and backward take a third of
    the time of mx.conv1d with groups (CPU, 8 x 128 x 512, MLX 0.32.4: 4.8 + 7.6 ms against 15.4 + 26.6 ms).
    """
    T, taps = x.shape[1], weight.shape[1]
    padded = mx.pad(x, [(0, 0), (taps - 1, 0), (0, 0)])
    y = padded[:, :T].astype(mx.float32) * weight[:, 0, 0]
    for tap in range(1, taps):
        y = y + padded[:, tap : tap + T].astype(mx.float32) * weight[:, tap, 0]
    return y.astype(x.dtype)
