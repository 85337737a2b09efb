"""What a run leaves in its directory as it goes: adapters, checkpoints and the records that say so."""

import json
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from gdtrain.errors import UserError
from gdtrain.files import say_fault, write_folder, write_text
from gdtrain.model.adapter import save_adapter, write_adapter
from gdtrain.model.lora import Adaptation
from gdtrain.reporting.metrics import MetricsFile
from gdtrain.run_directory import BEST, BEST_FILE, checkpoint_folder, drop_old_checkpoints, list_checkpoints
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
        save_adapter(self.folder, weights, self.adaptation, self.model)
        self._record(iteration, self.folder)

    def save_best(self, iteration: int, weights: Weights, loss: float) -> None:
        """The adapter with the lowest validation loss so far, unless a part of the run that a resumed one left behind
        had a lower one: a run that ends validates where a longer one would not."""
        best = self.folder / BEST
        if (known := _loss_of(best)) is not None and known <= loss:
            return

        def write(folder: Path) -> None:
            write_adapter(folder, weights, self.adaptation, self.model)
            write_text(folder / BEST_FILE, json.dumps({"iteration": iteration, "loss": loss}) + "\n")

        try:
            write_folder(best, write)
        except (OSError, RuntimeError) as error:
            raise UserError(f"adapter: {best} cannot be written: {say_fault(error, best)}") from error
        self._record(iteration, best)

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

    def _record(self, iteration: int, folder: Path) -> None:
        self.metrics.write("save", iteration=iteration, path=str(folder.relative_to(self.folder)))


def _loss_of(best: Path) -> float | None:
    """Of the adapter there, None where it is not known."""
    try:
        return float(json.loads((best / BEST_FILE).read_text(encoding="utf-8"))["loss"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
