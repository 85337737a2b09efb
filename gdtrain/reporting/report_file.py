"""report.html of a run directory: made of its metrics.jsonl and config.yaml, and put in place whole."""

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gdtrain.errors import UserError
from gdtrain.reporting.page import render
from gdtrain.run_directory import CONFIG_FILE, METRICS_FILE, REPORT_FILE

_SHARE = 0.01  # of the time of a run that its page may take
_LEAST_SECONDS = 5.0  # between two pages


def write_report(run: Path, *, running: bool = True) -> Path:
    """Write the page of a run directory; a reader meets the old page or the new one, never a part.

    Args:
        running: whether a run without an end is still going on.

    Returns:
        The file.

    Raises:
        UserError: there are no metrics, a line of them cannot be read, or the page cannot be written.
    """
    file = run / REPORT_FILE
    page = render(
        read_records(run / METRICS_FILE), _read_config(run / CONFIG_FILE), name=run.resolve().name, running=running
    )
    partial = run / f"partial-{os.getpid()}-{REPORT_FILE}"  # a run and `gdtrain report` may write at the same time
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"report: {file} cannot be written: {error.strerror or error}") from error
    return file


class LiveReport:
    """Keeps the page of a run up to date, in at most a hundredth of its time: the longer the run, the seldomer. A sink
    of metrics.jsonl, which it reads.

    100,000 train records take 1.2 s of a 2.8 GHz Xeon, 2026-12-01: a page every two minutes.
    """

    def __init__(self, run: Path, say: Callable[[str], None]) -> None:
        """say: is told, once, that the page cannot be written; the run goes on without it."""
        self._run, self._say, self._next = run, say, 0.0

    def log(self, kind: str, iteration: int, values: dict[str, Any]) -> None:
        """Write the page if it is time."""
        start = time.monotonic()
        if start >= self._next:
            self._write()
            end = time.monotonic()
            self._next = max(self._next, end + max(_LEAST_SECONDS, (end - start) / _SHARE))

    def close(self) -> None:
        """Write the page."""
        if self._next < math.inf:
            self._write()

    def _write(self) -> None:
        try:
            write_report(self._run)
        except UserError as fault:
            self._say(f"note: {fault}; the run goes on without its page")
            self._next = math.inf


def read_records(file: Path) -> list[dict[str, Any]]:
    """All records of metrics.jsonl; a last line without its end, of a process that was killed, is left out.

    Raises:
        UserError: there is no such file, or no record in it, or a line is not a JSON object with a kind.
    """
    try:
        *lines, rest = file.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"report: {file} cannot be read: {error.strerror}") from error
    records = [_record(file, number, line) for number, line in enumerate(lines, start=1)]
    if rest:
        with suppress(UserError):  # half a line, which MetricsFile cuts off when the run goes on
            records.append(_record(file, len(lines) + 1, rest))
    if not records:
        raise UserError(f"report: {file} has no record; a run writes the first when its training begins")
    return records


def _record(file: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"report: {file}:{number}: not JSON") from error
    if not isinstance(record, dict) or "kind" not in record:
        raise UserError(f"report: {file}:{number}: not a record; accepted: an object with a kind")
    return record


def _read_config(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        raise UserError(f"report: {file} cannot be read: {error.strerror}") from error
