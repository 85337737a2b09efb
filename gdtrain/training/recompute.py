"""Gradient checkpointing: each block keeps its input only and runs again in the backward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from gdtrain.arrays import flat


@contextmanager
def recomputed_blocks(blocks: list[nn.Module], enabled: bool = True) -> Iterator[None]:
    """Within the context these blocks, and no others of their class, run again in the backward instead of keeping their
    activations. Gradients are the same either way; dropout has to be keyed (see model/dropout.py)."""
    if not enabled:
        yield
        return
    kinds = [type(block) for block in blocks]
    for block in blocks:
        block.__class__ = _recomputed(type(block))
    try:
        yield
    finally:
        for block, kind in zip(blocks, kinds, strict=True):
            block.__class__ = kind


@lru_cache
def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    class Recomputed(kind):  # type: ignore[misc, valid-type]
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            if cache is not None or not self.training:
                return super().__call__(x, mask, cache)

            named = flat(self.trainable_parameters())

            def run(x: mx.array, leaves: list[mx.array]) -> mx.array:
                self.update(tree_unflatten(list(zip(named, leaves, strict=True))))
                return kind.__call__(self, x, mask)

            try:
                return _recompute(run)(x, list(named.values()))
            finally:
                self.update(tree_unflatten(list(named.items())))

    return Recomputed


def _recompute(run: Callable[[mx.array, list[mx.array]], mx.array]) -> Callable[..., mx.array]:
    """`run` with a backward that runs it again, in an order that bounds memory.

    MLX evaluates a graph depth first. It would run the block again before it has the gradient of its output, and leave
    the gradients of parameters to the end, with all that they are made of: mx.checkpoint prevents only the first. So
    the gradient of x, which the blocks before wait for, waits for those of the parameters.
    """

    @mx.custom_function
    def block(x: mx.array, leaves: list[mx.array]) -> mx.array:
        return run(x, leaves)

    @block.vjp
    def backward(primals: Any, dy: mx.array, y: mx.array) -> Any:
        x, *leaves = mx.depends([primals[0], *primals[1]], [dy])
        _, (dx, *d_leaves) = mx.vjp(lambda x, *leaves: run(x, list(leaves)), [x, *leaves], [dy])
        return mx.depends([dx], d_leaves)[0] if d_leaves else dx, d_leaves

    return cast(Callable[..., mx.array], block)
