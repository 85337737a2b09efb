"""Where a run stands between two iterations: all that the next one depends on besides weights, config and data."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_map_with_path

from gdtrain.arrays import flat
from gdtrain.random_state import read_random_state, set_random_state
from gdtrain.training.progress import Report, Validations
from gdtrain.training.step import Window


@dataclass
class RunState:
    """iteration: batches so far, which is also how far the order of the data has come. validated: the iteration of the
    last validation."""

    optimizer: optim.Optimizer
    validations: Validations
    window: Window = field(default_factory=Window)
    report: Report = field(default_factory=Report)
    iteration: int = 0
    validated: int | None = None

    def arrays(self) -> dict[str, mx.array]:
        """The optimizer's state, and the gradients of a window that is not full."""
        named = {f"optimizer.{name}": x for name, x in flat(self.optimizer.state).items()}
        return named | {f"window.{name}": x for name, x in flat(self.window.gradients or {}).items()}

    def values(self) -> dict[str, Any]:
        """Everything else, MLX's random state included, for JSON, which keeps every bit of a float."""
        return {
            "iteration": self.iteration,
            "validated": self.validated,
            "random_state": read_random_state(),
            "window": {"tokens": self.window.tokens, "rows": self.window.rows},
            "report": self.report.values(),
            "validations": {"best": self.validations.best, "since_best": self.validations.since_best},
        }

    def restore(self, values: dict[str, Any], arrays: dict[str, mx.array], parameters: Any) -> None:
        """Go on from what `values` and `arrays` gave; sets MLX's random state.

        Args:
            parameters: the trainable tree, for which the optimizer is initialised.

        Raises:
            KeyError, TypeError, ValueError: the values or arrays are not such.
        """
        self.iteration, self.validated = values["iteration"], values["validated"]
        self.window = Window(**values["window"])
        if self.window.tokens:
            self.window.gradients = _like(parameters, arrays, "window.")
        self.report = Report(**values["report"])
        self.validations = Validations(self.validations.patience, **values["validations"])
        self.optimizer.state = _like(self.optimizer.state, arrays, "optimizer.")
        set_random_state(values["random_state"])


def _like(tree: Any, arrays: dict[str, mx.array], prefix: str) -> Any:
    """A tree of the same structure, empty branches included, which flattened arrays have lost."""
    return tree_map_with_path(lambda path, x: arrays[prefix + path], tree)
