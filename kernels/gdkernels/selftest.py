"""Outputs and gradients of a backend against the recurrence, on this device: what a kernel must pass to be used.

For two key heads the other side is `reference`, left to automatic differentiation, which shares no formula with the
kernels. For all heads of a model it is `replay`, whose hand-written gradient keeps a few states only. Neither
multiplies matrices: both are exact to float32 rounding also where MLX rounds float32 products to TF32.

The other side runs on the same device, as many heads at a time as a memory limit allows. Peak memory, inputs included,
and time, C = 64, two cores of a Xeon 2.8 GHz, MLX 0.32.4, 2026-11-30:

    (Hk, Hv, Dk, Dv)      two key heads, one dtype and decay    all heads
    (16, 32, 128, 128)    144 MB, 0.4 s                         114 MB, 1.5 s
    (16, 64, 192, 128)    217 MB, 1.2 s                         242 MB, 4.7 s

The inputs are fresh arrays made from numpy, so that a test may run while a caller's function is being traced (tried
under mx.grad, mx.checkpoint, mx.vmap and mx.compile, MLX 0.32.4).
"""

import math
import textwrap
import time
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from gdkernels.backends import Backend, Rule
from gdkernels.portable.machine import rounds_to_tf32
from gdkernels.reference import reference
from gdkernels.replay import replay
from gdkernels.sizes import Sizes, dtype_name

TENSORS = ("y", "state_out", "dq", "dk", "dv", "dlog_decay", "dbeta", "dstate")
_ROUNDED = ("y", "dq", "dk", "dv")  # have the dtype of the activations; the others are float32

# Relative L2 per tensor. A gradient that is 1 % off must fail under every one of them.
# Float32 against float32: up to two of seven digits go to cancellation under strong decays; a log_decay gradient sums
# every pair of tokens around its own, hence five times more.
_BOUND = 2e-5
_DECAY_BOUND = 1e-4
# Both sides round the same value to bfloat16 or float16, and differ by one unit (2^-8 of the value at most) where noise
# of float32 moved it across the middle between two of them. `chunked` and `replay` on a CPU: up to 2e-4.
_ROUNDED_BOUND = 2e-3
# A backend without kernels of its own, where MLX rounds float32 products to TF32. `chunked` on a CPU with operands
# rounded to TF32's ten bits by hand: up to 6e-4 in float32, 1.1e-3 where that is rounded to bfloat16.
_TF32_BOUND = 5e-3


# Tokens of a chunk of `replay` on the exact side.
_REPLAYED = 8
# Of states on the exact side, unless one key head of one row needs more.
_EXACT_BYTES = 150 * 10**6

# Sizes for which a backend is tested where none are given.
QWEN35_9B = Sizes(B=1, T=1024, Hk=16, Hv=32, Dk=128, Dv=128, dtype=mx.bfloat16, C=64)


class Probe(NamedTuple):
    """What may tell the kernels of two calls apart, and hence what a result holds for."""

    Hk: int
    Hv: int
    Dk: int
    Dv: int
    dtype: mx.Dtype
    C: int


@dataclass(frozen=True)
class TensorError:
    """Relative L2 of one tensor, and the bound it is held to; infinite for what is not finite or has a wrong shape."""

    case: str
    dtype: str
    tensor: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True)
class Result:
    """What a self-test found: the errors of every tensor, or the exception that ended it."""

    backend: str
    errors: tuple[TensorError, ...]
    exception: str | None
    seconds: float

    @property
    def passed(self) -> bool:
        return self.exception is None and bool(self.errors) and all(e.passed for e in self.errors)

    @property
    def worst(self) -> TensorError | None:
        """The tensor that is furthest beyond its bound, or nearest to it."""
        return max(self.errors, key=lambda e: e.error / e.bound, default=None)

    def summary(self) -> str:
        """One line: the largest error of each dtype, or what is wrong."""
        if self.exception is not None:
            return textwrap.shorten(self.exception, 300)  # a compiler's may have hundreds of lines
        if not self.passed and self.worst is not None:
            w = self.worst
            failed = len({e.tensor for e in self.errors if not e.passed})
            return (
                f"{failed} of {len(TENSORS)} tensors wrong, worst {w.tensor} ({w.dtype}, {w.case}): relative error "
                f"{w.error:.1e}, bound {w.bound:.0e}"
            )
        largest: dict[str, float] = {}
        for e in self.errors:
            largest[e.dtype] = max(e.error, largest.get(e.dtype, 0.0))
        return ", ".join(f"{error:.0e} ({dtype})" for dtype, error in largest.items())


