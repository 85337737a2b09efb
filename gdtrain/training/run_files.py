"""What a run leaves in its directory as it goes: adapters, checkpoints and the records that say so."""

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from gdtrain.errors import UserError
from gdtrain.model.adapter import save_adapter
from gdtrain.model.lora import Adaptation
from gdtrain.reporting.metrics import MetricsFile
from gdtrain.training.run_directory import BEST, checkpoint_folder, drop_old_checkpoints, list_checkpoints

Weights = dict[str, mx.array]


@dataclass(frozen=True)
class RunFiles:
    """Saves weights of a run into its directory `folder`. model: what the base model is called in the adapter's config.

    Every method raises UserError if the directory cannot be written, except `keep`.
    """

    folder: Path
    metrics: MetricsFile
    adaptation: Adaptation
    model: str

    def save(self, iteration: int, weights: Weights) -> None:
        """The adapter of the run."""
        self._save(self.folder, iteration, weights)

    def save_best(self, iteration: int, weights: Weights) -> None:
        self._save(self.folder / BEST, iteration, weights)

    def save_checkpoint(self, iteration: int, weights: Weights, *, keep: int) -> None:
        """A checkpoint, after which the newest `keep` are left."""
        self._save(checkpoint_folder(self.folder, iteration), iteration, weights)
        drop_old_checkpoints(self.folder, keep)

    def keep(self, iteration: int, weights: Weights | None, reason: str) -> str:
        """Save what is good when the run stops early; returns what became of it. Never hides the reason to stop.

        Args:
            weights: None where no good ones are known.
        """
        try:
            self.metrics.write("stop", iteration=iteration, reason=reason)
            if weights is None:
                before = ", ".join(list_checkpoints(self.folder)) or "none"
                return f"its weights are not saved; saved before: {before}"
            self.save(iteration, weights)
        except UserError as fault:
            return f"the last good weights could not be saved: {fault}"
        return f"the last good weights are in {self.folder}"

    def _save(self, to: Path, iteration: int, weights: Weights) -> None:
        save_adapter(to, weights, self.adaptation, self.model)
        self.metrics.write("save", iteration=iteration, path=str(to.relative_to(self.folder)))
