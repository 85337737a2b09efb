"""An adapter into its base: the checkpoint that the base was loaded from, file by file, tensor by tensor.

Adapted weights are merged in float32 and stored under the name and in the layout and dtype that they had. All else is
copied byte for byte: what mlx-lm does not load (vision, mtp) and what it changes as it loads (norms, conv1d) too.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import mlx.nn as nn

from gdtrain.errors import UserError
from gdtrain.model.family import is_tied
from gdtrain.model.layout import WEIGHTS
from gdtrain.model.load import ModelFiles
from gdtrain.model.lora import Adaptation
from gdtrain.model.merge import find_merges
from gdtrain.model.quantised import find_packings
from gdtrain.model.rewrite import Losses, Target, merged, packed_again, unpacked
from gdtrain.model.safetensors_file import Stored, Written, copied, read_header, write_tensors
from gdtrain.model.source_names import SourceNames

_INDEX = "model.safetensors.index.json"
# What belongs to a model beside its weights. Weights in other formats are of the base, a model card is about it.
_BESIDE = (
    "*.json",
    "*.jsonl",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.py",
    "*.safetensors",
    "LICENSE*",
    "NOTICE*",
)


@dataclass
class Fusion:
    """What will be written; `write` writes it. size: bytes of weights. merged and kept: tensors that the adapter
    changes, and those that are copied. packings: of the adapted weights as they will be stored, none if dense."""

    files: ModelFiles
    size: int
    merged: int
    kept: int
    packings: list[str]
    left_out: list[str]
    losses: Losses
    _contents: dict[Path, tuple[list[Written], dict[str, str]]]
    _dequantize: bool

    def write(self, folder: Path, progress: Callable[[int], None]) -> None:
        """Into an existing folder. Raises OSError."""
        for file, (tensors, metadata) in self._contents.items():
            write_tensors(folder / file.name, tensors, metadata, progress)
        for file in _beside(self.files.folder):
            shutil.copyfile(file, folder / file.name)
        if self._dequantize:
            _write_json(folder / "config.json", _without_quantisation(self.files.config))
            if (folder / _INDEX).exists():
                _write_json(folder / _INDEX, self._index())

    def _index(self) -> dict[str, Any]:
        where = {x.name: file.name for file, (tensors, _) in self._contents.items() for x in tensors}
        return {"metadata": {"total_size": self.size}, "weight_map": dict(sorted(where.items()))}


def plan_fusion(files: ModelFiles, model: nn.Module, adaptation: Adaptation, *, dequantize: bool = False) -> Fusion:
    """Find for every adapted weight its tensor in the checkpoint. Weights are read as they are written.

    Args:
        files: of the base; model: loaded from them, adapted, its adapter loaded.
        dequantize: write a dense model, in the dtype of the base's unquantised weights; else adapted weights are
            quantised again as they were.

    Raises:
        UserError: the checkpoint has no tensor for a weight, is quantised by another library, or not at all and
            `dequantize` was asked for.
    """
    headers = {file: read_header(file) for file in sorted(files.folder.glob(WEIGHTS))}
    tensors: dict[str, Stored] = {}
    for file, (inside, _) in headers.items():
        if both := tensors.keys() & inside.keys():
            raise UserError(f"{file} and another file of the base both have {min(both)}")
        tensors |= inside
    names = SourceNames({name: x.shape for name, x in tensors.items()}, tied=is_tied(files.config))
    packings = find_packings(model, files.config, tensors, names)
    if dequantize and not packings:
        raise UserError("--dequantize: the base is not quantised; leave the option out")
    targets: dict[str, Target] = {}
    for name, merge in find_merges(model, adaptation, names).items():
        for place in names.places(name):
            targets.setdefault(place.tensor, []).append((merge, place))
    losses = Losses()
    rewritten: dict[str, list[Written]] = {}
    for name, target in targets.items():
        if name.removesuffix(".weight") not in packings:
            rewritten[name] = [merged(name, tensors[name], target, losses)]
    for stem, packing in packings.items():
        target = targets.get(f"{stem}.weight", [])
        if dequantize:
            rewritten |= unpacked(stem, packing, target, tensors, losses)
        elif target:
            rewritten |= packed_again(stem, packing, target, tensors, losses)
    contents = {
        file: ([x for name in inside for x in rewritten.get(name, [copied(name, inside[name])])], metadata)
        for file, (inside, metadata) in headers.items()
    }
    written = [x for inside, _ in contents.values() for x in inside]
    adapted = {str(packings[stem]) for name in targets if (stem := name.removesuffix(".weight")) in packings}
    return Fusion(
        files,
        sum(x.size for x in written),
        len(targets),
        len([x for x in written if isinstance(x.source, Stored)]),
        [] if dequantize else sorted(adapted),
        _left_out(files.folder),
        losses,
        contents,
        dequantize,
    )


def _beside(folder: Path) -> list[Path]:
    """The files of a model that go with the fused one as they are."""
    return [
        file
        for file in sorted(folder.iterdir())
        if file.is_file() and not fnmatch(file.name, WEIGHTS) and any(fnmatch(file.name, x) for x in _BESIDE)
    ]


def _left_out(folder: Path) -> list[str]:
    taken = {file.name for file in _beside(folder)}
    return [
        file.name
        for file in sorted(folder.iterdir())
        if not file.name.startswith(".") and not fnmatch(file.name, WEIGHTS) and file.name not in taken
    ]


def _without_quantisation(config: dict[str, Any]) -> dict[str, Any]:
    dense = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    if isinstance(text := dense.get("text_config"), dict):
        dense["text_config"] = _without_quantisation(text)
    return dense


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
