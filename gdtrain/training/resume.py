"""`--resume`: the newest checkpoint of a run that can be gone on from, and whether this is still the same run."""

from collections.abc import Iterator
from pathlib import Path

from gdtrain.config import RunConfig
from gdtrain.errors import UserError
from gdtrain.files import recover_folders
from gdtrain.run_directory import CHECKPOINTS, checkpoint_folders
from gdtrain.session import Say
from gdtrain.training.checkpoint import Checkpoint, Incomplete, read_checkpoint
from gdtrain.training.fingerprint import Fingerprint, changed_contents, changed_keys, counting_keys


def find_resume(run: Path, config: RunConfig, say: Say) -> Checkpoint:
    """The newest checkpoint of a run that is complete, of a config that means the same; others are passed over with a
    line each.

    Raises:
        UserError: there is none, or the config has changed in a key that counts.
    """
    recover_folders(run / CHECKPOINTS)
    for folder in reversed(checkpoint_folders(run)):
        try:
            found = read_checkpoint(folder)
        except Incomplete as reason:
            say(f"checkpoint {folder} is passed over: {reason}")
            continue
        _refuse(found, changed_keys(found.fingerprint.config, counting_keys(config)))
        return found
    raise UserError(f"--resume: {run} has no complete checkpoint; without --resume the run begins anew")


def check_contents(found: Checkpoint, now: Fingerprint) -> None:
    """Raises UserError when rows or model are not those of the checkpoint."""
    _refuse(found, changed_contents(found.fingerprint, now))


def _refuse(found: Checkpoint, changes: Iterator[str]) -> None:
    if lines := list(changes):
        raise UserError(
            f"--resume: not the run of {found.folder}:\n  "
            + "\n  ".join(lines)
            + "\nAccepted: the same run, with more iters or epochs; resume_adapter_file begins anew from its weights"
        )
