"""One row per shape, T, B and backend: measured, or with the reason why not. No fault of a backend ends the others."""

import functools
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from gdkernels import BACKENDS, Choice, explain
from gdkernels.dispatch import AUTO_ON_CPU, AUTO_ON_GPU, default_chunk
from gdkernels.portable.machine import machine
from gdkernels.sizes import Sizes

from gdtrain.bench.estimate import estimate_bytes
from gdtrain.bench.measure import (
    Inputs,
    Rule,
    draw_inputs,
    layer_rule,
    loop_rule,
    measure,
    products_are_exact,
    results,
    worst_error,
)
from gdtrain.bench.shapes import LOOP, Case
from gdtrain.memory import is_out_of_memory

# Timed runs of forward and of forward + backward unless the user says otherwise, and the seconds they may take.
_GPU_REPEATS, _CPU_REPEATS, _TIMED_SECONDS = 20, 5, 10
# Longer rows are left to --slow. The time is that of a short row, scaled: too high for what does chunks in parallel.
_SLOW_SECONDS, _PILOT_TOKENS = 60, 64


@dataclass
class Row:
    """A row of the result. Times are medians in ms, memory in GB of 1e9 bytes, the peak with the inputs in it.

    status is ok, skipped (too large or slow), refused (by the backend) or failed; note says why, or what is lacking.
    """

    shape: str
    Hk: int
    Hv: int
    Dk: int
    Dv: int
    batch: int
    tokens: int
    dtype: str
    backend: str  # as asked for
    path: str = ""  # what really runs
    reason: str = ""  # why this path; that of `auto` where it takes the same
    auto: bool = False  # whether `auto` takes this path
    status: str = "ok"
    note: str = ""
    repeats: int | None = None
    forward_ms: float | None = None
    forward_backward_ms: float | None = None
    peak_memory_gb: float | None = None
    estimated_memory_gb: float | None = None
    bytes_per_token: float | None = None
    error: float | None = None  # worst relative L2 of one tensor, against the exact result from the same inputs
    error_tensor: str = ""
    speedup: float | None = None  # forward + backward of mlx-lm's loop over that of this row


@dataclass(frozen=True)
class Limits:
    """Bytes a row may take; timed runs, None for the default; whether rows that take minutes are run."""

    budget: int
    repeats: int | None = None
    slow: bool = False

    def count(self, ms: float) -> int:
        """Timed runs of something that takes `ms`."""
        if self.repeats is not None:
            return self.repeats
        usual = _CPU_REPEATS if mx.default_device() == mx.cpu else _GPU_REPEATS
        return max(1, min(usual, int(1e3 * _TIMED_SECONDS / max(ms, 1e-3))))


def run_case(case: Case, backends: Sequence[str], limits: Limits) -> Iterator[Row]:
    """The rows of one case, the loop of mlx-lm first, so that the others can be compared with it.

    Args:
        backends: names in gdkernels.BACKENDS, "auto" or LOOP.
    """
    exact = _Exact(case, limits)
    loop_ms = None
    for backend in sorted(backends, key=lambda name: name != LOOP):
        row = _plan(case, backend, limits)
        if row.status == "ok":
            _measure(row, case, limits, exact)
            # What a failed run left behind must not count for the next one.
            gc.collect()
            mx.clear_cache()
        if backend == LOOP:
            loop_ms = row.forward_backward_ms
        if loop_ms and row.forward_backward_ms:
            row.speedup = loop_ms / row.forward_backward_ms
        yield row


def _plan(case: Case, backend: str, limits: Limits) -> Row:
    """The row before it is measured: which path it takes, and whether it fits.

    The sizes first, then a self-test, which compiles and runs kernels.
    """
    row = Row(case.name, *case.shape, case.B, case.T, case.dtype, backend)
    if backend == LOOP:
        row.path, row.reason = LOOP, "mlx_lm.models.gated_delta, use_kernel=False"
        _fit(row, case, limits)
        return row
    expected = _untested(case, "auto")
    row.path = expected if backend == "auto" else _untested(case, backend)
    row.auto = row.path == expected
    if row.path:
        _fit(row, case, limits)
        if row.status == "skipped":
            return row
    try:
        choice, auto = _explain(case, backend), _explain(case, "auto")
    except ValueError as error:
        row.path, row.auto, row.estimated_memory_gb = "", False, None
        row.status, row.note = "refused", _first_line(error)
        return row
    row.auto = auto.backend == choice.backend
    row.path, row.reason = choice.backend, auto.reason if row.auto else choice.reason
    _fit(row, case, limits)  # once more: where a self-test failed, `auto` takes another path
    return row


