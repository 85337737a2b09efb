"""Quantised weights in a checkpoint of MLX: tensors X.weight, X.scales and, by mode, X.biases or X.global_scale."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from gdtrain.errors import UserError
from gdtrain.model.safetensors_file import Stored
from gdtrain.model.source_names import SourceNames

PARTS = ("weight", "scales", "biases", "global_scale")
_KINDS = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)


@dataclass(frozen=True)
class Packing:
    """How a weight is packed; as in mx.quantize."""

    group_size: int
    bits: int
    mode: str

    def unpack(self, parts: Mapping[str, mx.array]) -> mx.array:
        """Parts of one matrix, by PARTS -> (out, in) in float32."""
        scales, biases = parts["scales"], parts.get("biases")
        if self.mode == "affine":  # the others have scales of 8 bits
            scales = scales.astype(mx.float32)
        return mx.dequantize(
            parts["weight"],
            scales,
            None if biases is None else biases.astype(mx.float32),
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            global_scale=parts.get("global_scale"),
            dtype=mx.float32,
        )

    def pack(self, x: mx.array, like: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """(out, in) in float32 -> the parts that `like` has, in its dtypes."""
        largest = mx.max(mx.abs(x)) if "global_scale" in like else None  # as mlx-lm has it
        packed = mx.quantize(x, self.group_size, self.bits, self.mode, global_scale=largest)
        parts = dict(zip(PARTS, packed, strict=False))
        if largest is not None:
            parts["global_scale"] = largest
        return {part: parts[part].astype(stored.dtype) for part, stored in like.items()}

    def __str__(self) -> str:
        bits = f"{self.bits} bits, " if self.mode == "affine" else ""
        return f"{self.mode}, {bits}groups of {self.group_size}"


def find_packings(
    model: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Stored], names: SourceNames
) -> dict[str, Packing]:
    """Of every quantised weight of the checkpoint, by its name without ".weight": from the layer that was loaded
    from it, or, where the model has none (vision, mtp), from the config.

    Raises:
        UserError: the checkpoint is quantised in another way than MLX's, or its config does not say how.
    """
    named = config.get("quantization")
    for part in (config, config.get("text_config", {})):
        if not named and (other := part.get("quantization_config")):
            raise UserError(
                f"the base is quantised by {other.get('quant_method', 'an unknown method')}; accepted: unquantised "
                "weights, or MLX's own quantisation (python -m mlx_lm convert makes it)"
            )
    packings = {
        names.places(f"{name.removesuffix('.linear')}.weight")[0].tensor.removesuffix(".weight"): Packing(
            module.group_size, module.bits, module.mode
        )
        for name, module in model.named_modules()
        if isinstance(module, _KINDS)
    }
    for name in tensors:
        stem = name.removesuffix(".scales")
        if stem != name and stem not in packings:
            packings[stem] = _from_config(stem, named or {}, tensors)
    return packings


def dense_shape(stem: str, packing: Packing, tensors: Mapping[str, Stored]) -> tuple[int, ...]:
    """Of the weight when it is unpacked."""
    *leading, groups = tensors[f"{stem}.scales"].shape
    return (*leading, groups * packing.group_size)


def _from_config(stem: str, quantization: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Packing:
    own = quantization.get(stem)
    options = {**quantization, **(own if isinstance(own, dict) else {})}
    try:
        packing = Packing(options["group_size"], options["bits"], options.get("mode", "affine"))
        fits = tensors[f"{stem}.weight"].shape[-1] * 32 == dense_shape(stem, packing, tensors)[-1] * packing.bits
    except KeyError as error:
        raise UserError(f"the base has {stem}.scales, but no {error} to read it with") from error
    if not fits:
        raise UserError(f"the base's {stem}.weight is not quantised as its config says ({packing})")
    return packing
