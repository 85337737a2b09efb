"""One set of weights in the layouts in which checkpoints are published."""

import json
from pathlib import Path
from typing import Any

import mini
import mlx.core as mx

from gdtrain.arrays import flat

LAYOUTS = ("hub", "mlx with vision", "mlx with mtp", "mlx")
# What a Qwen3.5 brings besides, in small. The kernel of the vision tower has the axes of a raw conv1d.
VISION = ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.bias", "merger.norm.weight")
MTP = ("fc.weight", "norm.weight", "layers.0.input_layernorm.weight", "layers.0.mlp.experts.0.up_proj.weight")


def write_layout(folder: Path, family: str, layout: str, *, dtype: str = "float32", **config_overrides: Any) -> Path:
    """The folder, with config.json and model.safetensors of the weights of mini.build, norms rounded so that the way
    from 1 + w to w and back is exact."""
    model, config = mini.build(family, dtype=dtype, **config_overrides)
    text = {name.removeprefix("language_model."): exact(name, x) for name, x in flat(model.parameters()).items()}
    extra = {name: mx.ones((8, 2, 4)) for name in VISION}, {name: mx.ones((16,)) for name in MTP}
    match layout:
        case "hub":
            weights = hub(text, family) | prefixed("model.visual.", extra[0]) | prefixed("mtp.", extra[1])
        case "mlx with vision":
            weights = converted(text, family) | prefixed("vision_tower.", extra[0])
        case "mlx with mtp":
            weights = converted(text, family) | prefixed("mtp.", extra[1])
        case _:
            weights = converted(text, family)
    return write(folder, config, weights)


def write(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def is_norm(name: str) -> bool:
    """Of the norms that the Hub stores around 0: all but that of GDN outputs."""
    return name.endswith(("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight"))


def exact(name: str, x: mx.array) -> mx.array:
    return (mx.round(x.astype(mx.float32) * 64) / 64).astype(x.dtype) if is_norm(name) else x


def prefixed(prefix: str, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    return {prefix + name: x for name, x in weights.items()}


def converted(text: dict[str, mx.array], family: str) -> dict[str, mx.array]:
    return text if family == "qwen3_next" else prefixed("language_model.", text)


def hub(text: dict[str, mx.array], family: str) -> dict[str, mx.array]:
    """Back to the names and axes of the Hub."""
    weights: dict[str, mx.array] = {}
    for name, x in text.items():
        x = x - 1 if is_norm(name) else x.swapaxes(1, 2) if name.endswith("conv1d.weight") else x
        if family != "qwen3_next":
            name = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        if ".switch_mlp." not in name:
            weights[name] = x
        elif family == "qwen3_next":
            weights |= {name.replace("switch_mlp", f"experts.{e}"): x[e] for e in range(x.shape[0])}
        elif name.endswith("up_proj.weight"):
            gate = text[name.replace("model.language_model.", "model.").replace("up_proj", "gate_proj")]
            weights[name.replace("switch_mlp.up_proj.weight", "experts.gate_up_proj")] = mx.concatenate([gate, x], 1)
        elif name.endswith("down_proj.weight"):
            weights[name.replace("switch_mlp.down_proj.weight", "experts.down_proj")] = x
    return weights
