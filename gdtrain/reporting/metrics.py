"""metrics.jsonl: one JSON object per line, flushed as it is written."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gdtrain.errors import UserError
from gdtrain.reporting.sinks import Sink


class MetricsFile:
    """Appends records to a file, and hands each to the sinks; a context manager. Floats that are not finite become
    null, which JSON can hold.

    Raises UserError when a record cannot be written, for example because the disk is full.
    """

    def __init__(self, path: Path, sinks: Sequence[Sink] = ()) -> None:
        """What a process that was killed left of a last line is cut off, so that every line is a record."""
        self._sinks = sinks
        try:
            _cut_last_line(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"adapter_path: {path} cannot be written: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """All are closed; a fault in that never hides the one that ends the run."""
        faults: list[UserError] = []
        try:
            self._file.close()  # writes once more what a full disk did not take
        except OSError as fault:
            faults.append(self._fault(fault))
        for sink in self._sinks:
            try:
                sink.close()
            except UserError as fault:
                faults.append(fault)
        if faults and error is None:
            raise faults[0]

    def write(self, kind: str, iteration: int, **values: Any) -> None:
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        try:
            self._file.write(json.dumps({"kind": kind, "iteration": iteration, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._fault(error) from error
        for sink in self._sinks:
            sink.log(kind, iteration, values)

    def _fault(self, error: OSError) -> UserError:
        return UserError(f"adapter_path: {self._file.name} cannot be written: {error.strerror}")


def _cut_last_line(path: Path) -> None:
    """Unless it has its end; a record is no longer than a megabyte."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - 2**20))
        file.truncate(start + file.read().rfind(b"\n") + 1)
