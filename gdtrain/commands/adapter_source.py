"""The adapter that generate, fuse and export take, and the base it belongs to."""

import json
from dataclasses import dataclass
from pathlib import Path

from gdtrain.config import RunConfig
from gdtrain.config_file import load_config
from gdtrain.errors import UserError
from gdtrain.model.adapter import ADAPTER_CONFIG, ADAPTER_FILE, check_adapter_file
from gdtrain.run_directory import CONFIG_FILE, find_adapter


@dataclass(frozen=True)
class AdapterSource:
    """folder: with the adapter's two files. base: as find_model takes it. config: of the run; None where the folder
    holds an adapter alone."""

    folder: Path
    base: str
    config: RunConfig | None

    @property
    def dtype(self) -> str | None:
        """Of the weights in that run."""
        return self.config.dtype if self.config else None


def is_adapter(target: Path) -> bool:
    """Whether this is a run directory or a folder with an adapter."""
    return (target / CONFIG_FILE).is_file() or (target / ADAPTER_CONFIG).is_file()


def find_source(run: Path, checkpoint: str, base: str | None = None) -> AdapterSource:
    """Find an adapter: that of a run, or one alone, as in a checkpoint's folder.

    Args:
        checkpoint: last, best or an iteration of a run. base: instead of the model that the run names.

    Raises:
        UserError: there is none, or its base is not known.
    """
    if not run.is_dir():
        raise UserError(f"{run} does not exist; accepted: a run directory" if not run.exists() else f"{run} is a file")
    if not is_adapter(run):
        raise UserError(f"{run} is no run directory: it has neither {CONFIG_FILE} nor {ADAPTER_CONFIG}")
    config = load_config(run / CONFIG_FILE) if (run / CONFIG_FILE).is_file() else None
    folder = find_adapter(run, checkpoint)
    check_adapter_file(folder / ADAPTER_FILE)
    base = base or (config.model if config else _base_of(folder / ADAPTER_CONFIG))
    return AdapterSource(folder, base, config)


def _base_of(file: Path) -> str:
    try:
        base = json.loads(file.read_text(encoding="utf-8")).get("model")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"adapter: {file} is not an adapter config: {error!r}") from error
    if not isinstance(base, str):
        raise UserError(f"adapter: {file} names no model; name the base with --model")
    return base
