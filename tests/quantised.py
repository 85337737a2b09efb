"""Mini checkpoints with quantised weights, and their values by an oracle that knows the formats and not MLX."""

import json
from pathlib import Path
from typing import Any

import mini
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from layouts import converted, write
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from gdtrain.arrays import flat

MODES: dict[str, dict[str, Any]] = {
    **{f"affine {bits}": {"group_size": 32, "bits": bits, "mode": "affine"} for bits in (2, 3, 4, 5, 6, 8)},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}
_SWITCHES = (SwitchLinear, QuantizedSwitchLinear)


def quantised(family: str = "qwen3_5", **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A mini model whose matrices are quantised but the embedding, the head and two that keep the width of the model,
    and its config.json, which says so."""
    # Widths of 128, so that every group size divides them.
    widths = {"hidden_size": 128, "intermediate_size": 128}
    experts = {} if family == "qwen3_5" else {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    model, config = mini.build(family, **widths, **experts)
    nn.quantize(model, **options, class_predicate=_is_quantised)
    return model, config | {"quantization": options}


def _is_quantised(path: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | SwitchLinear) and not path.endswith(("in_proj_a", "in_proj_ba", "lm_head"))


def write_quantised(folder: Path, family: str = "qwen3_5", **options: Any) -> Path:
    """A checkpoint of that model, without a tokenizer."""
    model, config = quantised(family, **options)
    text = {name.removeprefix("language_model."): x for name, x in flat(model.parameters()).items()}
    return write(folder, json.loads(json.dumps(config)), converted(text, family))


def dequantise(model: nn.Module) -> None:
    """Every quantised matrix replaced by a plain one of the values that it stands for, in place."""

    def plain(module: nn.Module) -> nn.Module:
        weight = mx.array(values(module))
        if isinstance(module, QuantizedSwitchLinear):
            linear: nn.Module = SwitchLinear(weight.shape[2], weight.shape[1], weight.shape[0], bias=False)
        else:
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = weight
        return linear

    kinds = (nn.QuantizedLinear, QuantizedSwitchLinear)
    model.update_modules(tree_unflatten([(n, plain(m)) for n, m in model.named_modules() if isinstance(m, kinds)]))


# Values of the 4-bit floats, sign, 2 bits of exponent and 1 of mantissa (OCP Microscaling Formats 1.0, 5.3.3).
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def values(module: nn.Module) -> np.ndarray:
    """(..., out, in) float32. A row is a stream of bits, lowest first; a group of values shares a scale."""
    packed = np.array(module.weight)
    bits = np.unpackbits(np.ascontiguousarray(packed).view(np.uint8), axis=-1, bitorder="little")
    codes = bits.reshape(*packed.shape[:-1], -1, module.bits) @ (1 << np.arange(module.bits))
    scales = np.array(module.scales)
    grouped = codes.reshape(*scales.shape, module.group_size)
    match module.mode:
        case "affine":  # arXiv 2106.08295: a step and an offset for each group
            scaled = grouped * scales[..., None].astype(np.float64) + np.array(module.biases, np.float64)[..., None]
        case "mxfp4":
            scaled = _E2M1[grouped] * _power(scales)[..., None]
        case "nvfp4":
            scaled = _E2M1[grouped] * _e4m3(scales)[..., None]
        case "mxfp8":
            scaled = _e4m3(grouped) * _power(scales)[..., None]
        case mode:
            raise ValueError(mode)
    return scaled.reshape(codes.shape).astype(np.float32)


def _power(codes: np.ndarray) -> np.ndarray:
    """E8M0: powers of two, biased by 127."""
    return np.exp2(codes.astype(np.float64) - 127)


def _e4m3(codes: np.ndarray) -> np.ndarray:
    """Sign, 4 bits of exponent biased by 7, 3 of mantissa; the lowest exponent is that of subnormal numbers."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.int64), (codes & 7) / 8
    size = np.where(exponent == 0, np.exp2(-6.0) * mantissa, np.exp2(exponent - 7.0) * (1 + mantissa))
    return np.where(codes >> 7 & 1, -size, size)
