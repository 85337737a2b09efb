"""Checks of shapes and dtypes: every backend may trust its inputs, because nothing reaches one unchecked."""

import mlx.core as mx

from gdkernels.sizes import Sizes

ACTIVATIONS = (mx.float32, mx.bfloat16, mx.float16)


def check_rule(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array | None,
    segments: mx.array | None,
    chunk_size: int,
) -> None:
    """Raise ValueError with the offending and the accepted shape or dtype. Shapes as in the package docstring."""
    check_heads(q, k, v)
    B, T, _, Dk = q.shape
    Hv, Dv = v.shape[2:]
    _check("log_decay", log_decay, (B, T, Hv), mx.float32)
    _check("beta", beta, (B, T, Hv), mx.float32)
    if state is not None:
        _check("state", state, (B, Hv, Dv, Dk), mx.float32)
    if segments is not None:
        _check("segments", segments, (B, T), mx.int32)
    _check_count("chunk_size", chunk_size)


def check_heads(q: mx.array, k: mx.array, v: mx.array) -> None:
    """As `check_rule`, for q, k and v alone."""
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q {q.shape} must be (B, T, Hk, Dk) and v {v.shape} must be (B, T, Hv, Dv)")
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    if min(q.shape) < 1 or min(v.shape) < 1:
        raise ValueError(f"q {q.shape} and v {v.shape} must have no empty dimension")
    _check_groups(Hk, Hv)
    _check_activation("q", q.dtype)
    _check("k", k, (B, T, Hk, Dk), q.dtype)
    _check("v", v, (B, T, Hv, Dv), q.dtype)


def check_sizes(sizes: Sizes) -> None:
    """As `check_rule`, for sizes without arrays."""
    for name, count in sizes._asdict().items():
        if name != "dtype":
            _check_count("chunk_size" if name == "C" else name, count)
    _check_groups(sizes.Hk, sizes.Hv)
    _check_activation("dtype", sizes.dtype)


def check_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    mask: mx.array | None,
) -> None:
    """As `check_rule`, for the inputs that only the layer-level entry point has. Gates may have any floating dtype."""
    check_heads(q, k, v)
    B, T, Hv = v.shape[:3]
    for name, x, shape in (
        ("a", a, (B, T, Hv)),
        ("b", b, (B, T, Hv)),
        ("A_log", A_log, (Hv,)),
        ("dt_bias", dt_bias, (Hv,)),
    ):
        _check(name, x, shape, None)
        if not mx.issubdtype(x.dtype, mx.floating):
            raise ValueError(f"{name} must be floating, not {x.dtype}")
    if mask is not None:
        _check("mask", mask, (B, T), mx.bool_)


def _check_groups(Hk: int, Hv: int) -> None:
    if Hv % Hk:
        raise ValueError(f"value heads must be a multiple of key heads: Hv = {Hv}, Hk = {Hk}")


def _check_activation(name: str, dtype: mx.Dtype) -> None:
    if not isinstance(dtype, mx.Dtype) or dtype not in ACTIVATIONS:
        raise ValueError(f"{name} must be float32, bfloat16 or float16, not {dtype}")


def _check_count(name: str, count: int) -> None:
    if not isinstance(count, int):
        raise ValueError(f"{name} must be an int, not {count!r}")
    if count < 1:
        raise ValueError(f"{name} must be at least 1, not {count}")


def _check(name: str, x: mx.array, shape: tuple[int, ...], dtype: mx.Dtype | None) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}; accepted here: {shape}")
    if dtype is not None and x.dtype != dtype:
        raise ValueError(f"{name} has dtype {x.dtype}; accepted here: {dtype}")
