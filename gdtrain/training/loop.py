"""The training loop: step, report, validate, save."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx

from gdtrain.arrays import flat, scalar
from gdtrain.config import RunConfig
from gdtrain.data.batches import Batch, check_enough, collate, train_stream
from gdtrain.data.conversation import Sample
from gdtrain.errors import Interrupted, TrainingStopped, UserError
from gdtrain.evaluation import evaluate
from gdtrain.memory import clear_cache_above, is_out_of_memory, read_memory
from gdtrain.model.adapter import save_adapter
from gdtrain.model.lora import Adaptation
from gdtrain.reporting.console import RunConsole
from gdtrain.reporting.metrics import MetricsFile
from gdtrain.session import Session
from gdtrain.training.optimizer import build_optimizer
from gdtrain.training.progress import Report, Validations
from gdtrain.training.recompute import recomputed_blocks
from gdtrain.training.run_directory import (
    BEST,
    METRICS_FILE,
    checkpoint_folder,
    drop_old_checkpoints,
    list_checkpoints,
    run_directory,
)
from gdtrain.training.step import LossAndGradients, Window, build_step


def train(
    session: Session,
    adaptation: Adaptation,
    *,
    iterations: int,
    compiled: bool,
    header: dict[str, Any],
    console: RunConsole,
) -> None:
    """Train as the config says, into its run directory, which exists and is empty of earlier runs.

    Iterations are batches, as in mlx-lm; a validation or checkpoint at iteration N comes after N batches, and the
    validation at 0 is of the untrained adapter. The last accumulation window is applied even when it is not full;
    early stopping alone leaves one unfinished, and says so, so that the adapter is the one that was validated.

    Args:
        header: the first record of metrics.jsonl.

    Raises:
        TrainingStopped: a loss or gradient that is not finite, or no memory; the last good adapter is saved.
        Interrupted: Ctrl-C; the adapter is saved first, as it is before any other exception.
        UserError: the run directory cannot be written.
    """
    config, model, samples = session.config, session.model, session.data.samples
    rows = samples["train"]
    folder = run_directory(config.adapter_path)
    optimizer = build_optimizer(config)
    step = build_step(model, compiled=compiled)
    stream = train_stream(rows, config.batch_size, seed=config.seed)
    window, report, validations = Window(), Report(), Validations(config.early_stopping_patience)

    def good_weights() -> dict[str, mx.array] | None:
        # In full fine-tuning a copy would cost as much memory as the model: none is kept.
        return None if adaptation.fine_tune_type == "full" else flat(model.trainable_parameters())

    def save(to: Path, weights: dict[str, mx.array]) -> None:
        save_adapter(to, weights, adaptation, config.model)
        metrics.write("save", iteration=iteration, path=str(to.relative_to(folder)))

    def keep(weights: dict[str, mx.array] | None, reason: str) -> str:
        """Save what is good when the run stops early; returns what became of it. Never hides the reason to stop."""
        try:
            metrics.write("stop", iteration=iteration, reason=reason)
            if weights is None:
                return f"its weights are not saved; saved before: {', '.join(list_checkpoints(folder)) or 'none'}"
            save(folder, weights)
        except UserError as fault:
            return f"the last good weights could not be saved: {fault}"
        return f"the last good weights are in {folder}"

    def validate() -> None:
        try:
            result = evaluate(
                model,
                samples["valid"],
                batch_size=config.batch_size,
                max_seq_length=config.max_seq_length,
                batches=config.val_batches,
                cache_threshold=config.clear_cache_threshold,
                progress=console.validating,
            )
        except TrainingStopped as stop:
            raise TrainingStopped(f"validation at iteration {iteration}: {stop}") from stop
        peak = read_memory().peak_memory_gb
        console.validation(iteration, result.loss, peak)
        values = {"loss": result.loss, "supervised_tokens": result.supervised_tokens, "seconds": result.seconds}
        metrics.write("val", iteration=iteration, **values, peak_memory_gb=peak)
        if validations.add(result.loss):
            save(folder / BEST, flat(model.trainable_parameters()))

    with (
        MetricsFile(folder / METRICS_FILE) as metrics,
        recomputed_blocks(model.layers, config.grad_checkpoint),
        console.training(iterations),
    ):
        metrics.write("header", **header)
        iteration = 0
        good = good_weights()
        try:
            if samples["valid"]:
                validate()
            model.train()
            for iteration in range(1, iterations + 1):
                report.start()
                batch = collate(rows, next(stream)[1], max_tokens=config.max_seq_length)
                loss = accumulate(step, batch, window)
                guard("loss", loss, iteration, [rows[i].where for i in batch.rows])
                good = good_weights()
                if iteration % config.grad_accumulation_steps == 0 or iteration == iterations:
                    gradient, norm = window.mean(config.max_grad_norm)
                    guard("gradient norm", scalar(norm), iteration, [rows[i].where for i in window.rows])
                    optimizer.update(model, gradient)
                    del gradient
                    mx.eval(model.trainable_parameters(), optimizer.state)
                    report.grad_norm, window = scalar(norm), Window()
                clear_cache_above(config.clear_cache_threshold)
                report.add(loss, batch, sum(len(rows[i].ids) - 1 for i in batch.rows))
                console.advance(iteration)
                if iteration % config.steps_per_report == 0 or iteration == iterations:
                    values = report.finish()
                    report = Report(grad_norm=report.grad_norm)
                    rate = scalar(optimizer.learning_rate)
                    metrics.write("train", iteration=iteration, learning_rate=rate, **values, **asdict(read_memory()))
                    console.train_report(iteration, values["loss"], values["tokens_per_second"])
                if samples["valid"] and (iteration % config.steps_per_eval == 0 or iteration == iterations):
                    validate()
                if iteration % config.save_every == 0:
                    save(checkpoint_folder(folder, iteration), flat(model.trainable_parameters()))
                    drop_old_checkpoints(folder, config.keep_checkpoints)
                if validations.exhausted and iteration < iterations:
                    unused = (
                        f"; {window.tokens} tokens of an unfinished window are not applied" if window.tokens else ""
                    )
                    console.line(f"stopped early: {validations.since_best} validations without a lower loss{unused}")
                    metrics.write("stop", iteration=iteration, reason="early stopping")
                    break
            save(folder, flat(model.trainable_parameters()))
        except BaseException as error:
            stop = explain_stop(error, iteration)
            if isinstance(stop, Interrupted | SystemExit):
                good = flat(model.trainable_parameters())
            kept = keep(good, reason=str(stop) or type(stop).__name__)
            console.line(f"stopped at iteration {iteration}; {kept}")
            if stop is error:
                raise
            raise stop from error


def accumulate(step: LossAndGradients, batch: Batch, window: Window) -> float:
    """Add a batch to the window; returns its summed loss, and leaves no other reference to its gradients."""
    loss, gradients = step(batch)
    window.add(gradients, batch)
    mx.eval(loss, window.gradients)
    return scalar(loss)


def explain_stop(error: BaseException, iteration: int) -> BaseException:
    """What the user is told when the loop ends early: the error itself, unless a clearer one is known."""
    if isinstance(error, KeyboardInterrupt):
        return Interrupted(f"interrupted at iteration {iteration}; resume_adapter_file goes on from its weights")
    if is_out_of_memory(error):
        return TrainingStopped(
            f"iteration {iteration}: out of memory; lower max_seq_length, batch_size or lora_parameters.rank, "
            f"or set grad_checkpoint: true ({error})"
        )
    return error


def count_iterations(config: RunConfig, rows: list[Sample]) -> int:
    """The batches of the run: `iters`, or as many as `epochs` takes.

    Raises:
        UserError: fewer rows than a batch has, or with `epochs` too few batches for an accumulation window.
    """
    check_enough(rows, config.batch_size)
    if config.epochs is None:
        return config.iters
    iterations = max(1, round(config.epochs * math.ceil(len(rows) / config.batch_size)))
    if config.grad_accumulation_steps > iterations:
        raise UserError(
            f"grad_accumulation_steps: {config.grad_accumulation_steps} is more than the {iterations} iterations "
            f"of {config.epochs:g} epochs"
        )
    return iterations


def guard(what: str, value: float, iteration: int, places: list[str]) -> None:
    """Stop at the first value that is not finite, naming the samples of the batch or window."""
    if not math.isfinite(value):
        shown = ", ".join(places[:8]) + (f" and {len(places) - 8} more" if len(places) > 8 else "")
        raise TrainingStopped(f"iteration {iteration}: the {what} is {value}; samples: {shown}")
