"""Bookkeeping of a run: what happened since the last report, and which validation was the best."""

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

from gdtrain.data.batches import Batch


@dataclass
class Report:
    """What happened since the last line of training metrics. Only training is timed, not validation or saving."""

    loss_sum: float = 0.0
    supervised: int = 0
    positions: int = 0
    iterations: int = 0
    seconds: float = 0.0
    grad_norm: float | None = None
    _started: float = 0.0

    def start(self) -> None:
        self._started = time.perf_counter()

    def add(self, loss_sum: float, batch: Batch, positions: int) -> None:
        """The summed loss of a batch that has so many positions without padding."""
        self.loss_sum += loss_sum
        self.supervised += batch.supervised_tokens
        self.positions += positions
        self.iterations += 1
        self.seconds += time.perf_counter() - self._started

    def values(self) -> dict[str, Any]:
        """The sums so far, from which `Report(**values)` goes on."""
        return {key: value for key, value in asdict(self).items() if key != "_started"}

    def finish(self) -> dict[str, Any]:
        """The values of a train record. grad_norm is that of the last update, None before one."""
        return {
            "loss": self.loss_sum / self.supervised,
            "grad_norm": self.grad_norm,
            "supervised_tokens": self.supervised,
            "tokens_per_second": self.positions / self.seconds,
            "iterations_per_second": self.iterations / self.seconds,
        }


@dataclass
class Validations:
    """Follows the validation loss: which is the best, and for how long none was better."""

    patience: int | None
    best: float = math.inf
    since_best: int = 0

    def add(self, loss: float) -> bool:
        """Whether this is the lowest so far."""
        better = loss < self.best
        self.best, self.since_best = (loss, 0) if better else (self.best, self.since_best + 1)
        return better

    @property
    def exhausted(self) -> bool:
        return self.patience is not None and self.since_best >= self.patience