def _untested(case: Case, backend: str) -> str:
    """The path if its self-test passes; empty where the sizes are refused."""
    names = [backend] if backend != "auto" else AUTO_ON_CPU if machine() is None else AUTO_ON_GPU
    sizes = Sizes(case.B, case.T, *case.shape, getattr(mx, case.dtype), default_chunk())
    return next((name for name in names if BACKENDS[name].refusal(sizes) is None), "")


def _fit(row: Row, case: Case, limits: Limits) -> None:
    needed = estimate_bytes(case, row.path)
    row.estimated_memory_gb = needed / 1e9
    if needed > limits.budget:
        row.status, row.note = "skipped", f"needs {_gb(needed)}, the budget is {_gb(limits.budget)}"


def _measure(row: Row, case: Case, limits: Limits, exact: "_Exact") -> None:
    try:
        if not limits.slow:
            seconds = _pilot(case, row.path, limits)
            if seconds > _SLOW_SECONDS:
                row.status, row.note = "skipped", f"would take about {seconds:,.0f} s; --slow runs it"
                return
        inputs = draw_inputs(case)
        rule = _rule(inputs, row.path)
        timing = measure(rule, inputs.primals, inputs.cotangents, limits.count)
        row.repeats, row.forward_ms, row.forward_backward_ms = len(timing.both_ms), timing.forward, timing.both
        row.peak_memory_gb, row.bytes_per_token = timing.peak / 1e9, timing.peak / (case.B * case.T)
        got = results(rule, inputs.primals, inputs.cotangents)
        del inputs, rule
        if exact.tensors is None:
            row.note = exact.note
        elif row.path == exact.backend and row.dtype == "float32":
            row.note = "the reference of the errors"
        else:
            error, row.error_tensor = worst_error(got, exact.tensors)
            row.error = error if np.isfinite(error) else None
            row.note = "" if np.isfinite(error) else f"{row.error_tensor} is not finite"
    # Whatever a backend raises on this machine belongs into its row; the others are still worth measuring.
    except Exception as error:
        row.status = "failed"
        row.note = "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {_first_line(error)}"


def _explain(case: Case, backend: str) -> Choice:
    return explain(case.B, case.T, *case.shape, getattr(mx, case.dtype), backend=backend)


def _rule(inputs: Inputs, path: str) -> Rule:
    return loop_rule(inputs) if path == LOOP else layer_rule(inputs, path)


def _pilot(case: Case, path: str, limits: Limits) -> float:
    """Seconds that measuring this row would take, from a row of few tokens; 0 where it has few itself."""
    if case.T <= 2 * _PILOT_TOKENS:
        return 0
    short = draw_inputs(case._replace(T=_PILOT_TOKENS))
    timing = measure(_rule(short, path), short.primals, short.cotangents, 1)
    scale = case.T / _PILOT_TOKENS
    both, forward = scale * timing.both, scale * timing.forward
    count = limits.count(both)
    return 1e-3 * ((count + 3) * both + (count + 1) * forward)


class _Exact:
    """What the case should give: made when first asked for, so that it costs nothing where every row is skipped.

    By `chunked` in float32; where the device rounds float32 products to TF32 by `replay`, which has none.
    """

    def __init__(self, case: Case, limits: Limits) -> None:
        self._case, self._limits = case, limits

    @functools.cached_property
    def backend(self) -> str:
        return "chunked" if products_are_exact() else "replay"

    @functools.cached_property
    def _made(self) -> tuple[dict[str, np.ndarray] | None, str]:
        case = self._case._replace(dtype="float32")
        needed = estimate_bytes(case, self.backend)
        if needed > self._limits.budget:
            return None, f"error not measured: the reference needs {_gb(needed)}"
        if not self._limits.slow and (seconds := _pilot(case, self.backend, Limits(0, 1)) / 4) > _SLOW_SECONDS:
            return None, f"error not measured: the reference would take about {seconds:,.0f} s; --slow runs it"
        inputs = draw_inputs(self._case).astype(mx.float32)
        made = results(layer_rule(inputs, self.backend), inputs.primals, inputs.cotangents)
        return made, ""

    @property
    def tensors(self) -> dict[str, np.ndarray] | None:
        return self._made[0]

    @property
    def note(self) -> str:
        return self._made[1]


def _gb(count: float) -> str:
    return f"{count / 1e9:.{1 if count >= 1e9 else 3}f} GB"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
