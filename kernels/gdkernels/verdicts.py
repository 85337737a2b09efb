"""Results of self-tests, kept in the process and on disk, so that a kernel is tested once on a machine and not at every
start.

On disk lie only results that passed, one file each, under a key of all that they depend on: device, system, MLX, the
text of this package and of the kernels, sizes, and whether products are rounded. A failure is found anew in every
process. A file that cannot be read or written is as if it were not there.

A kernel can take the whole process down. So a mark is left while a self-test runs: where one of a process that no
longer exists is found, the kernel has failed, until the mark is removed (`clear_marks`).
"""

import hashlib
import json
import os
import platform
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from gdkernels import selftest
from gdkernels.backends import Backend
from gdkernels.native import MLX
from gdkernels.portable.machine import architecture, is_forced, machine, rounds_to_tf32
from gdkernels.selftest import Probe, Result, TensorError
from gdkernels.sizes import Sizes

_left_out: ContextVar[bool] = ContextVar("_left_out", default=False)
_known: dict[tuple[Any, ...], Result] = {}


def verdict(backend: Backend, sizes: Sizes, *, fresh: bool = False) -> Result:
    """The self-test's result for calls with these sizes, from the process, from disk, or by running it.

    Args:
        fresh: run it whatever is known, and forget that a process may have ended in it.
    """
    known = _in_process(backend, sizes)
    if fresh or known not in _known:
        _known[known] = _on_disk(backend, sizes, fresh) if _is_real() else selftest.run(backend, sizes)
    return _known[known]


def has_failed(backend: Backend, sizes: Sizes) -> bool:
    """Whether the process knows that the self-test failed; nothing is run or read for it."""
    result = _known.get(_in_process(backend, sizes))
    return result is not None and not result.passed


def clear_marks() -> list[Path]:
    """Remove the marks of all processes that ended in a self-test, so that it is run again; the files removed."""
    marks = sorted(cache_folder().glob("selftest-*.running")) if _is_real() else []
    ended = [mark for mark in marks if _ended(mark) is not None]
    for mark in ended:
        _remove(mark)
    forget()
    return [mark for mark in ended if not mark.exists()]


@contextmanager
def left_out(yes: bool = True) -> Iterator[None]:
    """Within it kernels count as good without a self-test, or not: for tests of the kernels themselves."""
    token = _left_out.set(yes)
    try:
        yield
    finally:
        _left_out.reset(token)


def are_left_out() -> bool:
    return _left_out.get()


def forget() -> None:
    """Forget what the process knows; files stay."""
    _known.clear()


def cache_folder() -> Path:
    """Of the user, as the system has it: $XDG_CACHE_HOME/gdkernels, ~/.cache/gdkernels, on macOS ~/Library/Caches."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "gdkernels"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "gdkernels"


def _in_process(backend: Backend, sizes: Sizes) -> tuple[Any, ...]:
    return backend, selftest.probe(sizes), machine(), rounds_to_tf32(), str(mx.default_device())


def _is_real() -> bool:
    """Not where a test stands in for the machine: what is found then is not true of this device."""
    return mx.default_device() != mx.cpu and not is_forced()


def _on_disk(backend: Backend, sizes: Sizes, fresh: bool) -> Result:
    key = _key(backend, selftest.probe(sizes))
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    file = cache_folder() / f"selftest-{backend.name}-{digest}.json"
    mark = file.with_suffix(".running")
    if not fresh:
        if (found := _read(file, key)) is not None:
            return found
        if (process := _ended(mark)) is not None:
            reason = (
                f"process {process} ended while it ran the self-test and left {mark}; without that file, which "
                "`gdtrain doctor` removes, it is run again"
            )
            return Result(backend.name, (), reason, 0.0)
    _write(mark, json.dumps([socket.gethostname(), os.getpid()]))
    try:
        result = selftest.run(backend, sizes)
    finally:
        _remove(mark)
    if result.passed:
        _write(file, json.dumps({"key": key, "result": asdict(result)}))
    else:
        _remove(file)
    return result


def _key(backend: Backend, probe: Probe) -> dict[str, str]:
    return {
        "machine": str(machine()),
        "device": str(mx.device_info().get("device_name", "")),
        "architecture": architecture(),
        "system": platform.platform(),
        "mlx": MLX,
        "gdkernels": _package_digest(),
        "backend": backend.name,
        "kernels": backend.digest,
        "tf32": str(rounds_to_tf32()),
        "sizes": str(probe),
    }


@cache
def _package_digest() -> str:
    """Hash of every text of this package: a changed bound, case or host function calls for a new test."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _read(file: Path, key: dict[str, str]) -> Result | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["key"] != key:
            return None
        errors = tuple(TensorError(**error) for error in found["result"].pop("errors"))
        result = Result(errors=errors, **found["result"])
        return result if result.passed else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(file: Path, text: str) -> None:
    """Whole or not at all: other processes may read and write it now."""
    part = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError:
        _remove(part)


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError:
        return


def _ended(mark: Path) -> int | None:
    """The process that left the mark, if it was on this machine and is no more."""
    try:
        host, process = json.loads(mark.read_text(encoding="utf-8"))
        if host == socket.gethostname() and process > 0:
            os.kill(process, 0)
    except ProcessLookupError:
        return process
    except (OSError, ValueError, TypeError):  # no mark, none of ours, or a process of another user
        return None
    return None
