"""The loss: cross-entropy over exactly the supervised targets. No other position has logits."""

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from gdtrain.data.batches import Batch
from gdtrain.head_loss import summed_cross_entropy
from gdtrain.model.head import find_head
from gdtrain.model.hidden import hidden_states

# Supervised positions are padded to a multiple of this, so that a compiled step meets few shapes.
_MULTIPLE = 64


class Supervised(NamedTuple):
    """The supervised positions of a batch: indices into its B * T positions, int32 (P,), their targets, int32 (P,), and
    which of them are there and not padding, bool (P,)."""

    positions: mx.array
    targets: mx.array
    counted: mx.array


def supervised_positions(batch: Batch, vocabulary: int | None = None) -> Supervised:
    """Read them off the mask of a batch. One without any has padding alone, whose loss is 0.

    Args:
        vocabulary: how many logits the model has; None: too large a target is not looked for.

    Raises:
        ValueError: a supervised target is negative or beyond the vocabulary.
    """
    positions = np.flatnonzero(np.array(batch.mask))
    targets = np.array(batch.targets).reshape(-1)[positions]
    _check_targets(targets, vocabulary)
    padding = -len(positions) % _MULTIPLE or (0 if len(positions) else _MULTIPLE)
    return Supervised(
        mx.array(np.pad(positions, (0, padding)).astype(np.int32)),
        mx.array(np.pad(targets, (0, padding)).astype(np.int32)),
        mx.arange(len(positions) + padding) < len(positions),
    )


def token_loss(
    model: nn.Module,
    inputs: mx.array,
    supervised: Supervised,
    segments: mx.array | None = None,
) -> mx.array:
    """Sum of the cross-entropies of the supervised targets, in nats, float32.

    A sum, not a mean: batches, accumulation windows and validations are divided once, by the supervised tokens of all
    their rows, so that every token weighs the same wherever it stands.

    Args:
        inputs: (B, T) int32.
        segments: of packed documents, as for `hidden_states`.
    """
    hidden = hidden_states(model, inputs, segments).flatten(0, 1)[supervised.positions]
    return summed_cross_entropy(find_head(model), hidden, supervised.targets, supervised.counted)


def _check_targets(targets: np.ndarray, vocabulary: int | None) -> None:
    """On the host: MLX takes a number from somewhere in memory for a target that does not exist."""
    end = np.inf if vocabulary is None else vocabulary
    wrong = targets[(targets < 0) | (targets >= end)]
    if len(wrong):
        accepted = "0 or more" if vocabulary is None else f"0 to {vocabulary - 1}"
        raise ValueError(f"a supervised target is {wrong[0]}; accepted: {accepted}")
