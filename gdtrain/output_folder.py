"""A folder that a command makes because an option names it: whole, or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gdtrain.errors import UserError


def check_new_folder(option: str, folder: Path) -> None:
    """Raise UserError unless the folder could be made: nothing is there yet but perhaps an empty folder."""
    try:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise UserError(f"{option}: {folder} is there and is no folder; accepted: a new or an empty one")
        if folder.is_dir() and any(folder.iterdir()):
            raise UserError(f"{option}: {folder} is not empty; accepted: a new or an empty folder")
    except OSError as error:
        raise UserError(f"{option}: {folder} cannot be used: {error.strerror}") from error
    existing = next(path for path in folder.absolute().parents if path.exists())
    if not existing.is_dir():
        raise UserError(f"{option}: {folder}: {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{option}: {folder}: {existing} cannot be written")


@contextmanager
def new_folder(option: str, folder: Path, size: int) -> Iterator[Path]:
    """A folder beside `folder` to write into, which takes its name at the end and is removed if there is no end.

    Args:
        size: bytes that will be written, for which there must be room.

    Raises:
        UserError: as check_new_folder, or the disk has too little room or fills up.
    """
    check_new_folder(option, folder)
    folder = folder.absolute()
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if size > free:
            raise UserError(
                f"{option}: {folder} needs {size / 1e9:.3g} GB and the disk has {free / 1e9:.3g} GB free; "
                "free some, or name a folder on another disk"
            )
        partial.mkdir()
        yield partial
        partial.rename(folder)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"{option}: {folder} cannot be written: {reason}") from error
    finally:
        if partial.exists():
            shutil.rmtree(partial, ignore_errors=True)