def run(backend: Backend, sizes: Sizes = QWEN35_9B) -> Result:
    """Compare outputs, final state and all six gradients of `backend` with the recurrence on the default device.

    Args:
        sizes: of the calls that the result is to hold for. Kernels are compiled for head sizes, dtype and chunk, and
            in a few forms for many and for few heads, so these are what is tested, with few tokens.

    Returns:
        A result that failed if anything is wrong: nothing is raised but KeyboardInterrupt and the like.
    """
    start = time.perf_counter()
    errors: list[TensorError] = []
    exception = None
    try:
        for case in _cases(backend, sizes):
            errors += _compare(backend, case)
        if not any(e.dtype == dtype_name(sizes.dtype) for e in errors):
            exception = f"it refuses the self-test: {backend.refusal(_all_heads(sizes).sizes)}"
    except Exception as error:  # compilers, drivers and host functions raise what they like; none of it may be trusted
        exception = f"{type(error).__name__}: {error}"
    finally:
        mx.clear_cache()
    return Result(backend.name, tuple(errors), exception, time.perf_counter() - start)


def probe(sizes: Sizes) -> Probe:
    """Sizes without B and T, of which no kernel text depends."""
    return Probe(sizes.Hk, sizes.Hv, sizes.Dk, sizes.Dv, sizes.dtype, sizes.C)


class _Case(NamedTuple):
    """One comparison; `exact` is the other side."""

    name: str
    decay: str
    sizes: Sizes
    exact: Rule = reference


