"""The training loop: evaluate, save, step, log."""

from dataclasses import asdict
from typing import Any

import mlx.core as mx

from gdtrain.arrays import flat, scalar
from gdtrain.data.batches import RunBatches
from gdtrain.errors import Interrupted, TrainingStopped
from gdtrain.evaluation import evaluate
from gdtrain.memory import clear_cache_above, read_memory
from gdtrain.model.lora import Adaptation
from gdtrain.reporting.console import RunConsole
from gdtrain.reporting.metrics import MetricsFile
from gdtrain.session import Session
from gdtrain.training.optimizer import build_optimizer
from gdtrain.training.progress import Report, Validations
from gdtrain.training.recompute import recomputed_blocks
from gdtrain.training.run_directory import METRICS_FILE, run_directory
from gdtrain.training.run_files import RunFiles, Weights
from gdtrain.training.step import LossAndGradients, Window, accumulate
from gdtrain.training.stops import explain_stop, guard


def train(
    session: Session,
    adaptation: Adaptation,
    batches: RunBatches,
    step: LossAndGradients,
    *,
    iterations: int,
    header: dict[str, Any],
    console: RunConsole,
) -> None:
    """Train as the config says, into its run directory, which exists and is empty of earlier runs.

    Iterations are batches, as in mlx-lm; a validation or checkpoint at iteration N comes after N batches, and the
    validation at 0 is of the untrained adapter. The last accumulation window is applied even when it is not full;
    early stopping alone leaves one unfinished, and says so, so that the adapter is the one that was validated.

    Args:
        batches: of the session's training rows.
        step: that of `build_step` for the session's model.
        header: the first record of metrics.jsonl.

    Raises:
        TrainingStopped: a loss or gradient that is not finite, or no memory; the last good adapter is saved.
        Interrupted: Ctrl-C; the adapter is saved first, as it is before any other exception.
        UserError: the run directory cannot be written.
    """
    config, model = session.config, session.model
    rows, valid = session.data.samples["train"], session.data.samples["valid"]
    folder = run_directory(config.adapter_path)
    optimizer = build_optimizer(config)
    stream = batches.stream()
    window, report, validations = Window(), Report(), Validations(config.early_stopping_patience)

    def weights() -> Weights:
        return flat(model.trainable_parameters())

    def good_weights() -> Weights | None:
        # In full fine-tuning a copy would cost as much memory as the model: none is kept.
        return None if adaptation.fine_tune_type == "full" else weights()

    with (
        MetricsFile(folder / METRICS_FILE) as metrics,
        recomputed_blocks(model.layers, config.grad_checkpoint),
        console.training(iterations),
    ):
        files = RunFiles(folder, metrics, adaptation, config.model)
        metrics.write("header", **header)
        iteration, good = 0, good_weights()
        model.train()
        try:
            while True:
                last = iteration == iterations
                if valid and (iteration % config.steps_per_eval == 0 or last):
                    loss = validate(session, iteration, metrics, console)
                    if validations.add(loss):
                        files.save_best(iteration, weights())
                if iteration > 0 and iteration % config.save_every == 0:
                    files.save_checkpoint(iteration, weights(), keep=config.keep_checkpoints)
                if last or validations.exhausted:
                    break

                iteration += 1
                last = iteration == iterations
                report.start()
                batch = batches.collate(next(stream)[1])
                loss = accumulate(step, batch, window)
                guard("loss", loss, iteration, [rows[i].where for i in batch.rows])
                good = good_weights()
                if iteration % config.grad_accumulation_steps == 0 or last:
                    gradient, norm = window.mean(config.max_grad_norm)
                    guard("gradient norm", scalar(norm), iteration, [rows[i].where for i in window.rows])
                    optimizer.update(model, gradient)
                    del gradient
                    mx.eval(model.trainable_parameters(), optimizer.state)
                    report.grad_norm, window = scalar(norm), Window()
                clear_cache_above(config.clear_cache_threshold)
                report.add(loss, batch, sum(len(rows[i].ids) - 1 for i in batch.rows))

                console.advance(iteration)
                if iteration % config.steps_per_report == 0 or last:
                    values = report.finish()
                    report = Report(grad_norm=report.grad_norm)
                    rate = scalar(optimizer.learning_rate)
                    metrics.write("train", iteration=iteration, learning_rate=rate, **values, **asdict(read_memory()))
                    console.train_report(iteration, values["loss"], values["tokens_per_second"])
            if iteration < iterations:
                unused = f"; {window.tokens} tokens of an unfinished window are not applied" if window.tokens else ""
                console.line(f"stopped early: {validations.since_best} validations without a lower loss{unused}")
                metrics.write("stop", iteration=iteration, reason="early stopping")
            files.save(iteration, weights())
        except BaseException as error:
            stop = explain_stop(error, iteration, config)
            if isinstance(stop, Interrupted | SystemExit):
                good = weights()
            kept = files.keep(iteration, good, reason=str(stop) or type(stop).__name__)
            console.line(f"stopped at iteration {iteration}; {kept}")
            if stop is error:
                raise
            raise stop from error


def validate(session: Session, iteration: int, metrics: MetricsFile, console: RunConsole) -> float:
    """The loss on the validation rows after so many iterations, reported.

    Raises:
        TrainingStopped: it is not finite.
    """
    config = session.config
    try:
        result = evaluate(
            session.model,
            session.data.samples["valid"],
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
    return result.loss
