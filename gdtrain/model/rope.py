"""Rotary embedding at positions given per token; MLX's own takes one offset for a row."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from gdtrain.errors import UserError


def rotate(rope: nn.Module, x: mx.array, positions: mx.array) -> mx.array:
    """What `rope` would make of every token at its own position.

    Args:
        rope: any of mlx-lm's variants, in its layout that pairs dimension i with i + dims / 2 (traditional=False).
        x: (B, H, T, D); positions: (B, T) int32, each in [0, T).

    Returns:
        (B, H, T, D) in x's dtype, rotated in float32.

    Raises:
        UserError: a variant whose angles depend on the length of the row, in a row where they do.
    """
    dims, T = _dims(rope), x.shape[2]
    if isinstance(rope, DynamicNTKScalingRoPE) and rope.max_position_embeddings < T:
        raise UserError(
            f"packing: this model's dynamic RoPE rescales rows of more than {rope.max_position_embeddings} tokens as "
            f"wholes, and these have {T}; lower max_seq_length, or set packing: false"
        )
    # A rotation is linear: of (1, 0) it makes (cos, sin), with the scaling of the variant in them.
    unit = mx.broadcast_to(mx.arange(dims) < dims // 2, (1, 1, T, dims)).astype(mx.float32)
    table = mx.stop_gradient(rope(unit))[0, 0]
    cos, sin = mx.split(table[positions][:, None], 2, axis=-1)
    a, b = mx.split(x[..., :dims].astype(mx.float32), 2, axis=-1)
    rotated = mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
    return mx.concatenate([rotated, x[..., dims:]], axis=-1) if dims < x.shape[-1] else rotated


def _dims(rope: nn.Module) -> int:
    """How many leading dimensions of a head are rotated."""
    if getattr(rope, "traditional", False):
        raise ValueError("packed documents take a RoPE with traditional=False, as qwen3_5 and qwen3_next have")
    return rope.dim if hasattr(rope, "dim") else rope.dims
