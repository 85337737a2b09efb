"""gdtrain init: a commented config for a model, as large as this machine's memory allows."""

import json
import re
from pathlib import Path

from rich.console import Console

from gdtrain.bench.estimate import find_budget
from gdtrain.config import RunConfig
from gdtrain.config_file import load_config
from gdtrain.errors import UserError
from gdtrain.files import write_text
from gdtrain.model.load import find_model
from gdtrain.model.tiny_path import TINY
from gdtrain.output_file import check_output
from gdtrain.plan.forecast import Planner

# Longer rows are seldom what a first run needs, and shorter ones cut most conversations.
_LENGTHS = (4096, 2048, 1024, 512, 256)
_BATCHES = (4, 2, 1)
_ROWS_OF_AN_UPDATE = 8

_TEXT = """\
# gdtrain finetune {file}
#
# Before: gdtrain check {file}     rows, lengths, and what is supervised
#         gdtrain plan {file}      memory by part: {peak:.3g} of {budget:.3g} GB ({source}) when this was written

model: {model}
data: {data}                      # train.jsonl, better with valid.jsonl; one conversation a line
adapter_path: runs/{name}         # adapter, best adapter, checkpoints, metrics.jsonl and report.html

max_seq_length: {length}          # the longest rows, up to 4096, that this machine's memory is forecast to hold
mask_prompt: true                 # the loss is on the answers only

batch_size: {batch}               # more rows at once only where memory is left
grad_accumulation_steps: {steps}  # batches in an update: {rows} rows
epochs: 2                         # passes over the rows; or iters, in batches
learning_rate: 1e-4               # usual for LoRA with a scale of 2
max_grad_norm: 1.0                # one odd batch does not spoil the run
lora_parameters:
  rank: 16                        # room for a style and a format; more for new knowledge
  alpha: 32                       # scale = alpha / rank = 2

steps_per_eval: 100               # often enough to catch the best adapter
save_every: 100                   # --resume goes on from the newest checkpoint
"""


def run_init(model: str, output: Path, *, data: str, budget_gb: float | None) -> None:
    """Write the config and say what it is made for.

    Raises:
        UserError: the model is not found or not one this tool trains, even one short row does not fit, or the file is
            there already or cannot be written.
    """
    console = Console(highlight=False)
    if budget_gb is not None and not budget_gb > 0:
        raise UserError(f"--budget-gb: {budget_gb:g}; accepted: a number above 0")
    if output.exists():
        raise UserError(f"--output: {output} is there already; accepted: a new file")
    check_output("--output", output)
    is_here = model == TINY or Path(model).expanduser().exists()
    budget, source = find_budget(budget_gb)
    length, batch, peak = _fit(model if is_here else str(find_model(model).folder), budget)
    rows = max(batch, _ROWS_OF_AN_UPDATE)
    name = "tiny" if model == TINY else Path(model).name
    text = _TEXT.format(
        file=output,
        model=_scalar(model),
        data=_scalar(data),
        name=name.lower(),
        length=length,
        batch=batch,
        steps=rows // batch,
        rows=rows,
        peak=peak / 1e9,
        budget=budget / 1e9,
        source=source,
    )
    try:
        write_text(output, _aligned(text))
    except OSError as error:
        raise UserError(f"--output: {output} cannot be written: {error.strerror}") from error
    load_config(output)
    size = f"rows of up to {length} tokens, {batch} at a time"
    console.print(
        f"{output}: {size}, about {peak / 1e9:.3g} of {budget / 1e9:.3g} GB ({source})", markup=False, soft_wrap=True
    )
    console.print(f"next: put your rows into {data}, then gdtrain check {output}", markup=False, soft_wrap=True)


def _fit(folder: str, budget: int) -> tuple[int, int, int]:
    """max_seq_length, batch_size and the peak that is forecast for them, bytes: the longest rows first, then as many of
    them as fit with something to spare."""
    lora = {"rank": 16, "alpha": 32}
    planner = Planner(RunConfig(model=folder, data="data", lora_parameters=lora, grad_accumulation_steps=8))  # type: ignore[arg-type]
    for length in _LENGTHS:
        for batch in _BATCHES:
            forecast = planner.forecast(batch, min(length, planner.longest))
            if forecast.label(budget) == "fits":
                return min(length, planner.longest), batch, forecast.total
    raise UserError(
        f"no config fits {budget / 1e9:.3g} GB: one row of {_LENGTHS[-1]} tokens is forecast to take "
        f"{forecast.total / 1e9:.3g} GB; accepted: a smaller model, or one quantised to 4 bits"
    )


def _scalar(text: str) -> str:
    """As YAML reads it back."""
    return text if re.fullmatch(r"[\w./~@-]+", text) else json.dumps(text, ensure_ascii=False)


def _aligned(text: str) -> str:
    """With all comments behind values in one column."""
    lines = [line.split("  # ", 1) if not line.startswith("#") else [line] for line in text.splitlines()]
    width = max(len(line[0].rstrip()) for line in lines if len(line) == 2)
    return "".join((f"{x[0].rstrip():<{width}} # {x[1].strip()}" if len(x) == 2 else x[0]) + "\n" for x in lines)
