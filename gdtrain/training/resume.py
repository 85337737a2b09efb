"""`--resume`: the newest checkpoint of a run that can be gone on from, and whether this is still the same run."""

from collections.abc import Iterator
from pathlib import Path

from gdtrain.config import RunConfig
from gdtrain.errors import UserError
from gdtrain.run_directory import checkpoint_folders, set_aside, tidy
from gdtrain.session import Say
from gdtrain.training.checkpoint import Checkpoint, Incomplete, read_checkpoint
from gdtrain.training.fingerprint import Fingerprint, changed_contents, changed_keys, counting_keys


def check_resumable(run: Path) -> None:
    """Raise UserError if no run was ever saved there; nothing is created."""
    if not checkpoint_folders(run):
        raise _nothing(run)


def find_resume(run: Path, config: RunConfig, say: Say) -> Checkpoint:
    """The newest checkpoint of a run that is complete, of a config that means the same. Others are set aside, with a
    line each; the directory is locked.

    Raises:
        UserError: there is none, or the config has changed in a key that counts.
    """
    tidy(run)
    for folder in reversed(checkpoint_folders(run)):
        try:
            found = read_checkpoint(folder)
        except Incomplete as reason:
            say(f"checkpoint {folder} is passed over: {reason}; it is now {set_aside(folder)}")
            continue
        _refuse(found, changed_keys(found.fingerprint.config, counting_keys(config)))
        return found
    raise _nothing(run)


def check_contents(found: Checkpoint, now: Fingerprint, iterations: int) -> None:
    """Raises UserError when rows or model are not those of the checkpoint, or it is beyond the end of the run."""
    _refuse(found, changed_contents(found.fingerprint, now))
    if found.iteration > iterations:
        raise UserError(
            f"--resume: the run would have {iterations} iterations, and {found.folder} comes after {found.iteration}; "
            "accepted: as many or more, by iters or epochs"
        )


def resumed_lines(found: Checkpoint, now: Fingerprint, iterations: int) -> Iterator[str]:
    """What a person is told: from where, and what rounds otherwise than before."""
    yield f"resumed from {found.folder}, iteration {found.iteration} of {iterations}"
    if changes := list(changed_keys(found.fingerprint.computed, now.computed)):
        yield f"note: not to the last bit the run that did not stop: {'; '.join(changes)}"


def _nothing(run: Path) -> UserError:
    return UserError(f"--resume: {run} has no complete checkpoint; without --resume the run begins anew")


def _refuse(found: Checkpoint, changes: Iterator[str]) -> None:
    if lines := list(changes):
        raise UserError(
            f"--resume: not the run of {found.folder}:\n  "
            + "\n  ".join(lines)
            + "\nAccepted: the same run, with as many iterations or more; without --resume, resume_adapter_file begins "
            "anew from its weights"
        )
