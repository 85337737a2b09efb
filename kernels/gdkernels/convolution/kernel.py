"""The convolution as a pair of GPU kernels: x is read once, forward and backward, whatever the number of taps."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import cast

import mlx.core as mx

from gdkernels.convolution.operations import operations
from gdkernels.portable.program import Program, read_text

_HEADERS = (f"{__package__}:taps.h",)
FORWARD = Program(
    "gd_convolution",
    ("x", "weight", "positions", "sizes"),
    ("y",),
    read_text("gdkernels.convolution", "forward.metal"),
    _HEADERS,
)
BACKWARD = Program(
    "gd_convolution_backward",
    ("x", "weight", "positions", "dy", "sizes"),
    ("dx",),
    read_text("gdkernels.convolution", "backward.metal"),
    _HEADERS,
)
THREADS = 128
# Tokens of a thread; TAPS - 1 before them are read twice, in the backward as many behind them too.
STRIP = 32


def kernel(x: mx.array, weight: mx.array, positions: mx.array | None) -> mx.array:
    """Arguments and result as in the package docstring."""
    return _function(positions is not None)(x, weight, *([] if positions is None else [positions]))


@lru_cache
def _function(documents: bool) -> Callable[..., mx.array]:
    @mx.custom_function
    def convolution(x: mx.array, weight: mx.array, *positions: mx.array) -> mx.array:
        return _launch(FORWARD, x, weight, positions)

    @convolution.vjp
    def gradient(primals: Sequence[mx.array], dy: mx.array, y: mx.array) -> Sequence[mx.array]:
        x, weight, *positions = primals
        dx = _launch(BACKWARD, x, weight, positions, dy.astype(x.dtype))
        # Never computed where the weight is frozen, as under LoRA: MLX evaluates what is asked for.
        where = positions[0] if documents else None
        _, (dweight,) = mx.vjp(lambda w: operations(x, w, where), [weight], [dy])
        return [dx, dweight, *(mx.zeros_like(p) for p in positions)]

    return cast(Callable[..., mx.array], convolution)


def _launch(program: Program, x: mx.array, weight: mx.array, positions: Sequence[mx.array], *dy: mx.array) -> mx.array:
    B, T, channels = x.shape
    sizes = _sizes(T, channels)
    constants: dict[str, int | mx.Dtype] = {
        "TAPS": weight.shape[1],
        "STRIP": STRIP,
        "THREADS": THREADS,
        "POSITIONS": bool(positions),
        "ELEMENT": x.dtype,
    }
    return program(
        [x, weight, positions[0] if positions else sizes, *dy, sizes],
        [(x.shape, x.dtype)],
        constants=constants,
        groups=(-(-channels // THREADS), -(-T // STRIP), B),
        threads=THREADS,
    )[0]


@lru_cache(maxsize=256)
def _sizes(T: int, channels: int) -> mx.array:
    # Kept: a new array of the host's would have to reach the GPU before every launch.
    return mx.array([T, channels], mx.int32)
