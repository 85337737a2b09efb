"""MLX's global random state as a number, which can be kept and set again; MLX itself offers no way to set it."""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import numpy as np


def read_random_state() -> int:
    """The key of the global random state, 64 bits."""
    (key,) = cast(Sequence[mx.array], mx.random.state)
    high, low = np.array(key).tolist()
    return high << 32 | low


def set_random_state(state: int) -> None:
    """Go on as from the moment at which `read_random_state` gave this number: a seed's 64 bits are its key."""
    mx.random.seed(state)
