"""Choose a backend, with the reason as text, and run it on checked inputs.

A choice asks each backend whether it refuses the sizes, which is cheap, and looks up its self-test, which runs once for
a machine: at the first `explain` or, without one, at the first call. It may come while the caller's function is traced.
"""

import sys
import warnings

import mlx.core as mx

from gdkernels.backends import BACKENDS, Backend, available
from gdkernels.choice import Choice, describe_device
from gdkernels.contract import check_rule, check_sizes, check_update
from gdkernels.gates import gates
from gdkernels.portable.machine import machine
from gdkernels.sizes import Sizes
from gdkernels.verdicts import are_left_out, has_failed, verdict

# `auto` on a GPU takes the first of these that neither refuses nor fails its self-test. Forward + backward, bfloat16,
# (Hk, Hv, Dk, Dv) = (16, 32, 128, 128), H200, MLX 0.32.4, 2026-11-30: T = 512: `fused` 0.7 ms, `recurrent` 2.9,
# `chunked` 6.4; T = 2048: 1.8, 8.6 and 24.8 ms. `fused` is the fastest at every length measured. Nothing was measured
# on Metal. Never `native`: in bfloat16 it rounds the gates (native.py), in float32 nobody has measured it. `replay` and
# `reference` are slower than `chunked` everywhere.
AUTO_ON_GPU = ("fused", "recurrent", "chunked")
# The kernels are GPU kernels, and `chunked` is the fastest of the rest: 0.53 s against 1.62 s of `replay`
# (benchmarks/rule-cpu.json, two cores of a Xeon 2.8 GHz, 2026-11-30).
AUTO_ON_CPU = ("chunked",)

# Tokens of a chunk where the caller leaves the choice. Two cores of a Xeon 2.8 GHz, MLX 0.32.4, 2026-11-30, `chunked`
# forward + backward, float32, (Hk, Hv, Dk, Dv) = (4, 8, 64, 64), T = 1024: 514, 526 and 599 ms with 16, 32 and 64 (MLX
# multiplies at about 3 GFLOP/s there, and the work within a chunk grows with it); (16, 32, 128, 128), T = 512: 3.1, 2.9
# and 3.3 s, peaks 414, 298 and 255 MB, on one core. On a GPU longer chunks mean fewer steps one after another.
_CPU_CHUNK, _GPU_CHUNK = 32, 64

_ANY_SHAPE = "exact gradients for any shape, chunk by chunk in parallel"
_warned: set[str] = set()


def explain(
    B: int,
    T: int,
    Hk: int,
    Hv: int,
    Dk: int,
    Dv: int,
    dtype: mx.Dtype = mx.float32,
    backend: str = "auto",
    chunk_size: int | None = None,
) -> Choice:
    """Which backend a call with these sizes takes, and why.

    On a GPU the first call runs the self-test of the backend: 44 to 50 s on an H200, whether or not its kernels are
    compiled already. One that fails is warned about (RuntimeWarning, once), and the next is taken.

    Args:
        B, T, Hk, Hv, Dk, Dv: sizes as in the package docstring; dtype: of q, k and v.
        backend: "auto", or the name of one in BACKENDS.
        chunk_size: as for `gated_delta_rule`.

    Raises:
        ValueError: the backend does not exist, cannot run here or fails its self-test, or no call can have these sizes.
    """
    sizes = Sizes(B, T, Hk, Hv, Dk, Dv, dtype, default_chunk() if chunk_size is None else chunk_size)
    check_sizes(sizes)
    chosen, rejected = _choose(sizes, backend)
    selftest = [f"self-test {_selftest(chosen, sizes)}"] if chosen.has_kernels else []
    parts = [", ".join(filter(None, [describe_device(), chosen.products()])), *selftest]
    if backend != "auto":
        return Choice(chosen.name, "; ".join(["asked for", *(parts if machine() else [])]))
    return Choice(chosen.name, "; ".join([*parts, *rejected, *([_ANY_SHAPE] if chosen.name == "chunked" else [])]))


