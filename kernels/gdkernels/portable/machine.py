"""Which machine a portable kernel runs on: Metal, CUDA, or none."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Literal

import mlx.core as mx

Machine = Literal["metal", "cuda"]

_forced: ContextVar[Machine | None] = ContextVar("_forced", default=None)


def machine() -> Machine | None:
    """The machine of the default device; None on a CPU."""
    if _forced.get() is not None:
        return _forced.get()
    if mx.default_device() == mx.cpu:
        return None
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else None


@contextmanager
def force(name: Machine) -> Iterator[None]:
    """Take the branch of one machine whatever the device."""
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def is_forced() -> bool:
    """Whether `force` is at work: the machine is played."""
    return _forced.get() is not None


def architecture() -> str:
    """What MLX calls the GPU, such as applegpu_g16s or sm_90; empty on a CPU."""
    return "" if mx.default_device() == mx.cpu else _gpu_architecture()


@cache
def _gpu_architecture() -> str:
    # Kept: on CUDA device_info asks the driver for the free memory every time.
    return str(mx.device_info().get("architecture", ""))


def shared_bytes(where: Machine) -> int:
    """Threadgroup memory that one threadgroup may have.

    Metal: 32 KB. CUDA by compute capability (CUDA C++ Programming Guide, table of technical specifications): 227 KB on
    Hopper and its successors in data centres, 163 on an A100, 99 on the desktop generations. 48 KB any chip has; so has
    one that is not known here, and the kernels then read device memory directly.
    """
    if where == "metal":
        return 32768
    kilobytes = {"sm_80": 163, "sm_87": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227}
    desktop = {"sm_120": 99, "sm_121": 99}
    return (kilobytes | desktop).get(architecture(), 48) * 1024


def apple_generation() -> int | None:
    """13 for M1, 14 for M2, 15 for M3, 16 for M4, 17 for M5; None elsewhere."""
    found = re.match(r"applegpu_g(\d+)", architecture())
    return int(found[1]) if found else None


def rounds_to_tf32() -> bool:
    """Whether matrix products of float32 are rounded to TF32 (relative error about 5e-4) by MLX on this device.

    CUDA and M5 do so unless MLX_ENABLE_TF32=0; M1 to M4 and CPUs multiply in float32.
    """
    if machine() is None or os.environ.get("MLX_ENABLE_TF32") == "0":
        return False
    generation = apple_generation()
    return machine() == "cuda" or (generation is not None and generation >= 17)
