"""Files that are whole or not there: written beside their place, flushed to the disk, checked, and renamed."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

import mlx.core as mx

PARTIAL, _OLD = "partial-", "old-"
_UINT = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def write_text(file: Path, text: str) -> None:
    """Raises OSError; the file is then as it was."""
    _replace(file, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_tensors(file: Path, tensors: dict[str, mx.array]) -> None:
    """A .safetensors file, which counts only after it was read back and is the same to the last bit.

    Raises:
        OSError, RuntimeError: it cannot be written; the file is then as it was.
    """

    def write(partial: Path) -> None:
        mx.save_safetensors(str(partial), tensors, metadata={"format": "mlx"})
        _compare(partial, tensors)

    _replace(file, write)


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """What `write` puts into the empty folder it is given takes the place of `folder`, which need not exist.

    A process that ends in between leaves the old folder or the new one, under this name or one from which
    `recover_folders` brings it back.

    Raises:
        OSError, and what `write` raises; the folder is then as it was.
    """
    partial, old = (folder.with_name(prefix + folder.name) for prefix in (PARTIAL, _OLD))
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write(partial)
        _flush(partial)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        _flush(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        recover_folders(folder.parent, folder.name)
        raise
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """A process that ends in between does not leave a part under this name. Raises OSError."""
    partial = folder.with_name(PARTIAL + folder.name)
    folder.rename(partial)
    shutil.rmtree(partial)


def recover_folders(parent: Path, pattern: str = "*") -> None:
    """Put right what a process left in `parent` that ended within a function of this file, of files and folders whose
    name fits the pattern: whole folders come back, parts go."""
    for old in parent.glob(_OLD + pattern):
        folder = old.with_name(old.name.removeprefix(_OLD))
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(folder)
    for partial in parent.glob(PARTIAL + pattern):
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def say_fault(error: Exception, path: Path) -> str:
    """Of an error in writing `path`, with the room that is left there."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    return f"{error} ({shutil.disk_usage(existing).free / 1e6:,.3g} MB free on its disk)"


def digest(file: Path) -> str:
    """SHA-256 of the contents. Raises OSError."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _replace(file: Path, write: Callable[[Path], object]) -> None:
    partial = file.with_name(PARTIAL + file.name)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        _flush(partial)
        partial.replace(file)
        _flush(file.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _compare(file: Path, tensors: dict[str, mx.array]) -> None:
    found = cast(dict[str, mx.array], mx.load(str(file), format="safetensors"))
    differ = [name for name in found.keys() | tensors.keys() if not _same(found.get(name), tensors.get(name))]
    if differ:
        raise OSError(f"{file} was written but reads otherwise, in {min(differ)}: is the disk full or faulty?")


def _same(one: mx.array | None, other: mx.array | None) -> bool:
    """Bit by bit: a NaN is itself."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = _UINT[one.dtype.size]
    return bool(mx.array_equal(one.view(bits), other.view(bits)))


def _flush(path: Path) -> None:
    """Of a folder: its entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
