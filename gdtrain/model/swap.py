"""Every `linear_attn` and `self_attn` of the model onto its trainable form (layers.py), counted afterwards.

The parameters keep their names and stay where they are, so that adapters and checkpoints do not change.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from gdkernels import Choice, explain, explain_convolution
from gdkernels.portable.machine import machine

from gdtrain.errors import UserError
from gdtrain.model.layers import ATTENTIONS, DELTA_NETS, Trainable

# The length for which a backend is explained; those of a run vary.
_TOKENS = 1024


@dataclass(frozen=True)
class Swapped:
    """What the swap did: how many linear layers of how many in the config, and what the rule and the convolution before
    it run on, and why."""

    layers: int
    expected: int
    choice: Choice
    convolution: Choice


def swap_linear_attention(
    model: nn.Module, model_config: dict[str, Any], *, kernel: str = "auto", chunk_size: int | None = None
) -> Swapped:
    """Replace the `linear_attn` or `self_attn` of every block by its trainable form, in place.

    Args:
        model: a qwen3_5, qwen3_5_moe or qwen3_next model of mlx-lm.
        model_config: its config.json, from which the number of linear layers is known.
        kernel: "auto" or the name of a backend of gdkernels; chunk_size: tokens of a chunk of the
            rule, None for the best of the device.

    Raises:
        UserError: the backend cannot run here, or the layers found are not those of the config.
    """
    check_kernel(kernel)
    linear = _adopt(model, "linear_attn", DELTA_NETS, kernel=kernel, chunk_size=chunk_size)
    attention = _adopt(model, "self_attn", ATTENTIONS)
    expected = count_linear_layers(model_config)
    if len(linear) != expected:
        raise UserError(
            f"{len(linear)} linear attention layers are on the trainable path, but the model's config says {expected}"
        )
    choice, convolution = _choose(list(linear.values()), kernel, chunk_size)
    for name, layers in (("linear_attn", linear), ("self_attn", attention)):
        for i, layer in layers.items():
            setattr(model.layers[i], name, layer)
    return Swapped(len(linear), expected, choice, convolution)


def check_kernel(kernel: str) -> None:
    """Refuse a backend that cannot run on this machine whatever the model, before anything is read.

    Raises:
        UserError: there is none of this name, or it has GPU kernels and the device is a CPU.
    """
    if kernel != "auto" and machine() is None:
        _explain((16, 32, 128, 128), mx.float32, kernel, None)


def count_linear_layers(model_config: dict[str, Any]) -> int:
    """Linear attention layers of a config.json: from `layer_types` where it is given, else from the interval."""
    config = model_config.get("text_config", model_config)
    if layer_types := config.get("layer_types"):
        return sum(kind == "linear_attention" for kind in layer_types)
    blocks = config["num_hidden_layers"]
    return blocks - blocks // config.get("full_attention_interval", 4)


def _adopt(
    model: nn.Module, name: str, known: Mapping[type[nn.Module], type[Trainable]], **attributes: Any
) -> dict[int, Trainable]:
    """The trainable forms of the layers of this name, by their block."""
    adopted = {}
    for i, block in enumerate(model.layers):
        if name not in block:
            continue
        layer = block[name]
        if type(layer) not in known:
            raise UserError(
                f"block {i}: {name} is a {type(layer).__name__}, which gdtrain does not know; "
                f"known: {', '.join(f'{base.__module__}.{base.__name__}' for base in known)}"
            )
        adopted[i] = known[type(layer)].adopt(layer, **attributes)
    return adopted


def _choose(layers: list[nn.Module], kernel: str, chunk_size: int | None) -> tuple[Choice, Choice]:
    """For the rule and the convolution of layers that are all alike. On a GPU self-tests run now, not in the first
    step."""
    if not layers:
        none = Choice("none", "the model has no linear attention layers")
        return none, none
    layer = layers[0]
    heads = (layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
    weight = layer.conv1d.weight
    return _explain(heads, weight.dtype, kernel, chunk_size), explain_convolution(
        weight.dtype, weight.dtype, weight.shape[1]
    )


def _explain(heads: tuple[int, int, int, int], dtype: mx.Dtype, kernel: str, chunk_size: int | None) -> Choice:
    """`explain` for rows of some length; heads as (Hk, Hv, Dk, Dv)."""
    try:
        return explain(1, _TOKENS, *heads, dtype, kernel, chunk_size)
    except ValueError as error:
        raise UserError(f"kernel: {str(error).removeprefix('backend ')}") from error
