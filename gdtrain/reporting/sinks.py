"""Where the records of metrics.jsonl go besides: Weights & Biases and TensorBoard, both optional extras.

Both get the names that mlx-lm's callbacks use where mlx-lm has the value: train_loss, val_loss, val_time,
learning_rate, iterations_per_second, tokens_per_second, peak_memory; and besides grad_norm, supervised_tokens (since
the last report), active_memory, cache_memory, val_supervised_tokens. Memory is in GB of 1e9 bytes. The header and the
reason of a stop are sent as text; save records are not sent.
"""

import importlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from gdtrain.errors import UserError

TENSORBOARD, WANDB = "tensorboard", "wandb"  # in report_to, of the extras, and of the folders in the run directory
_MODULES = {WANDB: "wandb", TENSORBOARD: "tensorboardX.event_file_writer"}
_WANDB_ID = "gdtrain-run-id"  # in wandb's folder: a run that is resumed goes on under its id

_NAMES = {
    "train": {
        "loss": "train_loss",
        "peak_memory_gb": "peak_memory",
        "active_memory_gb": "active_memory",
        "cache_memory_gb": "cache_memory",
    },
    "val": {
        "loss": "val_loss",
        "seconds": "val_time",
        "supervised_tokens": "val_supervised_tokens",
        "peak_memory_gb": "peak_memory",
    },
}


class Sink(Protocol):
    def log(self, kind: str, iteration: int, values: dict[str, Any]) -> None:
        """A record of metrics.jsonl. Raises UserError if it cannot be written."""

    def close(self) -> None:
        """Everything is written when this returns. Raises UserError."""


def check_sinks(names: Sequence[str]) -> None:
    """Before anything is loaded; raises UserError for a package that cannot be imported."""
    for name in names:
        _import(name)


def open_sinks(
    names: Sequence[str],
    folder: Path,
    project_name: str | None,
    config: dict[str, Any],
    *,
    resumed_at: int | None = None,
) -> list[Sink]:
    """One for each name, writing into the run directory `folder`, which exists.

    Args:
        project_name: at Weights & Biases; None leaves it to wandb.
        config: the resolved config, JSON values.
        resumed_at: the iteration that a resumed run goes on from; later ones of before no longer count.

    Raises:
        UserError: a package is missing, or the service or folder refuses.
    """
    sinks: list[Sink] = []
    try:
        for name in names:
            if name == WANDB:
                sinks.append(Wandb(folder, project_name, config, resumed=resumed_at is not None))
            else:
                sinks.append(TensorBoard(folder / TENSORBOARD, config, resumed_at))
    except UserError:
        for sink in sinks:
            sink.close()
        raise
    return sinks


class Wandb:
    """A run at Weights & Biases, named after the run directory."""

    def __init__(self, folder: Path, project_name: str | None, config: dict[str, Any], *, resumed: bool) -> None:
        self._wandb = _import(WANDB)
        id_file = folder / WANDB / _WANDB_ID
        try:
            known = id_file.read_text(encoding="utf-8").strip() if resumed and id_file.is_file() else None
            self._run = self._wandb.init(
                project=project_name,
                name=folder.resolve().name,
                dir=str(folder),
                config=config,
                id=known,
                resume=None if known is None else "allow",
            )
            # wandb's own steps only ever grow; a resumed run begins before its last record.
            self._run.define_metric("*", step_metric="iteration")
            id_file.parent.mkdir(exist_ok=True)
            id_file.write_text(self._run.id, encoding="utf-8")
        except self._wandb.Error as error:
            raise UserError(f"report_to: wandb: {error}; WANDB_MODE=offline needs no account") from error
        except OSError as error:
            raise UserError(f"report_to: wandb: {id_file.parent} cannot be written: {error.strerror}") from error

    def log(self, kind: str, iteration: int, values: dict[str, Any]) -> None:
        try:
            if kind in _NAMES:
                self._run.log(_named(kind, values) | {"iteration": iteration})
            elif kind in ("header", "resume"):
                self._run.config.update({"header": values}, allow_val_change=True)
            elif kind == "stop":
                self._run.summary["stop"] = values.get("reason")
        except self._wandb.Error as error:
            raise UserError(f"report_to: wandb: {error}") from error

    def close(self) -> None:
        try:
            self._run.finish()
        except self._wandb.Error as error:
            raise UserError(f"report_to: wandb: {error}") from error


class TensorBoard:
    """An event file, flushed record by record.

    tensorboardX's SummaryWriter is not used: it writes in a thread, and where that ends, on a full disk, the next
    records would wait for it without end.
    """

    def __init__(self, folder: Path, config: dict[str, Any], resumed_at: int | None) -> None:
        self._folder, module = folder, _import(TENSORBOARD)
        self._events, self._summary = module.event_pb2, importlib.import_module("tensorboardX.summary")
        try:
            folder.mkdir(exist_ok=True)
            part = f".{os.getpid()}.{resumed_at or 0}"  # the rest of the name is the time in seconds
            self._file = module.EventsWriter(str(folder / "events"), part)
        except OSError as error:
            raise self._fault(error) from error
        if resumed_at is not None:  # TensorBoard then forgets what is at this step or after it
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(resumed_at + 1, session_log=start)
        self._text("config", resumed_at or 0, config)
        self._flush()

    def log(self, kind: str, iteration: int, values: dict[str, Any]) -> None:
        if kind in _NAMES:
            for name, value in _named(kind, values).items():
                self._write(iteration, summary=self._summary.scalar(name, value))
        elif kind in ("header", "resume"):
            self._text("header", iteration, values)
        elif kind == "stop":
            self._text("stop", iteration, values.get("reason"))
        self._flush()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise self._fault(error) from error

    def _text(self, name: str, iteration: int, value: Any) -> None:
        """Text is Markdown there; a block of code shows it as it is."""
        lines = value.splitlines() if isinstance(value, str) else json.dumps(value, indent=2).splitlines()
        block = "\n".join(f"    {line}" for line in lines)
        self._write(iteration, summary=self._summary.text(name, block))

    def _write(self, iteration: int, **what: Any) -> None:
        try:
            self._file.write_event(self._events.Event(wall_time=time.time(), step=iteration, **what))
        except OSError as error:
            raise self._fault(error) from error

    def _flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            raise self._fault(error) from error

    def _fault(self, error: OSError) -> UserError:
        return UserError(f"report_to: tensorboard: {self._folder} cannot be written: {error.strerror or error}")


def _named(kind: str, values: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record under the names of the services; null has no place in a curve."""
    numbers = {key: x for key, x in values.items() if isinstance(x, int | float) and key not in ("iteration", "kind")}
    return {_NAMES[kind].get(key, key): x for key, x in numbers.items()}


def _import(name: str) -> Any:
    try:
        module = importlib.import_module(_MODULES[name])
    except ImportError as error:
        package = _MODULES[name].partition(".")[0]
        reason = "is not installed" if error.name == package else f"cannot be imported ({error})"
        raise UserError(f'report_to: {name} needs {package}, which {reason}: pip install "gdtrain[{name}]"') from error
    if name == WANDB and not hasattr(module, "init"):  # a folder of that name, as wandb itself leaves them
        raise UserError('report_to: wandb needs wandb, which is not installed: pip install "gdtrain[wandb]"')
    return module
