"""gdtrain doctor: what this machine is, and which backend of the rule it runs, tested now."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gdkernels import BACKENDS
from gdkernels.selftest import Result, TensorError
from rich.console import Console
from rich.table import Table

from gdtrain.doctor import SHAPES, Report, Status, examine
from gdtrain.errors import UserError
from gdtrain.output_file import check_output, write_json


def run_doctor(*, json_file: Path | None) -> None:
    """Examine and print.

    Raises:
        UserError: the backend that `auto` would run fails its self-test, or the file cannot be written.
    """
    console = Console(highlight=False)
    check_output("--json", json_file)
    with console.status("testing the backends") as status:
        report = examine(lambda what: status.update(f"testing {what}"))
    for name, value in report.machine.items():
        console.print(f"{name:>16}  {value}", markup=False, soft_wrap=True)
    for file in report.cleared:
        text = f"{'removed':>16}  {file}, left by a process that ended in a self-test; it will be run again"
        console.print(text, markup=False, soft_wrap=True)
    lines = ["", "backends of the gated delta rule, bfloat16", *_status_lines(report.statuses), *_reason_lines(report)]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    for model in SHAPES:
        results = {name: report.tests[model, name] for name in BACKENDS if (model, name) in report.tests}
        if model == _MODEL or not all(result.passed for result in results.values()):
            title = f"\nself-test for {model}: relative error to the recurrence; ! is over the bound"
            console.print(title, markup=False, soft_wrap=True)
            console.print(_table(results))
    if json_file is not None:
        write_json("--json", json_file, _figures(report))
    if report.fault is not None:
        raise UserError(f"{report.fault}; `kernel: replay` in the config avoids it")


# The shape whose table is always shown; others where something failed.
_MODEL = next(models for models in SHAPES if "qwen3.5-9b" in models)


def _status_lines(statuses: tuple[Status, ...]) -> list[str]:
    """One line for each backend, or one for each of its states where the models differ."""
    lines = []
    for name in BACKENDS:
        found: dict[tuple[str, str], list[str]] = {}
        for status in statuses:
            if status.backend == name:
                found.setdefault((status.state, status.detail), []).append(status.model)
        for (state, detail), models in found.items():
            lines.append(f"{name:>16}  {state}: {detail}{_where(models)}")
    return lines


def _reason_lines(report: Report) -> list[str]:
    """What `auto` takes and why."""
    found: dict[str, list[str]] = {}
    for status in report.statuses:
        if status.state == "chosen":
            found.setdefault(f"{status.backend}: {report.reasons[status.model]}", []).append(status.model)
    return [f"{'auto':>16}  {choice}{_where(models)}" for choice, models in found.items()]


def _where(models: list[str]) -> str:
    return "" if len(models) == len(SHAPES) else f"  [{'; '.join(models)}]"


def _table(results: dict[str, Result]) -> Table:
    """Rows are tensors in a dtype; a cell is the largest error of the cases."""
    table = Table("", "", box=None, pad_edge=False)
    for name in (*results, "bound"):
        table.add_column(name, justify="right")
    rows: dict[tuple[str, str], dict[str, list[TensorError]]] = {}
    for name, result in results.items():
        for error in result.errors:
            rows.setdefault((error.dtype, error.tensor), {}).setdefault(name, []).append(error)
    for (dtype, tensor), found in rows.items():
        bound = max(error.bound for errors in found.values() for error in errors)
        table.add_row(dtype, tensor, *(_cell(found.get(name, [])) for name in results), f"{bound:.0e}")
    return table


def _cell(errors: list[TensorError]) -> str:
    if not errors:
        return ""
    return f"{max(e.error for e in errors):.0e}{'' if all(e.passed for e in errors) else ' !'}"


def _figures(report: Report) -> dict[str, Any]:
    return {
        "machine": report.machine,
        "backends": [asdict(status) for status in report.statuses],
        "reasons": report.reasons,
        "self_tests": [
            {
                "model": model,
                "backend": name,
                "passed": result.passed,
                "exception": result.exception,
                "seconds": result.seconds,
                "errors": [_error(e) for e in result.errors],
            }
            for (model, name), result in report.tests.items()
        ],
        "cleared": report.cleared,
        "fault": report.fault,
    }


def _error(error: TensorError) -> dict[str, Any]:
    """JSON has no infinity: an error that is not finite becomes null, and does not pass."""
    shown = error.error if math.isfinite(error.error) else None
    return asdict(error) | {"error": shown, "passed": error.passed}
