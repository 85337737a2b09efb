"""MLX's own kernel, mx.fast.gated_delta_update, where its result is the one that this package promises.

It rounds the gates to the dtype of q: in bfloat16 a decay of 0.9985 over 512 tokens left a state of 1.0 instead of
0.464 (MLX 0.32.4). So it is taken for float32 activations only, whose gates stay as they are, and has to pass the
self-test before it runs. It checks none of its inputs: what it has no kernel for falls back to the step loop, or reads
out of bounds. Hence the exact list below, read in MLX 0.32.4's source; nobody ran it on Metal for this project.

Its backward on M1 to M4 adds with float atomics, so that two runs differ in the last digits, and takes B Hv T 64 KiB of
scratch. `auto` never takes it.
"""

import re

import mlx.core as mx

from gdkernels.portable.machine import apple_generation, machine
from gdkernels.sizes import Sizes, dtype_name

MLX: str = mx.__version__  # type: ignore[attr-defined]  # missing in MLX's own stubs
# The first release with a gradient.
_SINCE = (0, 32, 4)
_HEAD = 128
_HEADS = ((16, 16), (16, 32), (16, 48), (16, 64), (24, 24), (32, 32))
# On M5 (generation 17) its dispatch picks kernels that the library does not have: these, and all of float16.
_CHUNKED_SINCE = 17
_MISSING_CHUNKED = ((16, 64),)


def rule(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array, chunk_size: int
) -> tuple[mx.array, mx.array]:
    """Readout y (B, T, Hv, Dv) in q's dtype, final state (B, Hv, Dv, Dk) float32; shapes as in the package docstring.

    `chunk_size` has no effect: MLX has its own. The inputs must be ones that `refusal` accepts.
    """
    y, state = mx.fast.gated_delta_update(q, k, v, mx.exp(log_decay), beta, state)
    return y, state.astype(mx.float32)


def refusal(sizes: Sizes) -> str | None:
    """The first condition that these sizes, this device or this MLX do not meet; None if all are met."""
    generation = apple_generation()
    conditions = (
        (hasattr(mx.fast, "gated_delta_update") and _version() >= _SINCE, f"MLX {MLX} is older than 0.32.4"),
        (machine() == "metal", "mx.fast.gated_delta_update has kernels on Metal only"),
        (generation is not None, "MLX does not name the generation of this GPU, on which its kernels depend"),
        (sizes.dtype == mx.float32, f"it would round the gates to {dtype_name(sizes.dtype)}; float32 activations only"),
        (sizes.Dk == sizes.Dv == _HEAD, f"Dk = {sizes.Dk}, Dv = {sizes.Dv}; it has kernels for 128, 128 only"),
        (
            (sizes.Hk, sizes.Hv) in _HEADS,
            f"(Hk, Hv) = ({sizes.Hk}, {sizes.Hv}); it has kernels for {', '.join(map(str, _HEADS))}",
        ),
        (
            generation is None or generation < _CHUNKED_SINCE or (sizes.Hk, sizes.Hv) not in _MISSING_CHUNKED,
            f"MLX 0.32.4 lacks the kernel of (Hk, Hv) = ({sizes.Hk}, {sizes.Hv}) on M5",
        ),
    )
    return next((reason for met, reason in conditions if not met), None)


def text() -> str:
    """What identifies the kernel: it is compiled into MLX."""
    return f"mx.fast.gated_delta_update of MLX {MLX}"


def _version() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", MLX)[:3]))