def gated_delta_rule(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    segments: mx.array | None = None,
    *,
    backend: str = "auto",
    chunk_size: int | None = None,
) -> tuple[mx.array, mx.array]:
    """The gated delta rule with gradients for q, k, v, log_decay, beta and state.

    Args: shapes and dtypes as in the package docstring. The initial state belongs to the document of token 0.
        chunk_size: tokens of a chunk; None takes what was measured best on the device, 32 on a CPU and 64 on a GPU.

    Returns:
        y (B, T, Hv, Dv) in q's dtype, final state (B, Hv, Dv, Dk) float32.

    Raises:
        ValueError: a wrong shape or dtype, or a backend that cannot run.
    """
    chunk_size = default_chunk() if chunk_size is None else chunk_size
    check_rule(q, k, v, log_decay, beta, state, segments, chunk_size)
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    chosen, _ = _choose(Sizes(B, T, Hk, Hv, Dk, Dv, q.dtype, chunk_size), backend)
    if segments is not None:
        log_decay = _empty_state_at_boundaries(log_decay, segments)
    if state is None:
        state = mx.zeros((B, Hv, Dv, Dk), mx.float32)
    return chosen.rule(q, k, v, log_decay, beta, state, chunk_size)


def gated_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    backend: str = "auto",
    segments: mx.array | None = None,
    chunk_size: int | None = None,
) -> tuple[mx.array, mx.array]:
    """The rule from a layer's raw gates, with gradients for all eight inputs; the gates are computed in float32.

    Args:
        q, k, v, state, segments: as for `gated_delta_rule`.
        a, b: (B, T, Hv), A_log, dt_bias: (Hv,): as for `gates`.
        mask: (B, T) bool; at False the state stays as it is, y is zero and no gradient flows.

    Returns, Raises: as for `gated_delta_rule`.
    """
    check_update(q, k, v, a, b, A_log, dt_bias, mask)
    log_decay, beta = gates(a, b, A_log, dt_bias)
    if mask is not None:
        log_decay = mx.where(mask[..., None], log_decay, 0.0)
        beta = mx.where(mask[..., None], beta, 0.0)
    y, state = gated_delta_rule(q, k, v, log_decay, beta, state, segments, backend=backend, chunk_size=chunk_size)
    if mask is not None:
        y = mx.where(mask[..., None, None], y, mx.zeros((), y.dtype))
    return y, state


def _empty_state_at_boundaries(log_decay: mx.array, segments: mx.array) -> mx.array:
    """g = 0 exactly at a document's first token: every backend multiplies all that came before by an exact zero,
    forward and backward, because each decay is the exponential of its own sum of log_decay (see decay.py)."""
    starts = segments[:, 1:] != segments[:, :-1]
    starts = mx.pad(starts, [(0, 0), (1, 0)])
    return mx.where(starts[..., None], -mx.inf, log_decay)


def _choose(sizes: Sizes, asked: str) -> tuple[Backend, list[str]]:
    """The backend to run, and what kept those before it from being chosen."""
    if asked != "auto":
        return _forced(sizes, asked), []
    rejected: list[str] = []
    for name in AUTO_ON_CPU if machine() is None else AUTO_ON_GPU:
        fault = _fault(BACKENDS[name], sizes)
        if fault is None:
            return BACKENDS[name], rejected
        rejected.append(f"{name} {fault}")
    raise AssertionError(f"chunked refuses {sizes}")


def _forced(sizes: Sizes, asked: str) -> Backend:
    fault = _fault(BACKENDS[asked], sizes) if asked in BACKENDS else "there is none of this name"
    if fault is not None:
        others = [name for name in available(sizes) if name != asked and not _is_known_to_fail(BACKENDS[name], sizes)]
        raise ValueError(f"backend {asked!r} is not available here: {fault}; available: {', '.join(['auto', *others])}")
    return BACKENDS[asked]


def _fault(backend: Backend, sizes: Sizes) -> str | None:
    """Why a backend cannot be used for these sizes here; a failed self-test is warned about, once."""
    reason = backend.refusal(sizes)
    if reason is not None:
        return f"refused: {reason}"
    if not backend.has_kernels or are_left_out() or (result := verdict(backend, sizes)).passed:
        return None
    fault = f"failed its self-test: {result.summary()}"
    message = f"gdkernels: {backend.name} {fault} ({describe_device()}); it is not used"
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=_callers_stacklevel())
    return fault


def _is_known_to_fail(backend: Backend, sizes: Sizes) -> bool:
    return backend.has_kernels and not are_left_out() and has_failed(backend, sizes)


def _callers_stacklevel() -> int:
    """Of `warnings.warn` in the function that asks: the nearest frame outside this package, so that the warning points
    at the caller's line. Python 3.12 has skip_file_prefixes for it."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "gdkernels":
        level, frame = level + 1, frame.f_back
    return level


def _selftest(backend: Backend, sizes: Sizes) -> str:
    return "left out for a test" if are_left_out() else verdict(backend, sizes).summary()


def default_chunk() -> int:
    """Tokens of a chunk on the default device, where the caller leaves the choice."""
    return _CPU_CHUNK if machine() is None else _GPU_CHUNK
