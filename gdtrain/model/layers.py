"""The trainable forms of mlx-lm's token mixers: gated delta net and attention.

Without a cache (training and evaluation) they run the rule of gdkernels and attention in bounded memory, both of which
have gradients and take packed documents; with a cache (generation) they run mlx-lm's own forward, which may use kernels
without gradients. No loss of gdtrain passes a cache.
"""

from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
from gdkernels import causal_convolution, gated_delta_update
from mlx_lm.models import qwen3_5, qwen3_next
from mlx_lm.models.gated_delta import normalize_qk

from gdtrain.model.attention import causal_attention
from gdtrain.model.documents import Documents
from gdtrain.model.rope import rotate


class Trainable(nn.Module):
    """A layer of mlx-lm with another forward."""

    @classmethod
    def adopt(cls, layer: nn.Module, **attributes: Any) -> Self:
        """The trainable form of `layer`, sharing its parameters and submodules."""
        trainable = cls.__new__(cls)
        trainable.__dict__.update(layer.__dict__)
        dict.update(trainable, layer)
        for name, value in attributes.items():
            setattr(trainable, name, value)
        return trainable

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """x (B, T, hidden); returns the same shape and dtype. Without a cache see `mix` for the masks."""
        if cache is None:
            return self.mix(x, mask)
        if self.training:
            raise RuntimeError("a cache is for generation: call eval() on the model first")
        return super().__call__(x, mask, cache)

    def mix(self, x: mx.array, mask: Any) -> mx.array:
        """The forward without a cache."""
        raise NotImplementedError


class _DeltaNet(Trainable):
    """A gated delta net with the attributes `kernel`, a backend of gdkernels, and `chunk_size`."""

    def mix(self, x: mx.array, mask: Documents | mx.array | None) -> mx.array:
        """mask: documents of packed rows; or (B, T) bool, False at padding; or None."""
        B, T, _ = x.shape
        segments, positions, valid = (*mask, None) if isinstance(mask, Documents) else (None, None, mask)
        qkv, z, a, b = self.project(x)
        if valid is not None:
            qkv = mx.where(valid[..., None], qkv, mx.zeros((), qkv.dtype))
        qkv = causal_convolution(qkv, self.conv1d.weight, positions)
        q, k, v = mx.split(qkv, [self.key_dim, 2 * self.key_dim], axis=-1)
        q = q.reshape(B, T, self.num_k_heads, self.head_k_dim)
        k = k.reshape(B, T, self.num_k_heads, self.head_k_dim)
        v = v.reshape(B, T, self.num_v_heads, self.head_v_dim)
        q, k = normalize_qk(q, k, inv_scale=self.head_k_dim**-0.5, eps=1e-6)
        gates = (a, b, self.A_log, self.dt_bias)
        how = {"backend": self.kernel, "chunk_size": self.chunk_size}
        y, _ = gated_delta_update(q, k, v, *gates, mask=valid, segments=segments, **how)
        return self.out_proj(self.norm(y, z).reshape(B, T, -1))

    def project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """qkv (B, T, 2 Hk Dk + Hv Dv), z (B, T, Hv, Dv), a and b (B, T, Hv)."""
        raise NotImplementedError


class TrainableQwen35(_DeltaNet, qwen3_5.GatedDeltaNet):
    """Qwen3.5, dense and mixture of experts: one projection each for qkv, z, b and a."""

    def project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        z = self.in_proj_z(x).reshape(*x.shape[:2], self.num_v_heads, self.head_v_dim)
        return self.in_proj_qkv(x), z, self.in_proj_a(x), self.in_proj_b(x)


class TrainableQwen3Next(_DeltaNet, qwen3_next.Qwen3NextGatedDeltaNet):
    """Qwen3-Next: two fused projections, interleaved per key head."""

    def project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        q, k, v, z, b, a = self.fix_query_key_value_ordering(self.in_proj_qkvz(x), self.in_proj_ba(x))
        return mx.concatenate([y.flatten(2) for y in (q, k, v)], axis=-1), z, a, b


class TrainableAttention(Trainable, qwen3_next.Qwen3NextAttention):
    """Gated attention, the same class in all families."""

    def mix(self, x: mx.array, mask: Documents | str | None) -> mx.array:
        """mask: documents of packed rows; or "causal", the only name mlx-lm uses; or None, its mask of a single token.

        Raises:
            TypeError: another mask.
        """
        B, T, _ = x.shape
        if not isinstance(mask, Documents | str) and not (mask is None and T == 1):
            raise TypeError(
                f"attention without a cache is causal or within documents; it takes no {type(mask)} as mask"
            )
        q, gate = mx.split(self.q_proj(x).reshape(B, T, self.num_attention_heads, -1), 2, axis=-1)
        k, v = (project(x).reshape(B, T, self.num_key_value_heads, -1) for project in (self.k_proj, self.v_proj))
        q, k, v = (y.swapaxes(1, 2) for y in (self.q_norm(q), self.k_norm(k), v))
        if isinstance(mask, Documents):
            q, k = (rotate(self.rope, y, mask.positions) for y in (q, k))
            y = causal_attention(q, k, v, self.scale, mask.segments)
        else:
            y = causal_attention(self.rope(q), self.rope(k), v, self.scale)
        return self.o_proj(y.swapaxes(1, 2).reshape(B, T, -1) * mx.sigmoid(gate.reshape(B, T, -1)))


DELTA_NETS: dict[type[nn.Module], type[Trainable]] = {
    qwen3_5.GatedDeltaNet: TrainableQwen35,
    qwen3_next.Qwen3NextGatedDeltaNet: TrainableQwen3Next,
}
ATTENTIONS: dict[type[nn.Module], type[Trainable]] = {qwen3_next.Qwen3NextAttention: TrainableAttention}
