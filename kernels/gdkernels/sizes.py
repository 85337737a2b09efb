"""The sizes of one call, as backends are asked about them."""

from typing import NamedTuple

import mlx.core as mx


class Sizes(NamedTuple):
    """As in the package docstring; dtype is that of q, k and v; C the tokens of a chunk asked for."""

    B: int
    T: int
    Hk: int
    Hv: int
    Dk: int
    Dv: int
    dtype: mx.Dtype
    C: int


def dtype_name(dtype: mx.Dtype) -> str:
    """As in bfloat16."""
    return str(dtype).removeprefix("mlx.core.")
