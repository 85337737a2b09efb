"""What this machine is: in short for the head of every JSON with figures, and in full for `gdtrain doctor`.

MLX is imported where it is needed only: what measures may do without it.
"""

import datetime
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("gdtrain", "mlx", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "mlx-cpu", "mlx-lm", "transformers", "numpy")


def describe_machine(device: str) -> dict[str, str | None]:
    """Device (as MLX names it), system, versions and date (ISO). Without MLX: it may be in another process."""
    return {
        "device": device,
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "mlx": installed("mlx"),
        "mlx_lm": installed("mlx-lm"),
        "date": datetime.date.today().isoformat(),
    }


def examine_machine() -> dict[str, str]:
    """Machine, system, versions, device, memory and what its float32 products are, as text: for `gdtrain doctor`."""
    import mlx.core as mx
    from gdkernels.portable.machine import architecture, machine, rounds_to_tf32

    info = mx.device_info()
    kind = {"metal": "Metal GPU", "cuda": "CUDA GPU", None: "CPU"}[machine()]
    name = " ".join(filter(None, [str(info.get("device_name", "")), architecture() and f"({architecture()})"]))
    return {
        "system": f"{platform.platform()}, {platform.machine()}",
        "python": f"{platform.python_version()} ({sys.executable})",
        "packages": ", ".join(f"{package} {found}" for package in _PACKAGES if (found := installed(package))),
        "device": f"{kind}: {name}" if name else kind,
        "memory": _memory(info),
        "float32 products": _products(rounds_to_tf32()),
    }


def installed(package: str) -> str | None:
    """The version of a package, None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _products(rounded: bool) -> str:
    setting = os.environ.get("MLX_ENABLE_TF32")
    shown = "MLX_ENABLE_TF32 is not set" if setting is None else f"MLX_ENABLE_TF32={setting}"
    if rounded:
        return f"rounded to TF32, relative error 5e-4 ({shown}); MLX_ENABLE_TF32=0 makes them exact and slower"
    without_effect = "; it has an effect on CUDA and M5 only" if setting is None else ""
    return f"exact to float32 rounding ({shown}{without_effect})"


def _memory(info: dict[str, Any]) -> str:
    """In GB of 1e9 bytes."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        total = 0
    parts = [f"{total / 1e9:.1f} GB of the machine"] if total else []
    names = {
        "memory_size": "of the device",
        "total_memory": "of the device",
        "free_memory": "free on the device",
        "max_recommended_working_set_size": "recommended at most for the GPU",
        "max_buffer_length": "in one buffer",
    }
    parts += [f"{info[key] / 1e9:.1f} GB {what}" for key, what in names.items() if isinstance(info.get(key), int)]
    return ", ".join(parts) or "unknown"
