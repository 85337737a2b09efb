"""The convolution in MLX operations: what the kernels are compared with, and what runs on a CPU."""

import mlx.core as mx


def operations(x: mx.array, weight: mx.array, positions: mx.array | None) -> mx.array:
    """Arguments and result as in the package docstring.

    One shifted product per tap: the gradient is exact for any T, also T < W, and forward and backward take a third of
    the time of mx.conv1d with groups (CPU, 8 x 128 x 512, MLX 0.32.4: 4.8 + 7.6 ms against 15.4 + 26.6 ms).
    """
    T, taps = x.shape[1], weight.shape[1]
    padded = mx.pad(x, [(0, 0), (taps - 1, 0), (0, 0)])
    y = mx.zeros((), mx.float32)
    for tap in range(taps):
        back = taps - 1 - tap
        shifted = padded[:, tap : tap + T].astype(mx.float32)
        if positions is not None and back > 0:
            # Zero by choice, not by a product: nothing of another document gets through, forward or backward.
            shifted = mx.where((positions >= back)[..., None], shifted, 0.0)
        y = y + shifted * weight[:, tap, 0].astype(mx.float32)
    return (y * mx.sigmoid(y)).astype(x.dtype)
