"""MLX's memory: limits before a run, figures during it. GB are 1e9 bytes, as mlx-lm prints them."""

from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

# MLX's allocators (malloc, Metal, CUDA) and Metal's command buffers.
_ALLOCATION_FAILED = ("malloc", "unable to allocate", "out of memory", "outofmemory", "insufficient memory")


@dataclass(frozen=True)
class Memory:
    """Peak of the process so far, live buffers, and freed buffers that MLX keeps for reuse; GB."""

    peak_memory_gb: float
    active_memory_gb: float
    cache_memory_gb: float


def read_memory() -> Memory:
    return Memory(mx.get_peak_memory() / 1e9, mx.get_active_memory() / 1e9, mx.get_cache_memory() / 1e9)


def set_limits(memory_gb: float | None, cache_gb: float | None, wired_gb: float | None) -> list[str]:
    """Apply the limits of a config; returns one line for each that has no effect on this device."""
    if memory_gb is not None:
        mx.set_memory_limit(int(memory_gb * 1e9))
    if cache_gb is not None:
        mx.set_cache_limit(int(cache_gb * 1e9))
    if not mx.metal.is_available():
        notes = [] if wired_gb is None else ["wired_limit_gb has no effect here: there is no Metal device"]
        if mx.default_device() == mx.cpu and (memory_gb is not None or cache_gb is not None):
            notes.append("memory_limit_gb and cache_limit_gb are accepted by MLX on a CPU but not enforced")
        return notes
    if wired_gb is not None:
        mx.set_wired_limit(int(wired_gb * 1e9))
    else:
        maybe_set_recommended_wired_limit()
    return []


def is_out_of_memory(error: BaseException) -> bool:
    """Whether MLX raised this because an allocation failed; it has no exception type of its own for that."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _ALLOCATION_FAILED)


def clear_cache_above(threshold: int) -> None:
    """Free MLX's buffer cache when it holds more than `threshold` bytes; 0 frees it after every step, as in mlx-lm."""
    if mx.get_cache_memory() > threshold:
        mx.clear_cache()
