"""metrics.jsonl: one JSON object per line, flushed as it is written."""

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class MetricsFile:
    """Appends records to a file; a context manager. Floats that are not finite become null, which JSON can hold."""

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
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        self._file.flush()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
