"""gdtrain bench-shapes: time, memory and error of every backend on this machine, shape by shape."""

import sys
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
from gdkernels import BACKENDS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable
from rich.text import Text

from gdtrain.bench.estimate import find_budget
from gdtrain.bench.machine import describe_machine
from gdtrain.bench.plot import check_plot, plot
from gdtrain.bench.rows import Limits, Row, run_case
from gdtrain.bench.shapes import LOOP, Case, make_cases
from gdtrain.bench.table import Table, is_text, plain, tables
from gdtrain.errors import UserError
from gdtrain.output_file import check_output, write_json
from gdtrain.reporting.header import device_name

_NAMES = {"loop": LOOP} | {name: name for name in ("auto", *BACKENDS)}


def run_bench_shapes(
    shapes: list[str],
    *,
    tokens: str | None,
    batch: str | None,
    backend: str,
    dtype: str,
    json_file: Path | None,
    plot_file: Path | None,
    repeats: int | None,
    budget_gb: float | None,
    slow: bool,
) -> None:
    """Measure and print; raises UserError, which is for cli.py."""
    cases = make_cases(shapes, tokens, batch, dtype)
    backends = _parse_backends(backend)
    if repeats is not None and repeats < 1:
        raise UserError(f"--repeats: {repeats}; accepted: 1 and more")
    if budget_gb is not None and not budget_gb > 0:
        raise UserError(f"--budget-gb: {budget_gb:g}; accepted: a number above 0")
    check_output("--json", json_file)
    check_output("--plot", plot_file)
    if plot_file is not None:
        check_plot(plot_file)
    budget, source = find_budget(budget_gb)
    machine = describe_machine(device_name())
    console = Console(highlight=False)
    head = f"mlx {machine['mlx']}, mlx-lm {machine['mlx_lm']}, {machine['device']}"
    console.print(f"{head}; budget {budget / 1e9:.1f} GB ({source})", markup=False, soft_wrap=True)
    rows: list[Row] = []
    try:
        _measure(cases, backends, Limits(budget, repeats, slow), console, rows)
    finally:
        # Also after Ctrl-C: what was measured took time.
        for table in tables(rows, str(machine["mlx"]), mx.metal.is_available()):
            _print(table, console)
        limits = {"dtype": dtype, "budget_gb": budget / 1e9, "budget_source": source}
        faults = _write(rows, machine | limits, json_file, plot_file)
        if faults and sys.exc_info()[1] is not None:
            # Why it ended decides the exit code, so these are only told.
            for fault in faults:
                print(f"gdtrain: {fault}", file=sys.stderr)
    for row in {row.reason: row for row in rows if row.auto and row.reason}.values():
        console.print(f"auto takes {row.path}: {row.reason}", markup=False, soft_wrap=True)
    console.print(_LEGEND, markup=False, soft_wrap=True)
    if faults:
        raise UserError("; ".join(map(str, faults)))


def _write(
    rows: list[Row], figures: dict[str, object], json_file: Path | None, plot_file: Path | None
) -> list[UserError]:
    """Both files, whether or not the other can be written; returns why not."""
    faults = []
    try:
        if json_file is not None:
            write_json("--json", json_file, figures | {"rows": [asdict(row) for row in rows]})
    except UserError as error:
        faults.append(error)
    try:
        if plot_file is not None and rows:
            plot(rows, plot_file)
    except UserError as error:
        faults.append(error)
    return faults


_LEGEND = """ms: medians of n runs after a warm-up; gradients of q, k, v, a, b and state
peak: of live buffers in forward + backward, inputs and gradients in it
error: worst relative L2 of one tensor (y, state, gradients) against float32 from the same inputs; rounding the results
to bfloat16 alone gives 1.7e-03, to float16 2.1e-04"""


def _parse_backends(text: str) -> list[str]:
    if text == "all":
        return [LOOP, *BACKENDS]
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in _NAMES:
            raise UserError(f"--backend: {name!r} is not available here; accepted: all, {', '.join(_NAMES)}")
    return [_NAMES[name] for name in names]


def _measure(cases: list[Case], backends: list[str], limits: Limits, console: Console, rows: list[Row]) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=len(cases) * len(backends))
        for case in cases:
            bar.update(task, description=f"{case.name} T {case.T} B {case.B}")
            for row in run_case(case, backends, limits):
                rows.append(row)
                bar.advance(task)


def _print(table: Table, console: Console) -> None:
    """For a person with colours and folded notes; through a pipe as plain lines."""
    if not console.is_terminal:
        for line in ("", *plain(table)):
            console.print(line, markup=False, soft_wrap=True)
        return
    shown = RichTable(title=table.title, title_justify="left", box=None, pad_edge=False)
    for head in table.heads:
        shown.add_column(head, justify="left" if is_text(head) else "right", overflow="fold")
    for cells in table.cells:
        shown.add_row(*map(Text, cells))
    console.print("", shown)
    for line in table.footnotes:
        console.print(line, markup=False)
