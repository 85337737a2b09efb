"""One step on the longest batch of a run, before its first iteration and without a trace in it: memory that does not
suffice shows at once, and not at iteration 128."""

import time
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from gdtrain.arrays import scalar
from gdtrain.data.batches import Batch
from gdtrain.data.conversation import Sample
from gdtrain.memory import clear_cache_above, read_memory
from gdtrain.random_state import read_random_state, set_random_state
from gdtrain.session import Session
from gdtrain.stops import explain_stop, guard
from gdtrain.training.optimizer import build_optimizer
from gdtrain.training.recompute import recomputed_blocks
from gdtrain.training.step import LossAndGradients, Window, accumulate


@dataclass(frozen=True)
class DryStep:
    """What one training step on the longest batch took. rows, positions: B and T of that batch."""

    rows: int
    positions: int
    seconds: float
    peak_memory_gb: float

    def line(self) -> str:
        """For a person."""
        peak = f"{self.peak_memory_gb:.{2 if self.peak_memory_gb >= 1 else 3}f} GB"
        return f"longest batch: {self.rows} x {self.positions} positions, {self.seconds:.1f} s, peak {peak}"

    def record(self) -> dict[str, Any]:
        """For the header of metrics.jsonl."""
        return {
            "longest_batch": [self.rows, self.positions],
            "dry_step_seconds": self.seconds,
            "dry_step_peak_memory_gb": self.peak_memory_gb,
        }


def dry_step(session: Session, step: LossAndGradients, batch: Batch) -> DryStep:
    """Forward, backward and an update on a batch, with all that is in memory then in a run: the optimizer's state, and
    the gradients of the batches before in a window of several.

    Parameters, optimizer and MLX's random state are those of before afterwards. The peak of the process counts anew
    from here on, so that the figures of a run are of its own iterations.

    Args:
        step: that of `build_step` for the session's model; what it compiles here it need not compile again.
        batch: the longest of the run.

    Raises:
        TrainingStopped: there is not enough memory, or the loss or gradient is not finite; rows are named.
    """
    config, model, samples = session.config, session.model, session.data.samples["train"]
    places = [samples[i].where for i in batch.rows]
    was_training, random = model.training, read_random_state()
    mx.reset_peak_memory()
    start = time.perf_counter()
    try:
        model.train()
        with recomputed_blocks(model.layers, config.grad_checkpoint):
            _step(session, step, batch, places)
    except RuntimeError as error:
        stop = explain_stop(error, _name(batch, samples), config, len(model.layers))
        if stop is error:
            raise
        raise stop from error
    finally:
        model.train(was_training)
        set_random_state(random)
    seconds, peak = time.perf_counter() - start, read_memory().peak_memory_gb
    clear_cache_above(config.clear_cache_threshold)
    mx.reset_peak_memory()
    rows, positions = batch.inputs.shape
    return DryStep(rows, positions, seconds, peak)


def _step(session: Session, step: LossAndGradients, batch: Batch, places: list[str]) -> None:
    """As in the loop, but what the update makes is thrown away."""
    config, parameters = session.config, session.model.trainable_parameters()
    optimizer, window = build_optimizer(config), Window()
    optimizer.init(parameters)
    if config.grad_accumulation_steps > 1:
        window.gradients = tree_map(mx.zeros_like, parameters)
    mx.eval(optimizer.state, window.gradients)
    guard("loss", accumulate(step, batch, window), "longest batch", places)
    gradient, norm = window.mean(config.max_grad_norm)
    guard("gradient norm", scalar(norm), "longest batch", places)
    updated = optimizer.apply_gradients(gradient, parameters)
    del gradient
    mx.eval(updated, optimizer.state)


def _name(batch: Batch, samples: list[Sample]) -> str:
    longest = max((samples[i] for i in batch.rows), key=lambda sample: len(sample.ids))
    rows, positions = batch.inputs.shape
    return f"longest batch, B = {rows}, T = {positions}, its longest row {longest.where} with {len(longest.ids)} tokens"
