"""Choose a backend once, with the reason as text, and run it on checked inputs."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from gdkernels.chunked import chunked
from gdkernels.contract import check_rule, check_update
from gdkernels.gates import gates
from gdkernels.reference import reference
from gdkernels.replay import replay

Rule = Callable[..., tuple[mx.array, mx.array]]

# Every backend gives all gradients; none is forward-only.
BACKENDS: dict[str, Rule] = {"chunked": chunked, "replay": replay, "reference": reference}


# Tokens of a chunk where the caller leaves the choice. Two cores of a Xeon 2.8 GHz, MLX 0.32.4, 2026-11-30, `chunked`
# forward + backward, float32, (Hk, Hv, Dk, Dv) = (4, 8, 64, 64), T = 1024: 537, 523 and 948 ms with 16, 32 and 64 (MLX
# multiplies at about 3 GFLOP/s there, and the work within a chunk grows with it); (16, 32, 128, 128), T = 512: 3.1, 2.9
# and 3.3 s, peaks 414, 298 and 255 MB. On a GPU longer chunks mean fewer steps one after another.
_CPU_CHUNK, _GPU_CHUNK = 32, 64


@dataclass(frozen=True)
class Choice:
    """The backend that will run, and why."""

    backend: str
    reason: str


def explain(
    B: int, T: int, Hk: int, Hv: int, Dk: int, Dv: int, dtype: mx.Dtype = mx.float32, backend: str = "auto"
) -> Choice:
    """Which backend a call with these sizes takes, and why.

    Args:
        B, T, Hk, Hv, Dk, Dv: sizes as in the package docstring; dtype: of q, k and v.
        backend: "auto", or the name of one in BACKENDS.

    Raises:
        ValueError: the backend does not exist here, or Hv is not a multiple of Hk.
    """
    if Hv % Hk:
        raise ValueError(f"value heads must be a multiple of key heads: Hv = {Hv}, Hk = {Hk}")
    if backend == "auto":
        return Choice("chunked", f"{_device()}; exact gradients for any shape, chunk by chunk in parallel")
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not available here; available: auto, {', '.join(BACKENDS)}")
    return Choice(backend, "asked for")


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
    if chunk_size is None:
        chunk_size = _CPU_CHUNK if mx.default_device() == mx.cpu else _GPU_CHUNK
    check_rule(q, k, v, log_decay, beta, state, segments, chunk_size)
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    choice = explain(B, T, Hk, Hv, Dk, Dv, q.dtype, backend)
    if segments is not None:
        log_decay = _empty_state_at_boundaries(log_decay, segments)
    if state is None:
        state = mx.zeros((B, Hv, Dv, Dk), mx.float32)
    return BACKENDS[choice.backend](q, k, v, log_decay, beta, state, chunk_size)


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


def _device() -> str:
    """The default device, and whether MLX multiplies float32 matrices in TF32 there (relative error about 5e-4)."""
    if mx.default_device() == mx.cpu:
        return "CPU device"
    name = "Metal device" if mx.metal.is_available() else "CUDA device"
    # M1 to M4 (applegpu_g13 to g16) multiply in float32.
    generation = re.match(r"applegpu_g(\d+)", str(mx.device_info().get("architecture")))
    rounds = generation is None or int(generation[1]) >= 17
    if rounds and os.environ.get("MLX_ENABLE_TF32") != "0":
        name += ", float32 products in TF32 (MLX_ENABLE_TF32=0 makes them exact)"
    return name
