"""The loss of a model on samples: every supervised token counted once, whatever the batch size."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.nn as nn

from gdtrain.arrays import scalar
from gdtrain.data.batches import collate, eval_batches
from gdtrain.data.conversation import Sample
from gdtrain.errors import TrainingStopped
from gdtrain.loss import supervised_positions, token_loss
from gdtrain.memory import clear_cache_above
from gdtrain.model.head import find_head
from gdtrain.session import Session
from gdtrain.stops import explain_stop


@dataclass(frozen=True)
class Evaluation:
    """loss: mean cross-entropy per supervised token, nats. tokens_per_second: all positions, padding left out.
    row_losses: that of each row by its index, where rows were evaluated one by one."""

    loss: float
    rows: int
    supervised_tokens: int
    tokens_per_second: float
    seconds: float
    row_losses: dict[int, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """Infinite where a float cannot hold it."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


class BatchError(RuntimeError):
    """What MLX raised while it worked on a batch of this size."""

    def __init__(self, error: RuntimeError, size: str) -> None:
        super().__init__(str(error))
        self.size = size


def evaluate_split(
    session: Session,
    split: str,
    limit: int,
    *,
    one_by_one: bool = False,
    when: str = "evaluation",
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """`evaluate` on a split of a session, as its config says.

    Args:
        limit: batches at most, -1 for all. when: for messages.

    Raises:
        TrainingStopped: the loss is not finite, or the device failed and it is known what to change.
    """
    config = session.config
    try:
        return evaluate(
            session.model,
            session.data.samples[split],
            batch_size=config.batch_size,
            max_seq_length=config.max_seq_length,
            batches=limit,
            one_by_one=one_by_one,
            cache_threshold=config.clear_cache_threshold,
            progress=progress,
        )
    except TrainingStopped as stop:
        raise TrainingStopped(f"{when}: {stop}") from stop
    except BatchError as error:
        stopped = explain_stop(error, f"{when}, {error.size}", config, len(session.model.layers))
        if stopped is error:
            raise
        raise stopped from error


def evaluate(
    model: nn.Module,
    samples: Sequence[Sample],
    *,
    batch_size: int,
    max_seq_length: int,
    batches: int = -1,
    one_by_one: bool = False,
    cache_threshold: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Evaluate in a fixed order, shortest rows first, without dropout; the model's mode is restored afterwards.

    Args:
        batches: how many batches to take, spread evenly over the lengths; -1 for all.
        one_by_one: whether each of their rows is a batch of its own, which gives row_losses, and takes longer.
        progress: called with (batches done, batches in all).

    Raises:
        TrainingStopped: the loss is not finite.
        BatchError: MLX failed.
    """
    was_training = model.training
    model.eval()
    start, vocabulary = time.perf_counter(), find_head(model).vocabulary
    total, supervised, positions, rows = 0.0, 0, 0, 0
    chosen = eval_batches(samples, batch_size, limit=None if batches == -1 else batches)
    if one_by_one:
        chosen = [[i] for batch in chosen for i in batch]
    row_losses: dict[int, float] = {}
    try:
        for done, indices in enumerate(chosen, start=1):
            batch = collate(samples, indices, max_tokens=max_seq_length)
            try:
                loss = scalar(token_loss(model, batch.inputs, supervised_positions(batch, vocabulary)))
            except RuntimeError as error:
                rows_, positions_ = batch.inputs.shape
                raise BatchError(error, f"B = {rows_}, T = {positions_}") from error
            if not math.isfinite(loss):
                places = ", ".join(samples[i].where for i in batch.rows)
                raise TrainingStopped(f"the loss of these rows is {loss}: {places}")
            total += loss
            if one_by_one:
                row_losses[batch.rows[0]] = loss / batch.supervised_tokens
            supervised += batch.supervised_tokens
            positions += sum(len(samples[i].ids) - 1 for i in indices)
            rows += len(indices)
            clear_cache_above(cache_threshold)
            if progress:
                progress(done, len(chosen))
    finally:
        model.train(was_training)
    seconds = time.perf_counter() - start
    return Evaluation(total / supervised, rows, supervised, positions / seconds, seconds, row_losses)
