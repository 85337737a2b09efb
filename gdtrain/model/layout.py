"""The layouts in which checkpoints of one model come, and the way from each of them to that of mlx-lm.

Hub layout: names as in transformers, norm weights stored as w for a factor of 1 + w, conv1d kernels (channels, 1,
width), experts fused (gate and up in one tensor) or one tensor each, beside vision and multi-token-prediction (mtp)
tensors. MLX layout: factors stored as they are, kernels (channels, width, 1), experts stacked. Converters differ in
which prefix they leave, and in whether they keep vision and mtp tensors.

mlx-lm 0.32.2 reads most of these right and some not: Qwen3-Next with mtp tensors kept, or with fused experts; tied
Qwen3.5 that also stores its head; vision tensors under another prefix. So the layout is settled here, and what mlx-lm's
own sanitize does afterwards changes nothing.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import mlx.core as mx

from gdtrain.errors import UserError
from gdtrain.model.safetensors_file import Stored, read_header

WEIGHTS = "model*.safetensors"

Part = Literal["text", "vision", "mtp", "head"]

FLOATS = {"F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16}
_VISION = {"visual", "vision_tower", "vision_model", "multi_modal_projector"}
# Longest first: the first that fits is replaced.
_PREFIXES = (
    ("model.language_model.model.", "model."),
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.", ""),
)
_CENTRED = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)
_EXPERT = re.compile(r"(?P<mlp>.+\.mlp)\.experts\.(?P<number>\d+)\.(?P<leaf>\w+)\.weight")


def read_heads(folder: Path) -> dict[str, Stored]:
    """Name, dtype, shape and place of every tensor of a checkpoint; no weights are read.

    Raises:
        UserError: a file is missing or is no safetensors file, or two hold a tensor of the same name.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        _check_index(index)
    heads: dict[str, Stored] = {}
    for file in sorted(folder.glob(WEIGHTS)):
        try:
            ours, _ = read_header(file)
        except UserError as error:
            raise UserError(f"model: {folder} cannot be loaded: {error}") from error
        if twice := heads.keys() & ours.keys():
            raise UserError(f"model: {file} holds {min(twice)}, which another file of the folder holds too")
        heads |= ours
    return heads


def main_dtype(heads: Mapping[str, Stored]) -> mx.Dtype:
    """The dtype of most floating weights, A_log aside; that of the scales where the weights are quantised."""
    sizes = Counter[str]()
    for name, head in heads.items():
        if head.dtype in FLOATS and not name.endswith("A_log"):
            sizes[head.dtype] += head.size // FLOATS[head.dtype].size
    return FLOATS[sizes.most_common(1)[0][0]] if sizes else mx.float32


def part_of(name: str, *, tied: bool = False) -> Part:
    """Which part of a checkpoint a tensor belongs to; head: one that a model with tied embeddings does not use."""
    places = set(name.split("."))
    if places & _VISION:
        return "vision"
    if "mtp" in places:
        return "mtp"
    return "head" if tied and text_name(name).startswith("lm_head.") else "text"


def text_name(name: str) -> str:
    """The name within the language model, whatever the prefix: model.layers.0.mlp.up_proj.weight, lm_head.weight."""
    for prefix, ours in _PREFIXES:
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def is_hub_layout(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether norms are stored around 0 and conv1d kernels as (channels, 1, width), by the axes of the kernels.

    Raises:
        UserError: some kernels have the one layout, some the other.
    """
    kernels = {n: s for n, s in shapes.items() if n.endswith("conv1d.weight") and part_of(n) == "text"}
    hub = sorted(name for name, shape in kernels.items() if shape[-1] != 1)
    if hub and len(hub) < len(kernels):
        other = min(kernels.keys() - set(hub))
        raise UserError(
            f"model: {len(hub)} of {len(kernels)} conv1d kernels have the axes of the Hub ({hub[0]}), the others those "
            f"of MLX ({other}): the checkpoint is converted in part. Convert it again from the original"
        )
    return bool(hub)


def is_centred(name: str, shape: tuple[int, ...]) -> bool:
    """Whether this is a norm weight that the Hub layout stores around 0. The norm of GDN outputs is not."""
    return len(shape) == 1 and name.endswith(_CENTRED)


def to_mlx_layout(weights: dict[str, mx.array], *, prefix: str, tied: bool) -> dict[str, mx.array]:
    """The tensors of the language model in the layout of mlx-lm, lazily; vision and mtp tensors are left out.

    Args:
        weights: all tensors of a checkpoint. prefix: of the language model in the tree of mlx-lm's model.
        tied: the embedding is the head too, so a head that is stored is left out.

    Raises:
        UserError: a checkpoint that is converted in part, lacks an expert or has a tensor twice.
    """
    hub = is_hub_layout({name: x.shape for name, x in weights.items()})
    text: dict[str, mx.array] = {}
    for name, x in weights.items():
        if part_of(name, tied=tied) != "text":
            continue
        ours = prefix + text_name(name)
        if ours in text:
            raise UserError(f"model: the checkpoint has {ours} twice, under two prefixes")
        if hub and ours.endswith("conv1d.weight"):
            x = x.moveaxis(2, 1)
        elif hub and is_centred(ours, x.shape):
            x = x + 1.0
        text[ours] = x
    return _stack_experts(_split_experts(text))


def _split_experts(text: dict[str, mx.array]) -> dict[str, mx.array]:
    """Fused experts: gate_up_proj (E, 2 I, hidden) in two, down_proj (E, hidden, I) by its name here."""
    split: dict[str, mx.array] = {}
    for name, x in text.items():
        if name.endswith(".mlp.experts.gate_up_proj"):
            mlp = name.removesuffix(".experts.gate_up_proj")
            gate, up = mx.split(x, 2, axis=-2)
            split[f"{mlp}.switch_mlp.gate_proj.weight"] = gate
            split[f"{mlp}.switch_mlp.up_proj.weight"] = up
        elif name.endswith(".mlp.experts.down_proj"):
            split[f"{name.removesuffix('.experts.down_proj')}.switch_mlp.down_proj.weight"] = x
        else:
            split[name] = x
    return split


def _stack_experts(text: dict[str, mx.array]) -> dict[str, mx.array]:
    """One tensor an expert: stacked in their order."""
    stacked: dict[str, mx.array] = {}
    experts: dict[str, dict[int, mx.array]] = {}
    for name, x in text.items():
        if match := _EXPERT.fullmatch(name):
            joint = f"{match['mlp']}.switch_mlp.{match['leaf']}.weight"
            experts.setdefault(joint, {})[int(match["number"])] = x
        else:
            stacked[name] = x
    for joint, by_number in experts.items():
        if missing := set(range(max(by_number) + 1)) - by_number.keys():
            raise UserError(f"model: the checkpoint lacks expert {min(missing)} of {joint}")
        stacked[joint] = mx.stack([by_number[i] for i in range(len(by_number))])
    return stacked


def _check_index(index: Path) -> None:
    """Weights of the text that lie in files that are not there, as in a folder that was copied in part."""
    try:
        files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        named = {file for name, file in files.items() if part_of(name) == "text"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"model: {index} is no index of weights: {error!r}") from error
    if missing := sorted(file for file in named if not (index.parent / file).is_file()):
        raise UserError(
            f"model: {index.parent} lacks {len(missing)} of the {len(named)} files of weights that its index names: "
            + ", ".join(missing[:4])
        )
