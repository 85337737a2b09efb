"""The run directory: adapter, resolved config, metrics and checkpoints, and where an earlier run goes."""

import itertools
import os
import shutil
from pathlib import Path

from gdtrain.config import SERVICES
from gdtrain.errors import UserError
from gdtrain.files import recover_folders, remove_folder, write_text
from gdtrain.model.adapter import ADAPTER_CONFIG, ADAPTER_FILE
from gdtrain.run_lock import check_unlocked

CONFIG_FILE, METRICS_FILE, REPORT_FILE = "config.yaml", "metrics.jsonl", "report.html"
CHECKPOINTS, BEST, BEST_FILE = "checkpoints", "best", "validation.json"
_OF_A_RUN = (ADAPTER_FILE, ADAPTER_CONFIG, CONFIG_FILE, METRICS_FILE, REPORT_FILE, CHECKPOINTS, BEST, *SERVICES)


def run_directory(adapter_path: str) -> Path:
    """The directory that a config's adapter_path names; ~ is the home directory."""
    return Path(adapter_path).expanduser()


def check_run_directory(folder: Path, *, resume: bool = False) -> None:
    """Raise UserError if no run can be written there: a file is in the way, rights are missing, another run goes on in
    it, or it is the current directory and holds files of a run that does not go on, which are not moved out of it."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"adapter_path: {folder}: {existing} is a file; accepted: a directory, which need not exist")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"adapter_path: {folder}: {existing} cannot be written")
    check_unlocked(folder)
    if not resume and folder.resolve() == Path.cwd() and (earlier := _left_by_earlier(folder)):
        names = ", ".join(path.name for path in earlier)
        raise UserError(f"adapter_path: {folder} already holds {names}; name another directory, or move them")


def make_run_directory(folder: Path, config: str, *, resume: bool = False) -> Path | None:
    """Make the directory, with the resolved config (YAML) in it.

    What an earlier run or another tool's adapter left there is moved to a new directory beside it, `<name>-1`,
    `<name>-2`, ..., never overwritten. With resume it stays, and the config takes the place of its config.

    Returns:
        Where the earlier files went, or None.

    Raises:
        UserError: the directory cannot be made or written.
    """
    tidy(folder)
    earlier = [] if resume else _left_by_earlier(folder)
    moved = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if earlier:
            moved = next(p for n in itertools.count(1) if not (p := folder.with_name(f"{folder.name}-{n}")).exists())
            moved.mkdir()
            for path in earlier:
                path.rename(moved / path.name)
        write_text(folder / CONFIG_FILE, config)
    except OSError as error:
        raise UserError(f"adapter_path: {folder} cannot be used: {error.strerror}") from error
    return moved


def checkpoint_folder(run: Path, iteration: int) -> Path:
    return run / CHECKPOINTS / f"{iteration:07d}"


def checkpoint_folders(run: Path) -> list[Path]:
    """Folders of checkpoints, oldest first; a file manager may have left files of its own among them."""
    folders = [p for p in (run / CHECKPOINTS).glob("*") if p.name.isdecimal() and p.is_dir()]
    return sorted(folders, key=lambda p: int(p.name))


def set_aside(checkpoint: Path) -> Path:
    """Give a damaged checkpoint a name by which it no longer counts as one. Raises UserError."""
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        return checkpoint.rename(aside)
    except OSError as error:
        raise UserError(f"checkpoint: {checkpoint} cannot be renamed: {error.strerror}") from error


def tidy(run: Path) -> None:
    """Put right what a process left that was killed while it wrote; nobody else writes there now."""
    recover_folders(run / CHECKPOINTS)
    for name in (BEST, *_OF_A_RUN, f"*-{REPORT_FILE}"):
        recover_folders(run, name)


def drop_old_checkpoints(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints. Raises UserError where they cannot be."""
    for old in checkpoint_folders(run)[:-keep]:
        try:
            remove_folder(old)
        except OSError as error:
            raise UserError(f"checkpoint: {old} cannot be removed: {error.strerror}") from error


def list_checkpoints(run: Path) -> list[str]:
    """What `find_adapter` accepts for a run."""
    last, best = (run / ADAPTER_FILE).is_file(), (run / BEST).is_dir()
    return ["last"] * last + ["best"] * best + [str(int(folder.name)) for folder in checkpoint_folders(run)]


def find_adapter(run: Path, checkpoint: str) -> Path:
    """The folder with the adapter of a run: "last", "best" or an iteration.

    Raises:
        UserError: there is no such checkpoint; those that exist are listed.
    """
    if checkpoint == "last":
        return run
    folder = run / BEST if checkpoint == "best" else None
    if folder is None and checkpoint.isdecimal():
        folder = checkpoint_folder(run, int(checkpoint))
    if folder is None or not folder.is_dir():
        raise UserError(
            f"--checkpoint: {run} has no {checkpoint!r}; it has: {', '.join(list_checkpoints(run)) or 'none'}"
        )
    return folder


def _left_by_earlier(folder: Path) -> list[Path]:
    return [path for name in _OF_A_RUN if (path := folder / name).exists()]
