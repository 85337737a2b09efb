"""What a run leaves in its directory as it goes: adapters, checkpoints and the records that say so."""

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from gdtrain.errors import UserError
from gdtrain.model.adapter import save_adapter
from gdtrain.model.lora import Adaptation
from gdtrain.reporting.metrics import MetricsFile
from gdtrain.run_directory import BEST, checkpoint_folder, drop_old_checkpoints, list_checkpoints
from gdtrain.training.checkpoint import save_checkpoint
from gdtrain.training.fingerprint import Fingerprint
from gdtrain.training.run_state import RunState

Weights = dict[str, mx.array]


@dataclass(frozen=True)
class RunFiles:
    """Saves a run into its directory `folder`. model: what the base model is called in the adapter's config. keep: how
    many checkpoints are left.

    Every method raises UserError if the directory cannot be written, except `keep_good`.
    """

    folder: Path
    metrics: MetricsFile
    adaptation: Adaptation
    model: str
    fingerprint: Fingerprint
    keep: int

    def save(self, iteration: int, weights: Weights) -> None:
        """The adapter of the run."""
        self._save(self.folder, iteration, weights)

    def save_best(self, iteration: int, weights: Weights) -> None:
        self._save(self.folder / BEST, iteration, weights)

    def save_checkpoint(self, state: RunState, weights: Weights) -> None:
        """A checkpoint that the run can go on from, after which the newest `keep` are left."""
        folder = checkpoint_folder(self.folder, state.iteration)
        save_checkpoint(folder, state, weights, self.adaptation, self.model, self.fingerprint)
        self._record(state.iteration, folder)
        drop_old_checkpoints(self.folder, self.keep)

    def keep_good(self, iteration: int, weights: Weights | None, reason: str) -> str:
        """Save what is good when the run stops on a fault; returns what became of it. Never hides the fault.

        Args:
            weights: None where no good ones are known.
        """
        try:
            if weights is None:
                before = ", ".join(list_checkpoints(self.folder)) or "none"
                kept = f"its weights are not saved; saved before: {before}"
            else:
                self.save(iteration, weights)
                kept = f"the last good weights are in {self.folder}"
        except UserError as fault:
            kept = f"the last good weights could not be saved: {fault}"
        try:
            self.metrics.write("stop", iteration=iteration, reason=reason)
        except UserError as fault:
            kept += f"; the reason could not be recorded: {fault}"
        return kept

    def _save(self, to: Path, iteration: int, weights: Weights) -> None:
        save_adapter(to, weights, self.adaptation, self.model)
        self._record(iteration, to)

    def _record(self, iteration: int, folder: Path) -> None:
        self.metrics.write("save", iteration=iteration, path=str(folder.relative_to(self.folder)))
