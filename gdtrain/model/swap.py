"""Every `linear_attn` of the model onto the trainable rule, counted afterwards.

The parameters keep their names and stay where they are, so that adapters and checkpoints do not change. Without a cache
(training and evaluation) the layer runs `gdkernels`, whose backends all have gradients; with a cache (generation) it
runs mlx-lm's own forward, which may use a kernel without gradients. No loss of gdtrain passes a cache.
"""

from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
from gdkernels import Choice, explain, gated_delta_update
from gdkernels.portable.machine import machine
from mlx_lm.models import qwen3_5, qwen3_next
from mlx_lm.models.gated_delta import normalize_qk

from gdtrain.errors import UserError
from gdtrain.model.convolution import causal_depthwise_convolution

# The length for which a backend is explained; those of a run vary.
_TOKENS = 1024


@dataclass(frozen=True)
class Swapped:
    """What the swap did: how many layers of how many in the config, and which backend they run and why."""

    layers: int
    expected: int
    choice: Choice


def swap_linear_attention(
    model: nn.Module, model_config: dict[str, Any], *, kernel: str = "auto", chunk_size: int | None = None
) -> Swapped:
    """Replace the `linear_attn` of every block by its trainable form, in place.

    Args:
        model: a qwen3_5, qwen3_5_moe or qwen3_next model of mlx-lm.
        model_config: its config.json, from which the number of linear layers is known.
        kernel: "auto" or the name of a backend of gdkernels; chunk_size: tokens of a chunk of the
            rule, None for the best of the device.

    Raises:
        UserError: the backend cannot run here, or the layers found are not those of the config.
    """
    check_kernel(kernel)
    adopted = []
    for i, block in enumerate(model.layers):
        if "linear_attn" not in block:
            continue
        layer = block.linear_attn
        trainable = next((cls for base, cls in _TRAINABLE.items() if type(layer) is base), None)
        if trainable is None:
            raise UserError(
                f"block {i}: linear_attn is a {type(layer).__name__}, which gdtrain does not know; "
                f"known: {', '.join(base.__module__ for base in _TRAINABLE)}"
            )
        adopted.append((block, trainable.adopt(layer, kernel, chunk_size)))
    expected = count_linear_layers(model_config)
    if len(adopted) != expected:
        raise UserError(
            f"{len(adopted)} linear attention layers are on the trainable path, but the model's config says {expected}"
        )
    choice = _choose([layer for _, layer in adopted], kernel, chunk_size)
    for block, layer in adopted:
        block.linear_attn = layer
    return Swapped(len(adopted), expected, choice)


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


class _Trainable(nn.Module):
    """A GatedDeltaNet of mlx-lm whose forward without a cache goes through gdkernels."""

    @classmethod
    def adopt(cls, layer: nn.Module, kernel: str, chunk_size: int | None) -> Self:
        """The trainable form of `layer`, sharing its parameters and submodules."""
        trainable = cls.__new__(cls)
        trainable.__dict__.update(layer.__dict__)
        dict.update(trainable, layer)
        trainable.kernel, trainable.chunk_size = kernel, chunk_size
        return trainable

    def __call__(self, inputs: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        """inputs (B, T, hidden), mask (B, T) bool or None; returns (B, T, hidden) in the dtype of inputs."""
        if cache is not None:
            if self.training:
                raise RuntimeError("a cache is for generation: call eval() on the model first")
            return super().__call__(inputs, mask, cache)
        B, T, _ = inputs.shape
        qkv, z, a, b = self.project(inputs)
        if mask is not None:
            qkv = mx.where(mask[..., None], qkv, mx.zeros((), qkv.dtype))
        qkv = nn.silu(causal_depthwise_convolution(qkv, self.conv1d.weight))
        q, k, v = mx.split(qkv, [self.key_dim, 2 * self.key_dim], axis=-1)
        q = q.reshape(B, T, self.num_k_heads, self.head_k_dim)
        k = k.reshape(B, T, self.num_k_heads, self.head_k_dim)
        v = v.reshape(B, T, self.num_v_heads, self.head_v_dim)
        q, k = normalize_qk(q, k, inv_scale=self.head_k_dim**-0.5, eps=1e-6)
        y, _ = gated_delta_update(
            q, k, v, a, b, self.A_log, self.dt_bias, mask=mask, backend=self.kernel, chunk_size=self.chunk_size
        )
        return self.out_proj(self.norm(y, z).reshape(B, T, -1))

    def project(self, inputs: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """qkv (B, T, 2 Hk Dk + Hv Dv), z (B, T, Hv, Dv), a and b (B, T, Hv)."""
        raise NotImplementedError


class TrainableQwen35(_Trainable, qwen3_5.GatedDeltaNet):
    """Qwen3.5, dense and mixture of experts: one projection each for qkv, z, b and a."""

    def project(self, inputs: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        z = self.in_proj_z(inputs).reshape(*inputs.shape[:2], self.num_v_heads, self.head_v_dim)
        return self.in_proj_qkv(inputs), z, self.in_proj_a(inputs), self.in_proj_b(inputs)


class TrainableQwen3Next(_Trainable, qwen3_next.Qwen3NextGatedDeltaNet):
    """Qwen3-Next: two fused projections, interleaved per key head."""

    def project(self, inputs: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        q, k, v, z, b, a = self.fix_query_key_value_ordering(self.in_proj_qkvz(inputs), self.in_proj_ba(inputs))
        return mx.concatenate([x.flatten(2) for x in (q, k, v)], axis=-1), z, a, b


_TRAINABLE: dict[type[nn.Module], type[_Trainable]] = {
    qwen3_5.GatedDeltaNet: TrainableQwen35,
    qwen3_next.Qwen3NextGatedDeltaNet: TrainableQwen3Next,
}


def _choose(layers: list["_Trainable"], kernel: str, chunk_size: int | None) -> Choice:
    """The backend of layers that are all alike. On a GPU its self-test runs now, not in the first step."""
    if not layers:
        return Choice("none", "the model has no linear attention layers")
    layer = layers[0]
    heads = (layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
    return _explain(heads, layer.conv1d.weight.dtype, kernel, chunk_size)


def _explain(heads: tuple[int, int, int, int], dtype: mx.Dtype, kernel: str, chunk_size: int | None) -> Choice:
    """`explain` for rows of some length; heads as (Hk, Hv, Dk, Dv)."""
    try:
        return explain(1, _TOKENS, *heads, dtype, kernel, chunk_size)
    except ValueError as error:
        raise UserError(f"kernel: {str(error).removeprefix('backend ')}") from error
