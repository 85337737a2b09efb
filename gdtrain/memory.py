"""MLX's memory: limits before a run, figures during it. GB are 1e9 bytes, as mlx-lm prints them."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from gdtrain.errors import UserError

# MLX's allocators (malloc, Metal, CUDA) and Metal's command buffers.
_ALLOCATION_FAILED = ("malloc", "unable to allocate", "out of memory", "outofmemory", "insufficient memory")
_MOST_GB = 1e5  # a limit above it was meant in bytes or MB


@dataclass(frozen=True)
class Memory:
    """Peak of the process so far, live buffers, and freed buffers that MLX keeps for reuse; GB."""

    peak_memory_gb: float
    active_memory_gb: float
    cache_memory_gb: float


def read_memory() -> Memory:
    return Memory(mx.get_peak_memory() / 1e9, mx.get_active_memory() / 1e9, mx.get_cache_memory() / 1e9)


def set_limits(memory_gb: float | None, cache_gb: float | None, wired_gb: float | None) -> list[str]:
    """Apply the limits of a config, for the rest of the process; None leaves MLX's own, and on Metal the wired limit
    becomes the device's recommended working set, as in mlx-lm.

    Returns:
        One line for each limit that has no effect on this device.

    Raises:
        UserError: a limit that cannot be meant in GB, or a wired limit above what the device accepts.
    """
    limits = {"memory_limit_gb": memory_gb, "cache_limit_gb": cache_gb, "wired_limit_gb": wired_gb}
    sizes = {key: _bytes(key, gb) for key, gb in limits.items() if gb is not None}
    if "memory_limit_gb" in sizes:
        mx.set_memory_limit(sizes["memory_limit_gb"])
    if "cache_limit_gb" in sizes:
        mx.set_cache_limit(sizes["cache_limit_gb"])
    if not mx.metal.is_available():
        notes = [] if wired_gb is None else ["wired_limit_gb has no effect here: there is no Metal device"]
        if mx.default_device() == mx.cpu and (memory_gb is not None or cache_gb is not None):
            notes.append("memory_limit_gb and cache_limit_gb are accepted by MLX on a CPU but not enforced")
        return notes
    if "wired_limit_gb" in sizes:
        _set_wired_limit(sizes["wired_limit_gb"])
    else:
        maybe_set_recommended_wired_limit()
    return []


def limits_in_effect(memory_gb: float | None, cache_gb: float | None, wired_gb: float | None) -> dict[str, Any]:
    """The limits of a config by their keys after `set_limits`, for the header of a run; None where MLX's own holds."""
    if wired_gb is None and mx.metal.is_available():
        recommended = mx.device_info().get("max_recommended_working_set_size")
        wired_gb = None if recommended is None else int(recommended) / 1e9
    return {"memory_limit_gb": memory_gb, "cache_limit_gb": cache_gb, "wired_limit_gb": wired_gb}


def _bytes(key: str, gb: float) -> int:
    if gb > _MOST_GB:
        raise UserError(f"{key}: {gb:g} is more than any machine has; accepted: GB of 1e9 bytes, 24 for example")
    return int(gb * 1e9)


def _set_wired_limit(size: int) -> None:
    try:
        mx.set_wired_limit(size)
    except ValueError as error:  # Metal's: larger than the working set it recommends
        accepted = int(mx.device_info().get("max_recommended_working_set_size", 0)) / 1e9
        raise UserError(
            f"wired_limit_gb: {size / 1e9:g} is more than this device accepts; accepted: up to {accepted:.1f}, or more "
            f"after `sudo sysctl iogpu.wired_limit_mb={-(-size // 2**20)}` ({error})"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether MLX raised this because an allocation failed; it has no exception type of its own for that."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _ALLOCATION_FAILED)


def clear_cache_above(threshold: int) -> None:
    """Free MLX's buffer cache when it holds more than `threshold` bytes; 0 frees it after every step, as in mlx-lm."""
    if mx.get_cache_memory() > threshold:
        mx.clear_cache()
