"""The run directory: adapter, resolved config, metrics and checkpoints, and where an earlier run goes."""

import shutil
from pathlib import Path

from gdtrain.errors import UserError

CONFIG_FILE, METRICS_FILE, CHECKPOINTS, BEST = "config.yaml", "metrics.jsonl", "checkpoints", "best"


def prepare_run_directory(folder: Path) -> Path | None:
    """Make the directory. An earlier run in it is moved to `<name>-1`, `<name>-2`, ..., never overwritten.

    Returns:
        Where the earlier run went, or None.

    Raises:
        UserError: the path is a file or cannot be written.
    """
    moved = None
    try:
        if folder.is_dir() and (folder / METRICS_FILE).exists():
            moved = next(p for n in range(1, 10_000) if not (p := folder.with_name(f"{folder.name}-{n}")).exists())
            folder.rename(moved)
        folder.mkdir(parents=True, exist_ok=True)
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
    if folder is None and checkpoint.isdigit():
        folder = checkpoint_folder(run, int(checkpoint))
    if folder is None or not folder.is_dir():
        kept = sorted(p.name for p in (run / CHECKPOINTS).glob("*"))
        known = ["last", *(["best"] if (run / BEST).is_dir() else []), *(str(int(name)) for name in kept)]
        raise UserError(f"--checkpoint: {run} has no {checkpoint!r}; it has: {', '.join(known)}")
    return folder
