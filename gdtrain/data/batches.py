"""Samples to batches: rows of like length together, padding that no loss sees, every row once an epoch.

Sizes: B rows, T positions. A row of n tokens has n - 1 positions: inputs ids[:-1], targets ids[1:].
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from gdtrain.data.conversation import Sample
from gdtrain.errors import UserError

MULTIPLE = 32


@dataclass(frozen=True, eq=False)
class Batch:
    """inputs, targets: int32 (B, T). mask: bool (B, T), true exactly where a row's target is supervised, never at
    padding. supervised_tokens: how many are true. rows: the indices of the samples, in the order of the rows.
    padding_share: padding positions among all B * T."""

    inputs: mx.array
    targets: mx.array
    mask: mx.array
    supervised_tokens: int
    rows: tuple[int, ...]
    padding_share: float


def collate(
    samples: Sequence[Sample], indices: Sequence[int], *, pad_id: int = 0, multiple: int = MULTIPLE, max_tokens: int
) -> Batch:
    """One batch of the samples at indices, padded at the right.

    T is the longest row's number of positions rounded up to multiple, but at most max_tokens - 1, where max_tokens is
    the run's max_seq_length. Raises ValueError for an empty batch or a sample of more than max_tokens tokens.
    """
    chosen = [samples[i] for i in indices]
    longest = max((len(sample.ids) for sample in chosen), default=0)
    if not 2 <= longest <= max_tokens:
        raise ValueError(f"the longest sample of a batch has {longest} tokens; 2 to {max_tokens} are accepted")
    width = min(_padded(longest, multiple), max_tokens - 1)
    inputs = np.full((len(chosen), width), pad_id, np.int32)
    targets = np.full((len(chosen), width), pad_id, np.int32)
    mask = np.zeros((len(chosen), width), np.bool_)
    used = 0
    for row, sample in enumerate(chosen):
        n = len(sample.ids) - 1
        inputs[row, :n] = sample.ids[:-1]
        targets[row, :n] = sample.ids[1:]
        mask[row, :n] = sample.supervised[1:]
        used += n
    return Batch(
        inputs=mx.array(inputs),
        targets=mx.array(targets),
        mask=mx.array(mask),
        supervised_tokens=int(mask.sum()),
        rows=tuple(int(i) for i in indices),
        padding_share=1 - used / mask.size,
    )


def epoch_batches(samples: Sequence[Sample], batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
    """The batches of one epoch as lists of sample indices: every row exactly once, the smaller last batch included.

    Rows are sorted by their padded length, so that a batch holds rows of like length; rows that pad to the same
    length are shuffled, so that batches differ from epoch to epoch at no cost in padding; then the batches are
    shuffled. A function of its arguments alone.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(samples))
    lengths = np.array([_padded(len(samples[i].ids), MULTIPLE) for i in order], np.int64)
    batches = _cut(order[np.argsort(lengths, kind="stable")], batch_size)
    return [batches[i] for i in random.permutation(len(batches))]


def train_stream(
    samples: Sequence[Sample], batch_size: int, *, seed: int, start: int = 0
) -> Iterator[tuple[int, list[int]]]:
    """(epoch, batch) without end, epochs counted from 0. start: how many batches to pass over, for a resumed run."""
    if not samples:
        raise ValueError("no samples to stream")
    epoch, skip = divmod(start, -(-len(samples) // batch_size))
    while True:
        for batch in epoch_batches(samples, batch_size, seed=seed, epoch=epoch)[skip:]:
            yield epoch, batch
        epoch, skip = epoch + 1, 0


def eval_batches(samples: Sequence[Sample], batch_size: int, *, limit: int | None = None) -> list[list[int]]:
    """Every row once, shortest first, always in the same order; fewer rows than batch_size are one smaller batch.

    limit: at most so many batches, spread evenly over the lengths (the first ones would be the shortest rows only);
    None or a negative number is all.
    """
    lengths = np.array([len(sample.ids) for sample in samples], np.int64)
    batches = _cut(np.argsort(lengths, kind="stable"), batch_size)
    if limit is None or not 0 <= limit < len(batches):
        return batches
    return [batches[(2 * i + 1) * len(batches) // (2 * limit)] for i in range(limit)]


def padding_share(samples: Sequence[Sample], batches: Sequence[Sequence[int]], multiple: int = MULTIPLE) -> float:
    """Padding positions among all positions of these batches, 0 to 1, without the cap at max_seq_length."""
    used = sum(len(samples[i].ids) - 1 for batch in batches for i in batch)
    total = sum(len(batch) * max(_padded(len(samples[i].ids), multiple) for i in batch) for batch in batches)
    return 1 - used / total if total else 0.0


def check_enough(samples: Sequence[Sample], batch_size: int) -> None:
    """Raises UserError when there are fewer training rows than a batch has."""
    if len(samples) < batch_size:
        raise UserError(
            f"batch_size: {batch_size}, but there are {len(samples)} training rows; at most {len(samples)} is accepted"
        )


def _padded(length: int, multiple: int) -> int:
    """Positions of a row of so many tokens, rounded up."""
    return -(-max(length - 1, 1) // multiple) * multiple


def _cut(order: np.ndarray, batch_size: int) -> list[list[int]]:
    return [[int(i) for i in order[at : at + batch_size]] for at in range(0, len(order), batch_size)]
