"""Files a command writes because an option names them: checked before the work, written after it."""

import json
import math
import os
from pathlib import Path
from typing import Any

from gdtrain.errors import UserError


def check_output(option: str, file: Path | None) -> None:
    """Raise UserError if the file could not be written; nothing is created."""
    if file is None:
        return
    folder = file.absolute().parent
    if not folder.is_dir():
        raise UserError(f"{option}: {file} cannot be written: its directory does not exist")
    if file.is_dir():
        raise UserError(f"{option}: {file} cannot be written: it is a directory")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise UserError(f"{option}: {file} cannot be written: permission denied")


def finite(x: float) -> float | None:
    """For JSON, which has no infinity."""
    return x if math.isfinite(x) else None


def write_json(option: str, file: Path, figures: dict[str, Any]) -> None:
    """Raises UserError, for example because the disk is full."""
    try:
        file.write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{option}: {file} cannot be written: {error.strerror}") from error
