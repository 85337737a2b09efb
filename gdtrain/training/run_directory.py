"""The run directory: adapter, resolved config, metrics and checkpoints, and where an earlier run goes."""

import itertools
import shutil
from pathlib import Path

from gdtrain.errors import UserError
from gdtrain.model.lora import ADAPTER_CONFIG, ADAPTER_FILE

CONFIG_FILE, METRICS_FILE, CHECKPOINTS, BEST = "config.yaml", "metrics.jsonl", "checkpoints", "best"
_OF_A_RUN = (ADAPTER_FILE, ADAPTER_CONFIG, CONFIG_FILE, METRICS_FILE, CHECKPOINTS, BEST)


def run_directory(adapter_path: str) -> Path:
    """The directory that a config's adapter_path names; ~ is the home directory."""
    return Path(adapter_path).expanduser()


def check_run_directory(folder: Path) -> None:
    """Raise UserError if the path is a file or lies below one."""
    for path in (folder, *folder.parents):
        if path.exists():
            if not path.is_dir():
                raise UserError(
                    f"adapter_path: {folder}: {path} is a file; accepted: a directory, which need not exist"
                )
            return


def make_run_directory(folder: Path) -> Path | None:
    """Make the directory. What an earlier run or another tool's adapter left in it is moved to a new directory beside
    it, `<name>-1`, `<name>-2`, ..., never overwritten.

    Returns:
        Where the earlier files went, or None.

    Raises:
        UserError: the directory cannot be made or written.
    """
    earlier = [folder / name for name in _OF_A_RUN if (folder / name).exists()]
    moved = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if earlier:
            if folder.resolve() == Path.cwd():
                raise UserError(f"adapter_path: {folder} holds an earlier run; name another directory, or move it")
            moved = next(p for n in itertools.count(1) if not (p := folder.with_name(f"{folder.name}-{n}")).exists())
            moved.mkdir()
            for path in earlier:
                path.rename(moved / path.name)
        (folder / METRICS_FILE).touch()
    except OSError as error:
        raise UserError(f"adapter_path: {folder} cannot be used: {error.strerror}") from error
    return moved


def checkpoint_folder(run: Path, iteration: int) -> Path:
    return run / CHECKPOINTS / f"{iteration:07d}"


def drop_old_checkpoints(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for old in sorted((run / CHECKPOINTS).iterdir())[:-keep]:
        shutil.rmtree(old)


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
        kept = sorted(p.name for p in (run / CHECKPOINTS).glob("*"))
        known = ["last", *(["best"] if (run / BEST).is_dir() else []), *(str(int(name)) for name in kept)]
        raise UserError(f"--checkpoint: {run} has no {checkpoint!r}; it has: {', '.join(known)}")
    return folder
