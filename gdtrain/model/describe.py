"""What became of a checkpoint when it was loaded, a line for each thing that a person may want to know."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn

from gdtrain.arrays import flat, scalar
from gdtrain.model.family import is_tied
from gdtrain.model.layout import FLOATS, Part, is_centred, is_hub_layout, part_of, read_heads, text_name
from gdtrain.model.load import ModelFiles
from gdtrain.model.safetensors_file import Stored

_WHY: dict[Part, str] = {
    "vision": "gdtrain trains the language model alone",
    "mtp": "multi-token prediction is not trained",
    "head": "the embedding is the head too",
}
# Means of norm weights over whole blocks are 0.97 in published checkpoints: that of none is near 0, and none near 2.
_TWICE, _NEVER = 1.5, 0.5


def describe_checkpoint(files: ModelFiles, model: nn.Module) -> list[str]:
    """The type and layout that were recognised, what was dropped, turned and cast, how weights are quantised; and
    warnings, which begin with "warning: ".

    Args:
        model: as load_model gave it. Of its weights only the norms are read.
    """
    heads = read_heads(files.folder)
    return [
        *_type(files),
        *_layout(heads),
        *_dropped(files, heads),
        *_casts(files, heads, model),
        *_quantised(model),
        *_norms(model),
    ]


def _type(files: ModelFiles) -> Iterator[str]:
    if (kind := files.config.get("model_type")) != files.family:
        yield f"model_type {kind!r} is read as {files.family}, whose config and tensors it has"


def _layout(heads: dict[str, Stored]) -> Iterator[str]:
    shapes = {name: head.shape for name, head in heads.items() if part_of(name) == "text"}
    if is_hub_layout(shapes):
        norms = sum(is_centred(name, shape) for name, shape in shapes.items())
        kernels = sum(name.endswith("conv1d.weight") for name in shapes)
        yield f"Hub layout: {norms} norms stored around 0 get 1 added, {kernels} conv1d kernels change axes"
    else:
        yield "MLX layout: norms and conv1d kernels are read as they are stored"


def _dropped(files: ModelFiles, heads: dict[str, Stored]) -> Iterator[str]:
    parts: defaultdict[Part, list[Stored]] = defaultdict(list)
    for name, head in heads.items():
        parts[part_of(name, tied=is_tied(files.config))].append(head)
    for part, why in _WHY.items():
        if n := len(parts[part]):
            size = _size(sum(head.size for head in parts[part]))
            yield f"dropped: {n} {part} tensor{'s' if n > 1 else ''} ({size}): {why}"


def _casts(files: ModelFiles, heads: dict[str, Stored], model: nn.Module) -> Iterator[str]:
    """Floating weights that are not in the dtype of the file."""
    read = {x.dtype for name, x in flat(model.parameters()).items() if _is_plain_float(name, x)}
    main = max(read, key=str) if read else mx.float32  # one: load_model cast them
    stored: defaultdict[tuple[mx.Dtype, mx.Dtype], list[str]] = defaultdict(list)
    for name, head in heads.items():
        if part_of(name, tied=is_tied(files.config)) == "text" and (dtype := FLOATS.get(head.dtype)) is not None:
            wanted = mx.float32 if name.endswith("A_log") else main
            if dtype != wanted and not name.endswith("global_scale"):
                stored[dtype, wanted].append(name)
    for (dtype, wanted), names in stored.items():
        kinds = sorted({re.sub(r".*\.layers\.\d+\.", "", text_name(name)) for name in names})
        some = ", ".join(kinds[:3]) + (", ..." if len(kinds) > 3 else "")
        yield f"{len(names)} tensors stored in {_name(dtype)} are read in {_name(wanted)}: {some}"


def _quantised(model: nn.Module) -> Iterator[str]:
    counts: Counter[tuple[int, str, int]] = Counter()
    inside = 0
    for module in model.modules():
        if "scales" in module:
            counts[module.bits, module.mode, module.group_size] += 1
            inside += sum(x.nbytes for x in flat(module.parameters()).values())
    if counts:
        kinds = ", ".join(f"{n} matrices in {b}-bit {mode}, groups of {g}" for (b, mode, g), n in counts.most_common())
        total = sum(x.nbytes for x in flat(model.parameters()).values())
        yield f"quantised: {kinds}; {_size(inside)} of the model's {_size(total)}"


def _norms(model: nn.Module) -> Iterator[str]:
    """A warning where the factors of all blocks look shifted twice or not at all: the model would talk nonsense."""
    means = [scalar(block.input_layernorm.weight.astype(mx.float32).mean()) for block in model.layers]
    lowest, highest, mean = min(means), max(means), sum(means) / len(means)
    if lowest > _TWICE:
        yield (
            f"warning: the norms of all {len(means)} blocks average {mean:.2f}: they look shifted twice, as by a "
            "faulty converter. Convert the checkpoint again from the original"
        )
    elif highest < _NEVER:
        yield (
            f"warning: the norms of all {len(means)} blocks average {mean:.2f}: they look stored around 0 though the "
            "conv1d kernels are converted. Convert the checkpoint again from the original"
        )


def _is_plain_float(name: str, x: mx.array) -> bool:
    return mx.issubdtype(x.dtype, mx.floating) and not name.endswith(("A_log", "global_scale"))


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _size(count: int) -> str:
    return (
        f"{count / 1e9:.2f} GB"
        if count >= 1e8
        else f"{count / 1e6:.3g} MB"
        if count >= 1e5
        else f"{count / 1e3:.3g} kB"
    )
