"""The causal depthwise convolution in front of the rule, and its SiLU, with exact gradients.

    c_t = sum over w of weight_w x_(t - W + 1 + w), zeros before the first token of a document
    y_t = c_t sigmoid(c_t)

    x           (B, T, channels)    bfloat16, float16 or float32
    weight      (channels, W, 1)    MLX's layout of a depthwise Conv1d
    positions   (B, T)              int32, of each token within its document; None where a row is one document
    y           (B, T, channels)    dtype of x; everything in between is float32

On a GPU two kernels, if they pass a self-test there; on a CPU MLX operations.
"""

import mlx.core as mx

from gdkernels.convolution.kernel import kernel
from gdkernels.convolution.operations import operations
from gdkernels.convolution.selftest import explain_convolution

__all__ = ["causal_convolution", "explain_convolution"]


def causal_convolution(x: mx.array, weight: mx.array, positions: mx.array | None = None) -> mx.array:
    """As in the package docstring; gradients of x and weight.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    _check(x, weight, positions)
    chosen = explain_convolution(x.dtype, weight.dtype, weight.shape[1])
    return (kernel if chosen.backend == "kernel" else operations)(x, weight, positions)


def _check(x: mx.array, weight: mx.array, positions: mx.array | None) -> None:
    if x.ndim != 3 or x.dtype not in (mx.bfloat16, mx.float16, mx.float32):
        raise ValueError(f"x is {x.dtype} {x.shape}; accepted: (B, T, channels) of float32, bfloat16 or float16")
    if weight.ndim != 3 or weight.shape[0] != x.shape[2] or weight.shape[2] != 1 or weight.shape[1] < 1:
        raise ValueError(f"weight is {weight.shape}; accepted: ({x.shape[2]}, W, 1), the channels of x first")
    if positions is not None and (positions.shape != x.shape[:2] or positions.dtype != mx.int32):
        raise ValueError(f"positions are {positions.dtype} {positions.shape}; accepted: int32 {x.shape[:2]}")
