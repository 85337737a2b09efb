"""Typed views of what MLX returns loosely typed."""

from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten


def flat(tree: Any) -> dict[str, mx.array]:
    """The arrays of a parameter tree by their dotted names."""
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(tree)))


def scalar(x: mx.array) -> float:
    """The value of a real array of one element; evaluates it."""
    return cast(float, x.item())
