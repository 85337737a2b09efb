"""The adapter on disk, in the form that stock mlx_lm loads: adapters.safetensors and adapter_config.json."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from gdtrain.arrays import flat
from gdtrain.errors import UserError
from gdtrain.files import say_fault, write_tensors, write_text
from gdtrain.model.lora import Adaptation, adapt

ADAPTER_FILE, ADAPTER_CONFIG = "adapters.safetensors", "adapter_config.json"


@dataclass(frozen=True)
class AdapterFiles:
    """What is on disk. base: the model's folder or Hub id, None where it is not said. lora: rank, scale and perhaps
    dropout and keys; None of an adapter in full."""

    weights: dict[str, mx.array]
    base: str | None
    fine_tune_type: str
    num_layers: int
    lora: dict[str, Any] | None


def save_adapter(folder: Path, weights: dict[str, mx.array], adaptation: Adaptation, base: str) -> None:
    """As `write_adapter`.

    Raises:
        UserError: the folder cannot be written, for example because the disk is full.
    """
    try:
        write_adapter(folder, weights, adaptation, base)
    except (OSError, RuntimeError) as error:
        raise UserError(f"adapter: {folder} cannot be written: {say_fault(error, folder)}") from error


def write_adapter(folder: Path, weights: dict[str, mx.array], adaptation: Adaptation, base: str) -> None:
    """Write adapters.safetensors and adapter_config.json, each whole or not at all, and the weights read back.

    Args:
        weights: the trainable parameters by name, evaluated.
        base: the model's folder or Hub id as the config names it; told to the reader, not used by stock mlx_lm.

    Raises:
        OSError, RuntimeError: the folder cannot be written.
    """
    config = {
        "model": base,
        "fine_tune_type": adaptation.fine_tune_type,
        "num_layers": adaptation.num_layers,
        "lora_parameters": adaptation.lora_parameters,
    }
    write_tensors(folder / ADAPTER_FILE, weights)
    write_text(folder / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")


def load_adapter_weights(model: nn.Module, file: Path) -> None:
    """Load an adapter file into an adapted model, strictly.

    Raises:
        UserError: the file is missing or unreadable, or a tensor is missing, unexpected or of another shape.
    """
    _fit(model, _read_weights(file), file)


def check_adapter_file(file: Path) -> None:
    """Raise UserError unless the file exists and is called .safetensors."""
    if not file.is_file():
        raise UserError(f"adapter: {file} does not exist")
    if file.suffix != ".safetensors":
        raise UserError(f"adapter: {file} is not a .safetensors file")


def check_same_adapter(folder: Path, adaptation: Adaptation) -> None:
    """Compare an adaptation with the adapter_config.json beside an adapter that it is to start from, if there is one.

    Raises:
        UserError: another type, rank or scale: the weights would mean something else.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        return
    kind, _, lora = _read_config(folder / ADAPTER_CONFIG)
    ours, theirs = adaptation.lora_parameters or {}, lora or {}
    found: dict[str, tuple[Any, Any]] = {"fine_tune_type": (kind, adaptation.fine_tune_type)}
    found |= {f"lora_parameters.{key}": (theirs.get(key), ours.get(key)) for key in ("rank", "scale")}
    faults = [f"{key} is {its!r} in that adapter and {our!r} here" for key, (its, our) in found.items() if its != our]
    if faults:
        raise UserError(f"resume_adapter_file: {folder}: {'; '.join(faults)}")


def load_adapter(model: nn.Module, folder: Path) -> Adaptation:
    """Adapt a model as the adapter_config.json of `folder` says, and load the adapter strictly.

    Raises:
        UserError: a file is missing or faulty, or does not fit the model.
    """
    adapter = read_adapter(folder)
    adaptation = adapt(
        model, fine_tune_type=adapter.fine_tune_type, num_layers=adapter.num_layers, **(adapter.lora or {})
    )
    _fit(model, adapter.weights, folder / ADAPTER_FILE)
    return adaptation


def read_adapter(folder: Path) -> AdapterFiles:
    """Read an adapter without its base.

    Raises:
        UserError: a file is missing or faulty, or they are of different ranks.
    """
    file = folder / ADAPTER_CONFIG
    kind, blocks, lora = _read_config(file)
    weights = _read_weights(folder / ADAPTER_FILE)
    ranks = Counter(rank for name, x in weights.items() if (rank := _rank(name, x)) is not None)
    if lora is not None and ranks.keys() - {lora["rank"]}:
        found = ", ".join(f"{rank} ({count} tensors)" for rank, count in sorted(ranks.items()))
        raise UserError(f"adapter: {file} says rank {lora['rank']}; that of {ADAPTER_FILE} is {found}")
    base = json.loads(file.read_text(encoding="utf-8")).get("model")
    return AdapterFiles(weights, base if isinstance(base, str) else None, kind, blocks, lora)


def _read_weights(file: Path) -> dict[str, mx.array]:
    check_adapter_file(file)
    try:
        return cast(dict[str, mx.array], mx.load(str(file), format="safetensors"))
    except (RuntimeError, ValueError) as error:
        raise UserError(f"adapter: {file} cannot be read: {error}") from error


def _fit(model: nn.Module, weights: dict[str, mx.array], file: Path) -> None:
    """Load all of them, or none and say every fault."""
    expected = flat(model.trainable_parameters())
    faults = [f"{name} is missing" for name in expected.keys() - weights.keys()]
    faults += [f"{name} is not a trainable parameter of this model" for name in weights.keys() - expected.keys()]
    for name in weights.keys() & expected.keys():
        x, ours = weights[name], expected[name]
        if x.shape != ours.shape:
            fault = f"{name} has shape {x.shape}; accepted here: {ours.shape}"
            ranks = _rank(name, x), _rank(name, ours)
            faults.append(fault if ranks[0] == ranks[1] else f"{fault} (rank {ranks[0]}, not {ranks[1]})")
    if faults:
        shown = "\n  ".join(sorted(faults)[:20])
        raise UserError(f"adapter: {file} does not fit the model ({len(faults)} faults):\n  {shown}")
    model.load_weights([(name, x.astype(expected[name].dtype)) for name, x in weights.items()], strict=False)


def _rank(name: str, x: mx.array) -> int | None:
    """Of a matrix of LoRA or a stack of them, (E, r, in) and (E, out, r); None for other tensors."""
    leaf = name.rpartition(".")[2]
    axis = {("lora_a", 2): 1, ("lora_b", 2): 0, ("lora_a", 3): 1, ("lora_b", 3): 2}.get((leaf, x.ndim))
    return None if axis is None else x.shape[axis]


def _read_config(file: Path) -> tuple[str, int, dict[str, Any] | None]:
    """fine_tune_type, num_layers and lora_parameters of an adapter_config.json."""
    if not file.is_file():
        raise UserError(f"adapter: {file} does not exist")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind, blocks, lora = config["fine_tune_type"], config["num_layers"], config["lora_parameters"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"adapter: {file} is not an adapter config: {error!r}") from error
    if not isinstance(blocks, int):
        raise UserError(f"adapter: {file} is not an adapter config: num_layers is {blocks!r}")
    if kind != "full" and not {"rank", "scale"} <= set(lora or ()) <= {"rank", "scale", "dropout", "keys"}:
        raise UserError(f"adapter: {file} is not an adapter config: lora_parameters are {lora!r}")
    return kind, blocks, lora
