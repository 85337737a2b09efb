"""metrics.jsonl: one JSON object per line, flushed as it is written."""

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gdtrain.errors import UserError


class MetricsFile:
    """Appends records to a file; a context manager. Floats that are not finite become null, which JSON can hold.

    Raises UserError when a record cannot be written, for example because the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, kind: str, **values: Any) -> None:
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        try:
            self._file.write(json.dumps({"kind": kind, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"adapter_path: {self._file.name} cannot be written: {error.strerror}") from error
