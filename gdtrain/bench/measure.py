"""Milliseconds, peak memory and results of a rule on drawn inputs, in this process."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from gdtrain.bench.shapes import Case

# (q, k, v, a, b, state) or (q, k, v, log_decay, beta, state) -> y, final state
Rule = Callable[..., Sequence[mx.array]]
OUTPUTS = ("y", "state")
LAYER_INPUTS = ("q", "k", "v", "a", "b", "state")


@dataclass(frozen=True)
class Timing:
    """Milliseconds of every repetition, and the peak of all of them in bytes.

    The peak is that of MLX's live buffers, so it includes the inputs, outputs and gradients, not MLX's cache.
    """

    forward_ms: list[float]
    both_ms: list[float]
    peak: int

    @property
    def forward(self) -> float:
        """Median of the forward, ms."""
        return statistics.median(self.forward_ms)

    @property
    def both(self) -> float:
        """Median of forward + backward, ms."""
        return statistics.median(self.both_ms)


@dataclass(frozen=True)
class Inputs:
    """Of the layer entry point. `primals` as LAYER_INPUTS, whose gradients are measured; `cotangents` of OUTPUTS."""

    primals: list[mx.array]
    cotangents: list[mx.array]
    A_log: mx.array
    dt_bias: mx.array

    def astype(self, dtype: mx.Dtype) -> "Inputs":
        """The same values with all activations in `dtype`; what is float32 already stays so."""
        return Inputs(
            [x.astype(dtype) for x in self.primals[:5]] + self.primals[5:],
            [self.cotangents[0].astype(dtype), self.cotangents[1]],
            self.A_log,
            self.dt_bias,
        )


def draw_inputs(case: Case, seed: int = 0) -> Inputs:
    """Inputs of the kind that a layer produces: q and k of unit length, q scaled, heads of long and of short memory."""
    B, T, (Hk, Hv, Dk, Dv) = case.B, case.T, case.shape
    dtype = getattr(mx, case.dtype)
    keys = iter(mx.random.split(mx.random.key(seed), 11))

    def draw(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(keys))

    q, k = (_unit(draw(B, T, Hk, Dk)) for _ in range(2))
    tokens = [q * Dk**-0.5, k, draw(B, T, Hv, Dv), draw(B, T, Hv), draw(B, T, Hv)]
    state, dy, dstate = 0.5 * draw(B, Hv, Dv, Dk), draw(B, T, Hv, Dv), draw(B, Hv, Dv, Dk)
    # Rates from 1/100 to 16: mlx-lm draws up to 16, and training makes long memories.
    A_log = mx.random.uniform(np.log(0.01), np.log(16), (Hv,), key=next(keys))
    inputs = Inputs([x.astype(dtype) for x in tokens] + [state], [dy.astype(dtype), dstate], A_log, draw(Hv))
    mx.eval(inputs.primals, inputs.cotangents, inputs.A_log, inputs.dt_bias)
    return inputs


def layer_rule(inputs: Inputs, backend: str, chunk_size: int | None = None) -> Rule:
    """`gdkernels.gated_delta_update` by a backend, as a function of the primals."""
    from gdkernels import gated_delta_update

    def rule(q: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, state: mx.array) -> Sequence[mx.array]:
        gates = (a, b, inputs.A_log, inputs.dt_bias)
        return gated_delta_update(q, k, v, *gates, state, backend=backend, chunk_size=chunk_size)

    return rule


def loop_rule(inputs: Inputs) -> Rule:
    """mlx-lm's training path, its step loop left to automatic differentiation."""
    from mlx_lm.models.gated_delta import gated_delta_update

    def rule(q: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, state: mx.array) -> Sequence[mx.array]:
        return gated_delta_update(q, k, v, a, b, inputs.A_log, inputs.dt_bias, state, use_kernel=False)

    return rule


def measure(
    rule: Rule, primals: list[mx.array], cotangents: list[mx.array], repeats: int | Callable[[float], int]
) -> Timing:
    """Time the forward, and forward + backward with a gradient for every primal; each warmed up by one run.

    Args:
        repeats: timed runs of each, or a function that gives them from the milliseconds of a warm run.
    """

    def both() -> Any:
        return mx.vjp(lambda *x: list(rule(*x)), primals, cotangents)

    # The first run compiles and fills caches; what is learnt from the clock is learnt from a second.
    _run(both)
    count = repeats if isinstance(repeats, int) else repeats(_run(both))
    mx.clear_cache()
    mx.reset_peak_memory()
    both_ms = [_run(both) for _ in range(count)]
    peak = mx.get_peak_memory()
    _run(lambda: rule(*primals))
    return Timing([_run(lambda: rule(*primals)) for _ in range(count)], both_ms, peak)


def pipelined_ms(step: Callable[[], Any], steps: int = 10) -> float:
    """Milliseconds of a step when the GPU always has the next one waiting, as in training."""
    mx.eval(step())
    mx.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        mx.async_eval(step())
    mx.synchronize()
    return 1e3 * (time.perf_counter() - start) / steps


def results(
    rule: Rule, primals: list[mx.array], cotangents: list[mx.array], names: Sequence[str] = LAYER_INPUTS
) -> dict[str, np.ndarray]:
    """y, state and the gradients d<name>, as float32 in the memory of the host, where MLX does not count them."""
    outputs, gradients = mx.vjp(lambda *x: list(rule(*x)), primals, cotangents)
    mx.eval(outputs, gradients)
    named = zip([*OUTPUTS, *("d" + name for name in names)], [*outputs, *gradients], strict=True)
    return {name: np.array(x.astype(mx.float32)) for name, x in named}


def worst_error(got: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> tuple[float, str]:
    """The largest relative L2 of one tensor, and its name; infinite where something is not finite."""
    return max((relative_l2(got[name], want), name) for name, want in exact.items())


def relative_l2(x: np.ndarray, exact: np.ndarray) -> float:
    """Norm of the difference over the norm of `exact`, in float64; infinite where x is not finite."""
    x, exact = x.astype(np.float64), exact.astype(np.float64)
    error = float(np.linalg.norm(x - exact) / np.linalg.norm(exact))
    return error if np.isfinite(error) else float("inf")


def products_are_exact() -> bool:
    """Whether the device multiplies float32 matrices in float32. CUDA and M5 round to TF32 (about 5e-4) by default."""
    x = mx.random.normal((256, 256), key=mx.random.key(0))
    return relative_l2(np.array(x @ x), np.array(x, np.float64) @ np.array(x, np.float64)) < 1e-5


def _run(function: Callable[[], Any]) -> float:
    """Milliseconds until every result is there."""
    start = time.perf_counter()
    mx.eval(function())
    mx.synchronize()
    return 1e3 * (time.perf_counter() - start)


def _unit(x: mx.array) -> mx.array:
    return x / mx.linalg.norm(x, axis=-1, keepdims=True)
