"""A rule with a hand-written gradient, as MLX's custom function."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import cast

import mlx.core as mx

# (q, k, v, log_decay, beta, state), C -> y, final state, states at the start of the chunks
Forward = Callable[[Sequence[mx.array], int], tuple[mx.array, mx.array, mx.array]]
# the same inputs, gradients of y and of the final state, the states at the start of the chunks, C -> six gradients
Backward = Callable[[Sequence[mx.array], mx.array, mx.array, mx.array, int], Sequence[mx.array]]


@lru_cache
def with_gradient(forward: Forward, backward: Backward, C: int) -> Callable[..., tuple[mx.array, ...]]:
    """`forward` with `backward` as its gradient, for chunks of C tokens.

    The states at the start of the chunks are an output only to reach the backward: under gradient checkpointing they
    are made by the second forward, used at once and freed with the layer. No gradient comes in through them.
    """

    @mx.custom_function
    def rule(*primals: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        return forward(primals, C)

    @rule.vjp
    def gradient(
        primals: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
    ) -> Sequence[mx.array]:
        return backward(primals, cotangents[0], cotangents[1], outputs[2], C)

    return cast(Callable[..., tuple[mx.array, ...]], rule)


def join_spans(spans: Sequence[Sequence[mx.array]], inputs: Sequence[mx.array]) -> list[mx.array]:
    """Gradients of consecutive spans of tokens, span by span, as gradients of the whole inputs (B, T, ...)."""
    return [
        mx.concatenate(list(parts), axis=1).reshape(x.shape)
        for parts, x in zip(zip(*spans, strict=True), inputs, strict=True)
    ]
