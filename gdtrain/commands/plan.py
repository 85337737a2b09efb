"""gdtrain plan: the forecast of a run's peak memory, from its config and the model's config.json alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from gdtrain.bench.estimate import find_budget
from gdtrain.config_file import load_config
from gdtrain.errors import UserError
from gdtrain.output_file import check_output, write_json
from gdtrain.plan.forecast import Forecast, Part, Planner
from gdtrain.plan.search import SEQUENCE_STEP, largest_batch, longest_rows


def run_plan(
    config_file: Path,
    overrides: list[str],
    *,
    max_seq: bool,
    max_batch: bool,
    budget_gb: float | None,
    json_file: Path | None,
) -> bool:
    """Print the forecast and whether it fits the budget.

    Args:
        max_seq, max_batch: for the longest rows or the largest batch that fit, instead of those of the config.

    Raises:
        UserError: the config or the model cannot be read.

    Returns:
        Whether the run fits, tightly or not.
    """
    console = Console(highlight=False)
    if max_seq and max_batch:
        raise UserError("--max-seq and --max-batch exclude each other: one of the two is searched for")
    if budget_gb is not None and not budget_gb > 0:
        raise UserError(f"--budget-gb: {budget_gb:g}; accepted: a number above 0")
    check_output("--json", json_file)
    planner = Planner(load_config(config_file, overrides))
    budget, source = find_budget(budget_gb)
    rows, tokens = planner.config.batch_size, planner.config.max_seq_length
    fault = None
    if max_seq:
        found = longest_rows(planner, budget)
        fault = None if found else "not even rows of 64 tokens fit"
        tokens = found or 64
    elif max_batch:
        found = largest_batch(planner, budget)
        fault = None if found else f"not even one row of {tokens} tokens fits"
        rows = found or 1
    forecast = planner.forecast(rows, tokens)
    label = forecast.label(budget)
    for line in _lines(planner, forecast, rows, tokens):
        console.print(line, markup=False, soft_wrap=True)
    asked = f"; {f'max_seq_length {tokens}' if max_seq else f'batch_size {rows}'} is the most that fits"
    if max_seq and tokens + SEQUENCE_STEP > planner.longest:
        asked = f"; max_seq_length {tokens} is the most that the model takes"
    fits = label != "will not fit"
    if not fits:
        asked = f"; {fault or _advice(planner, budget)}"
    elif not (max_seq or max_batch):
        asked = ""
    verdict = f"{label}: {forecast.total / 1e9:.2f} of {budget / 1e9:.2f} GB ({source})"
    console.print(verdict + asked, markup=False, soft_wrap=True)
    if json_file is not None:
        limits = {"budget_gb": budget / 1e9, "budget_source": source, "label": label}
        write_json("--json", json_file, _figures(planner, forecast, rows, tokens) | limits)
    return fits


def _lines(planner: Planner, forecast: Forecast, rows: int, tokens: int) -> Iterator[str]:
    config, sizes = planner.config, planner.sizes
    blocks = f"{len(sizes.blocks)} blocks, {planner.delta_nets} of them GDN"
    yield f"model   {config.model}: {sizes.parameters:,} parameters, {blocks}"
    yield f"train   {config.fine_tune_type}, {planner.trainable:,} parameters, {config.optimizer}"
    where = f"{planner.backend} on a {planner.device.label}"
    yield f"step    {rows} x {tokens - 1} positions, {planner.storage.dtype}, {where}"
    yield ""
    for part in forecast.parts:
        yield f"{part.name:>14}  {part.size / 1e9:9.3f} GB{_remark(part)}"
    yield f"{'peak':>14}  {forecast.total / 1e9:9.3f} GB  of a {forecast.moment}"
    yield ""
    for note in _notes(planner):
        yield f"note: {note}"


def _remark(part: Part) -> str:
    more = f"{part.most / 1e9:.3f} at another moment" if part.most > part.size else ""
    remark = ", ".join(filter(None, (part.note, more)))
    return f"  {remark}" if remark else ""


def _notes(planner: Planner) -> Iterator[str]:
    """What the forecast does not know, or takes for granted."""
    config = planner.config
    if planner.storage.assumed:
        yield f"{planner.model.file} has no dtype; bfloat16 is assumed"
    if planner.elsewhere:
        yield f"kernel: {config.kernel} needs a GPU, which this machine has not: planned for a Metal GPU"
    if config.compile:
        yield "compile: true changes what is alive at once; the forecast is of a step that is not compiled"
    if planner.storage.dtype == "float16" and config.dtype is None:
        yield "the weights are float16, which a run refuses unless dtype names it"
    yield f"this forecast is {planner.device.measured}"
    if config.grad_accumulation_steps > 1:
        yield "grad_accumulation_steps: measured peaks were up to 19 % higher where few projections train"
    if config.fine_tune_type == "full" and planner.has_experts:
        yield "full fine-tuning of experts: a measured peak was 11 % higher"


def _advice(planner: Planner, budget: int) -> str:
    found = longest_rows(planner, budget)
    if found is None:
        return "not even rows of 64 tokens fit"
    return f"max_seq_length {found} is the most that fits at batch_size {planner.config.batch_size}"


def _figures(planner: Planner, forecast: Forecast, rows: int, tokens: int) -> dict[str, Any]:
    config = planner.config
    return {
        "model": config.model,
        "parameters": planner.sizes.parameters,
        "trainable_parameters": planner.trainable,
        "fine_tune_type": config.fine_tune_type,
        "batch_size": rows,
        "max_seq_length": tokens,
        "dtype": planner.storage.dtype,
        "device": planner.device.name,
        "kernel": planner.backend,
        "parts_gb": {part.name: part.size / 1e9 for part in forecast.parts},
        "peak_gb": forecast.total / 1e9,
        "peak_of": forecast.moment,
        "notes": list(_notes(planner)),
    }
