"""Gradient checkpointing: each block keeps its input only and runs again in the backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn


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

            # mx.checkpoint gives gradients to explicit inputs only, so what trains has to be one.
            def run(parameters: dict, x: mx.array) -> mx.array:
                self.update(parameters)
                return kind.__call__(self, x, mask)

            parameters = self.trainable_parameters()
            try:
                return mx.checkpoint(run)(parameters, x)
            finally:
                self.update(parameters)

    return Recomputed
