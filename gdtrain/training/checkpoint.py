"""A checkpoint: a folder with an adapter that stock mlx_lm loads, and with the state of the run beside it, so that the
run goes on as if it had not stopped."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from gdtrain.errors import UserError
from gdtrain.files import digest, say_fault, write_folder, write_tensors, write_text
from gdtrain.model.adapter import ADAPTER_CONFIG, ADAPTER_FILE, load_adapter_weights, write_adapter
from gdtrain.model.lora import Adaptation
from gdtrain.training.fingerprint import Fingerprint
from gdtrain.training.run_state import RunState

STATE_FILE, TENSORS_FILE = "state.json", "state.safetensors"
_WITNESSED = (ADAPTER_FILE, ADAPTER_CONFIG, TENSORS_FILE)  # by their hash in STATE_FILE
_FORMAT = 1


class Incomplete(Exception):
    """A folder that is no checkpoint, or a damaged one."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run can go on from; its tensors are read by `restore`."""

    folder: Path
    values: dict[str, Any]
    fingerprint: Fingerprint

    @property
    def iteration(self) -> int:
        return int(self.values["iteration"])

    def restore(self, state: RunState, model: nn.Module) -> None:
        """Put the adapter into an adapted model and the rest into `state`, whose optimizer is initialised.

        Raises:
            UserError: they do not belong together.
        """
        load_adapter_weights(model, self.folder / ADAPTER_FILE)
        try:
            arrays = cast(dict[str, mx.array], mx.load(str(self.folder / TENSORS_FILE), format="safetensors"))
            mx.eval(arrays)
            state.restore(self.values, arrays, model.trainable_parameters())
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"--resume: {self.folder} does not fit this run: {error!r}") from error


def save_checkpoint(
    folder: Path,
    state: RunState,
    weights: dict[str, mx.array],
    adaptation: Adaptation,
    base: str,
    fingerprint: Fingerprint,
) -> None:
    """Write a checkpoint, whole or not at all. base: as for `save_adapter`.

    Raises:
        UserError: it cannot be written, for example because the disk is full.
    """

    def write(partial: Path) -> None:
        write_adapter(partial, weights, adaptation, base)
        write_tensors(partial / TENSORS_FILE, state.arrays())
        values = {"format": _FORMAT, **state.values(), "fingerprint": fingerprint.record()}
        values["sha256"] = {name: digest(partial / name) for name in _WITNESSED}
        write_text(partial / STATE_FILE, json.dumps(values) + "\n")

    try:
        write_folder(folder, write)
    except (OSError, RuntimeError) as error:
        raise UserError(f"checkpoint: {folder} cannot be written: {say_fault(error, folder)}") from error


def read_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint whose files are all there and have not changed since they were written.

    Raises:
        Incomplete: they are not; says what is wrong.
    """
    try:
        values = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        if values["format"] != _FORMAT:
            raise Incomplete(f"{STATE_FILE} has format {values['format']!r}; read here: {_FORMAT}")
        for name in _WITNESSED:
            if digest(folder / name) != values["sha256"][name]:
                raise Incomplete(f"{name} is not what was written")
        return Checkpoint(folder, values, Fingerprint.read(values["fingerprint"]))
    except FileNotFoundError as error:
        raise Incomplete(f"it has no {Path(error.filename).name}") from error
    except OSError as error:
        raise Incomplete(f"{error.filename} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise Incomplete(f"{STATE_FILE} cannot be read: {error!r}") from error