def _cases(backend: Backend, sizes: Sizes) -> list[_Case]:
    """Those that the backend does not refuse: two key heads in every dtype, and all heads in their own dtype, because
    their number decides the form of some kernels."""
    few = sizes._replace(B=2, T=min(2 * sizes.C + 3, 200), Hk=2, Hv=2 * sizes.Hv // sizes.Hk)
    dtypes = dict.fromkeys((mx.float32, mx.bfloat16, sizes.dtype))
    cases = [_Case(f"{decay} decay", decay, few._replace(dtype=dtype)) for dtype in dtypes for decay in _DECAYS]
    if backend.has_kernels:
        cases.append(_all_heads(sizes))
    return [case for case in cases if backend.refusal(case.sizes) is None]


def _all_heads(sizes: Sizes) -> _Case:
    return _Case("all heads", "mild", sizes._replace(B=2, T=min(sizes.C + 3, 100)), replay)


_DECAYS = {
    # Near 1: rounding them to bfloat16 would show.
    "mild": lambda rng, shape: -np.exp(rng.uniform(math.log(1e-3), math.log(0.5), shape)),
    "strong": lambda rng, shape: -np.exp(rng.uniform(math.log(1e-3), math.log(90.0), shape)),
}


def _compare(backend: Backend, case: _Case) -> list[TensorError]:
    dtype = case.sizes.dtype
    inputs, cotangents = _inputs(case)
    got = _measure(backend.rule, inputs, cotangents, case.sizes.C)
    want = _exact(case, inputs, cotangents)
    return [
        TensorError(case.name, dtype_name(dtype), tensor, _relative_l2(x, exact), _bound(tensor, dtype, backend))
        for tensor, x, exact in zip(TENSORS, got, want, strict=True)
    ]


def _bound(tensor: str, dtype: mx.Dtype, backend: Backend) -> float:
    if rounds_to_tf32() and not backend.has_kernels:
        return _TF32_BOUND
    if tensor in _ROUNDED and dtype != mx.float32:
        return _ROUNDED_BOUND
    return _DECAY_BOUND if tensor == "dlog_decay" else _BOUND


def _inputs(case: _Case) -> tuple[list[mx.array], list[mx.array]]:
    """Inputs of a rule as a layer gives them, and cotangents of y and of the final state.

    A document starts (-inf) in each row: in the first with a chunk, in the second within one. For every second head
    only, so that in the others the state passes from end to end.
    """
    B, T, Hk, Hv, Dk, Dv, dtype, C = case.sizes
    rng = np.random.default_rng([B, T, Hk, Hv, Dk, Dv])
    log_decay = _DECAYS[case.decay](rng, (B, T, Hv))
    log_decay[0, min(C, T - 1), ::2] = log_decay[1, T // 2, ::2] = -np.inf
    q, k = _unit(rng, (B, T, Hk, Dk)) * Dk**-0.5, _unit(rng, (B, T, Hk, Dk))
    v, dy = rng.standard_normal((2, B, T, Hv, Dv))
    beta = 1 / (1 + np.exp(-rng.standard_normal((B, T, Hv))))
    state, d_state = 0.5 * rng.standard_normal((2, B, Hv, Dv, Dk))
    activations = [mx.array(x.astype(np.float32)).astype(dtype) for x in (q, k, v, dy)]
    gates = [mx.array(x.astype(np.float32)) for x in (log_decay, beta, state, d_state)]
    return [*activations[:3], *gates[:3]], [activations[3], gates[3]]


def _measure(rule: Rule, inputs: list[mx.array], cotangents: list[mx.array], C: int) -> list[np.ndarray]:
    outputs, gradients = mx.vjp(partial(_list, rule, C), inputs, cotangents)
    found = [x.astype(mx.float32) for x in (*outputs, *gradients)]
    mx.eval(found)
    return [np.array(x, np.float64) for x in found]


# Axis of the heads in the inputs of a rule, in the cotangents, and in TENSORS.
_INPUT_AXES, _COTANGENT_AXES, _TENSOR_AXES = (2, 2, 2, 2, 2, 1), (2, 1), (2, 1, 2, 2, 2, 2, 2, 1)


def _exact(case: _Case, inputs: list[mx.array], cotangents: list[mx.array]) -> list[np.ndarray]:
    """As `_measure`. Rows of the batch and key heads know nothing of each other, and are taken one after another where
    the memory asks for it."""
    count = _heads_at_once(case)
    rows = []
    for row in range(case.sizes.B):
        parts = []
        for first in range(0, case.sizes.Hk, count):
            part = partial(_part, row=row, first=first, count=count, Hk=case.sizes.Hk)
            own = list(map(part, inputs, _INPUT_AXES)), list(map(part, cotangents, _COTANGENT_AXES))
            parts.append(_measure(case.exact, *own, _REPLAYED))
        rows.append(list(map(np.concatenate, zip(*parts, strict=True), _TENSOR_AXES)))
    return list(map(np.concatenate, zip(*rows, strict=True)))


def _heads_at_once(case: _Case) -> int:
    """Key heads of one row; both rules keep between four and five states of every token at hand (measured)."""
    sizes = case.sizes
    tokens = sizes.T if case.exact is reference else _REPLAYED
    state = 4 * sizes.Hv // sizes.Hk * sizes.Dv * sizes.Dk
    return max(1, _EXACT_BYTES // (4 * tokens * state))


def _part(x: mx.array, axis: int, *, row: int, first: int, count: int, Hk: int) -> mx.array:
    """One row, and `count` key heads from `first` on with their value heads."""
    per_key_head = x.shape[axis] // Hk
    x = mx.moveaxis(x[row : row + 1], axis, 0)
    return mx.moveaxis(x[first * per_key_head : (first + count) * per_key_head], 0, axis)


def _list(rule: Rule, C: int, *arrays: mx.array) -> list[mx.array]:
    q, k, v, log_decay, beta, state = arrays
    return list(rule(q, k, v, log_decay, beta, state, C))


def _relative_l2(x: np.ndarray, exact: np.ndarray) -> float:
    if x.shape != exact.shape or not np.isfinite(x).all():
        return math.inf
    return float(np.linalg.norm(x - exact) / np.linalg.norm(exact))


def _unit(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)
