"""The training loop: evaluate, save, step, log."""

from dataclasses import asdict
from typing import Any

import mlx.core as mx

from gdtrain.arrays import flat, scalar
from gdtrain.data.batches import RunBatches
from gdtrain.errors import Interrupted
from gdtrain.evaluation import evaluate_split
from gdtrain.memory import clear_cache_above, read_memory
from gdtrain.model.lora import Adaptation
from gdtrain.reporting.console import RunConsole
from gdtrain.reporting.metrics import MetricsFile
from gdtrain.reporting.report_file import LiveReport
from gdtrain.reporting.sinks import open_sinks
from gdtrain.run_directory import METRICS_FILE, run_directory
from gdtrain.session import Session
from gdtrain.stops import explain_stop, guard
from gdtrain.training.checkpoint import Checkpoint
from gdtrain.training.fingerprint import Fingerprint
from gdtrain.training.optimizer import build_optimizer
from gdtrain.training.progress import Report, Validations
from gdtrain.training.recompute import recomputed_blocks
from gdtrain.training.run_files import RunFiles, Weights
from gdtrain.training.run_state import RunState
from gdtrain.training.step import LossAndGradients, Window, accumulate
from gdtrain.training.stop_requests import StopRequests, stop_requests


def train(
    session: Session,
    adaptation: Adaptation,
    batches: RunBatches,
    step: LossAndGradients,
    *,
    iterations: int,
    header: dict[str, Any],
    fingerprint: Fingerprint,
    resume: Checkpoint | None,
    console: RunConsole,
) -> None:
    """Train as the config says, into its run directory, which exists and holds no other run.

    Iterations are batches, as in mlx-lm; a validation or checkpoint at iteration N comes after N batches, and the
    validation at 0 is of the untrained adapter. The last accumulation window is applied even when it is not full;
    early stopping alone leaves one unfinished, and says so, so that the adapter is the one that was validated.

    Args:
        batches: of the session's training rows.
        step: that of `build_step` for the session's model.
        header: the first record of metrics.jsonl; of a resumed run, the first of its part.
        fingerprint: of this run, kept in its checkpoints.
        resume: where to go on from; the numbers are then those of a run that never stopped.

    Raises:
        TrainingStopped: a loss or gradient that is not finite, or no memory; the last good adapter is saved.
        Interrupted: Ctrl-C or SIGTERM; a checkpoint and the adapter are saved first.
        UserError: the run directory cannot be written, or the checkpoint does not fit.
    """
    config, model = session.config, session.model
    rows, valid = session.data.samples["train"], session.data.samples["valid"]
    folder = run_directory(config.adapter_path)
    state = RunState(build_optimizer(config), Validations(config.early_stopping_patience))
    state.optimizer.init(model.trainable_parameters())
    if resume is not None:
        resume.restore(state, model)
    stream = batches.stream(state.iteration)
    resumed_at = None if resume is None else state.iteration
    settings = config.model_dump(mode="json")
    sinks = open_sinks(config.report_to or [], folder, config.project_name, settings, resumed_at=resumed_at)
    sinks.append(LiveReport(folder, console.line))

    def weights() -> Weights:
        return flat(model.trainable_parameters())

    def good_weights() -> Weights | None:
        # In full fine-tuning a copy would cost as much memory as the model: none is kept.
        return None if adaptation.fine_tune_type == "full" else weights()

    with (
        MetricsFile(folder / METRICS_FILE, sinks) as metrics,
        recomputed_blocks(model.layers, config.grad_checkpoint),
        console.training(iterations, state.iteration),
        stop_requests(console.line) as requests,
    ):
        files = RunFiles(folder, metrics, adaptation, config.model, fingerprint, config.keep_checkpoints)
        metrics.write("header" if resume is None else "resume", iteration=state.iteration, **header)
        good, saved = good_weights(), resumed_at
        size = f"B = {config.batch_size}, T <= {config.max_seq_length - 1}"

        def save_checkpoint() -> None:
            nonlocal saved
            if saved != state.iteration:
                files.save_checkpoint(state, weights())
                saved = state.iteration

        model.train()
        try:
            while True:
                last = state.iteration >= iterations
                if last:
                    save_checkpoint()  # before what only the end brings: a run may go on to more iterations from here
                    if state.window.tokens:
                        _update(session, state)
                if state.report.iterations and (state.iteration % config.steps_per_report == 0 or last):
                    _report(state, metrics, console)
                due = state.iteration % config.steps_per_eval == 0 or last
                if valid and due and state.validated != state.iteration:
                    loss = validate(session, state.iteration, metrics, console, requests)
                    if state.validations.add(loss):
                        files.save_best(state.iteration, weights(), loss)
                    state.validated = state.iteration
                ended = last or state.validations.exhausted
                if ended or (state.iteration > 0 and state.iteration % config.save_every == 0):
                    save_checkpoint()
                if ended:
                    break
                requests.check(state.iteration)

                state.iteration += 1
                state.report.start()
                batch = batches.collate(next(stream)[1])
                size = f"B = {batch.inputs.shape[0]}, T = {batch.inputs.shape[1]}"
                loss = accumulate(step, batch, state.window)
                guard("loss", loss, state.iteration, [rows[i].where for i in batch.rows])
                good = good_weights()  # those that gave this loss: an update may spoil the next one
                if state.iteration % config.grad_accumulation_steps == 0:
                    _update(session, state)
                clear_cache_above(config.clear_cache_threshold)
                state.report.add(loss, batch, sum(len(rows[i].ids) - 1 for i in batch.rows))
                console.advance(state.iteration)
            if state.iteration < iterations:
                tokens = state.window.tokens
                unused = f"; {tokens} tokens of an unfinished window are not applied" if tokens else ""
                console.line(f"stopped early: {state.validations.since_best} validations without a lower loss{unused}")
                metrics.write("stop", iteration=state.iteration, reason="early stopping")
            files.save(state.iteration, weights())
        except (Interrupted, SystemExit) as end:  # rich exits where its output is closed; neither comes within a step
            save_checkpoint()
            files.save(state.iteration, weights())
            metrics.write("stop", iteration=state.iteration, reason=str(end))
            console.line(f"stopped at iteration {state.iteration}; saved: {folder}")
            raise
        except BaseException as error:
            stop = explain_stop(error, f"iteration {state.iteration}, {size}", config, len(model.layers))
            kept = files.keep_good(state.iteration, good, reason=str(stop) or type(stop).__name__)
            console.line(f"stopped at iteration {state.iteration}; {kept}")
            if stop is error:
                raise
            raise stop from error
        requests.check(state.iteration)  # asked for while the last files were written: what follows is left out


