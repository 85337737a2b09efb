"""One run at a time in a run directory."""

import fcntl
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gdtrain.errors import UserError

LOCK_FILE = "run.lock"


def check_unlocked(folder: Path) -> None:
    """Raise UserError if another process trains there now; nothing is created."""
    try:
        with (folder / LOCK_FILE).open("r+", encoding="utf-8") as file:
            _lock(folder, file)
    except OSError:  # no such file, or none of ours: making the run directory says more
        return


@contextmanager
def run_lock(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keep other runs out of a directory, which is made if need be, until the context or the process ends, however it
    does. The file stays: without it two processes could each hold one of that name.

    Raises:
        UserError: another process trains there, or the directory cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"adapter_path: {folder} cannot be used: {error.strerror}") from error
    with file:
        try:
            _lock(folder, file)
        except OSError as error:
            say(f"note: {folder} cannot be locked ({error.strerror}): a second run would not be noticed")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        yield


def _lock(folder: Path, file: IO[str]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise UserError(f"adapter_path: {folder} is in use by a run, {holder}; accepted: another directory") from error
