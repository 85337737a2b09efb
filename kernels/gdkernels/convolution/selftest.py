"""Whether the kernels give on this device what MLX operations give."""

import warnings
from functools import cache

import mlx.core as mx
import numpy as np

from gdkernels.choice import Choice, describe_device
from gdkernels.convolution.kernel import kernel
from gdkernels.convolution.operations import operations
from gdkernels.portable.machine import Machine, machine
from gdkernels.verdicts import are_left_out

# Two strips and a part of a third, channels that do not fill a threadgroup; the documents begin at 0, 33 and 34.
_T, _CHANNELS, _STARTS = 70, 36, (0, 33, 34)
# Relative L2 to MLX operations on float32 copies of the same inputs. Float32: orders of four products. Others: rounded
# once, when they are stored: by half a unit in the last place at most, 2^-9 and 2^-12.
_BOUNDS = {mx.float32: 1e-5, mx.bfloat16: 2.0e-3, mx.float16: 2.5e-4}


def explain_convolution(dtype: mx.Dtype, weight_dtype: mx.Dtype, taps: int) -> Choice:
    """Which form of the convolution runs here, "kernel" or "operations", and why.

    On a GPU the first call of a process for these arguments runs the self-test; a failure is warned about
    (RuntimeWarning), and MLX operations are taken.
    """
    where = machine()
    if where is None:
        return Choice("operations", describe_device())
    if are_left_out():
        return Choice("kernel", f"{describe_device()}; self-test left out for a test")
    return _tested(where, dtype, weight_dtype, taps)


@cache
def _tested(where: Machine, dtype: mx.Dtype, weight_dtype: mx.Dtype, taps: int) -> Choice:
    """`where` is part of the key only."""
    try:
        error = max(_error(dtype, weight_dtype, taps, documents) for documents in (False, True))
        fault = None if error <= _BOUNDS[dtype] else f"relative error {error:.1e}, bound {_BOUNDS[dtype]:.0e}"
    except Exception as raised:  # compilers and drivers raise what they like; none of it may be trusted
        fault = f"{type(raised).__name__}: {str(raised)[:300]}"
    if fault is None:
        return Choice("kernel", f"{describe_device()}; self-test {error:.0e} ({str(dtype).removeprefix('mlx.core.')})")
    reason = f"the convolution's kernels failed their self-test: {fault} ({describe_device()})"
    warnings.warn(f"gdkernels: {reason}; MLX operations are used", RuntimeWarning, stacklevel=2)
    return Choice("operations", reason)


def _error(dtype: mx.Dtype, weight_dtype: mx.Dtype, taps: int, documents: bool) -> float:
    """The larger relative L2 of y and dx."""
    rng = np.random.default_rng(0)
    x, dy = (mx.array(rng.standard_normal((2, _T, _CHANNELS)).astype(np.float32)).astype(dtype) for _ in range(2))
    weight = mx.array(rng.standard_normal((_CHANNELS, taps, 1)).astype(np.float32)).astype(weight_dtype)
    starts = np.array([max(s for s in _STARTS if s <= t) for t in range(_T)])
    positions = mx.array(np.broadcast_to(np.arange(_T) - starts, (2, _T)).astype(np.int32)) if documents else None
    sides = []
    for form, exact in ((kernel, dtype), (operations, mx.float32)):
        given, cotangent = x.astype(exact), dy.astype(exact)
        (y,), (dx,) = mx.vjp(lambda x, form=form: form(x, weight, positions), [given], [cotangent])
        sides.append([np.array(z.astype(mx.float32), np.float64) for z in (y, dx)])
    errors = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(*sides, strict=True)]
    return max(error if np.isfinite(error) else float("inf") for error in errors)