def _update(session: Session, state: RunState) -> None:
    """One step of the optimizer with the window's gradients, after which a new window begins."""
    rows, window = session.data.samples["train"], state.window
    gradient, norm = window.mean(session.config.max_grad_norm)
    guard("gradient norm", scalar(norm), state.iteration, [rows[i].where for i in window.rows])
    state.optimizer.update(session.model, gradient)
    del gradient
    mx.eval(session.model.trainable_parameters(), state.optimizer.state)
    state.report.grad_norm, state.window = scalar(norm), Window()


def _report(state: RunState, metrics: MetricsFile, console: RunConsole) -> None:
    values, rate = state.report.finish(), scalar(state.optimizer.learning_rate)
    state.report = Report(grad_norm=state.report.grad_norm)
    metrics.write("train", iteration=state.iteration, learning_rate=rate, **values, **asdict(read_memory()))
    console.train_report(state.iteration, values["loss"], values["tokens_per_second"])


def validate(
    session: Session, iteration: int, metrics: MetricsFile, console: RunConsole, requests: StopRequests
) -> float:
    """The loss on the validation rows after so many iterations, reported.

    Raises:
        TrainingStopped: it is not finite, or the device failed.
        Interrupted: a stop was asked for.
    """

    def progress(done: int, total: int) -> None:
        console.validating(done, total)
        requests.check(iteration)

    when = f"validation at iteration {iteration}"
    result = evaluate_split(session, "valid", session.config.val_batches, when=when, progress=progress)
    peak = read_memory().peak_memory_gb
    console.validation(iteration, result.loss, peak)
    values = {"loss": result.loss, "supervised_tokens": result.supervised_tokens, "seconds": result.seconds}
    metrics.write("val", iteration=iteration, **values, peak_memory_gb=peak)
    return result.loss
