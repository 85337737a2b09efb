"""What is known of a run before its model is loaded: what it lacks, its batches and iterations, keys without effect."""

import math
from collections.abc import Iterator
from pathlib import Path

from gdtrain.config import RunConfig
from gdtrain.data.batches import RunBatches, check_enough
from gdtrain.data.sources import missing_split
from gdtrain.errors import UserError
from gdtrain.model.adapter import ADAPTER_FILE, check_adapter_file
from gdtrain.model.swap import check_kernel
from gdtrain.reporting.sinks import check_sinks
from gdtrain.run_directory import check_run_directory, run_directory
from gdtrain.session import Data, Say


def check_places(config: RunConfig, *, resume: bool = False) -> None:
    """Raise UserError for what can be refused before the data is looked at: a kernel or a service that is not there, a
    run directory that cannot be written or is in use, an adapter to begin with or to test that is missing."""
    folder = run_directory(config.adapter_path)
    check_kernel(config.kernel)
    if config.train:
        check_sinks(config.report_to or [])
        check_run_directory(folder, resume=resume)
        if config.resume_adapter_file is not None and not resume:
            check_adapter_file(Path(config.resume_adapter_file).expanduser())
    elif config.test:
        check_adapter_file(folder / ADAPTER_FILE)
    else:
        raise UserError("train: false and test: false leave nothing to do")


def plan_run(config: RunConfig, data: Data, say: Say) -> tuple[RunBatches, int]:
    """The batches of the run and how many iterations it has.

    Raises:
        UserError: there are too few rows for what the config asks.
    """
    rows = data.samples["train"]
    batches = RunBatches(
        rows, config.batch_size, seed=config.seed, max_tokens=config.max_seq_length, packing=config.packing
    )
    iterations = _count_iterations(config, batches)
    updates = math.ceil(iterations / config.grad_accumulation_steps)
    if config.lr_schedule is not None and config.lr_schedule.warmup > updates:
        say(f"warning: lr_schedule.warmup is {config.lr_schedule.warmup}, but the run has {updates} updates")
    if batches.packed_rows is not None:
        say(f"packing: {len(rows):,} rows of data in {batches.packed_rows:,} rows of an epoch")
    say(f"padding: {100 * batches.padding_share:.1f} % of the positions of an epoch")
    if config.test and not data.samples["test"]:
        raise UserError(f"test: true, but {missing_split('test', config.data)}")
    if not data.samples["valid"]:
        if config.early_stopping_patience is not None:
            raise UserError(f"early_stopping_patience: nothing to watch: {missing_split('valid', config.data)}")
        say("warning: there are no validation rows; training goes on without a validation loss")
    return batches, iterations


def notes(config: RunConfig, *, resume: bool = False) -> Iterator[str]:
    """One line for every key that has no effect in this config, or an effect to be warned about."""
    if config.lr_schedule is not None and config.was_set("learning_rate"):
        yield f"learning_rate has no effect: lr_schedule starts at {config.lr_schedule.arguments[0]:g}"
    if config.dtype == "float16":
        yield "float16 has little range: gradients may overflow or vanish where bfloat16 would not"
    if config.fine_tune_type == "full" and config.was_set("lora_parameters"):
        yield "lora_parameters has no effect with fine_tune_type: full"
    if resume and config.resume_adapter_file is not None:
        yield "resume_adapter_file has no effect with --resume, which goes on from a checkpoint"
    if not config.train and config.resume_adapter_file is not None:
        yield "resume_adapter_file has no effect with train: false; the adapter in adapter_path is tested"


def _count_iterations(config: RunConfig, batches: RunBatches) -> int:
    """The batches of the run: `iters`, or as many as `epochs` takes.

    Raises:
        UserError: fewer rows than a batch has, or with `epochs` too few batches for an accumulation window.
    """
    check_enough(batches.samples, config.batch_size, batches.packed_rows)
    if config.epochs is None:
        return config.iters
    iterations = max(1, round(config.epochs * batches.per_epoch))
    if config.grad_accumulation_steps > iterations:
        raise UserError(
            f"grad_accumulation_steps: {config.grad_accumulation_steps} is more than the {iterations} iterations "
            f"of {config.epochs:g} epochs"
        )
    return iterations
