"""The loss: cross-entropy over exactly the supervised targets. No other position has logits."""

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from gdtrain.data.batches import Batch
from gdtrain.model.head import hidden_states, project_to_vocabulary

# Supervised positions are padded to a multiple of this, so that a compiled step meets few shapes.
_MULTIPLE = 64


class Supervised(NamedTuple):
    """The supervised positions of a batch: indices into its B * T positions, int32 (P,), their targets, int32 (P,), and
    which of them are there and not padding, bool (P,)."""

    positions: mx.array
    targets: mx.array
    counted: mx.array


def supervised_positions(batch: Batch) -> Supervised:
    """Read them off the mask of a batch."""
    positions = np.flatnonzero(np.array(batch.mask))
    padding = -len(positions) % _MULTIPLE
    targets = np.array(batch.targets).reshape(-1)[positions]
    return Supervised(
        mx.array(np.pad(positions, (0, padding)).astype(np.int32)),
        mx.array(np.pad(targets, (0, padding)).astype(np.int32)),
        mx.arange(len(positions) + padding) < len(positions),
    )


def token_loss(model: nn.Module, inputs: mx.array, supervised: Supervised) -> mx.array:
    """Sum of the cross-entropies of the supervised targets, in nats, float32.

    A sum, not a mean: batches, accumulation windows and validations are divided once, by the supervised tokens of all
    their rows, so that every token weighs the same wherever it stands.

    Args:
        inputs: (B, T) int32.
    """
    hidden = hidden_states(model, inputs).flatten(0, 1)[supervised.positions]
    logits = project_to_vocabulary(model, hidden).astype(mx.float32)
    losses = nn.losses.cross_entropy(logits, supervised.targets)
    return mx.where(supervised.counted, losses, 0.0).sum()
