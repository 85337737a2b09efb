"""Samples to batches: rows of like length together or several documents in a row, padding that no loss sees, every
sample once an epoch.

Sizes: B rows, T positions. A sample of n tokens takes n - 1 positions: inputs ids[:-1], targets ids[1:].
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import mlx.core as mx
import numpy as np

from gdtrain.data.buckets import choose_widths
from gdtrain.data.conversation import Sample
from gdtrain.data.packing import pack, plan_packing
from gdtrain.errors import UserError

MULTIPLE = 32

# A row before it is an array: the index of its sample or, when packed, the indices of its documents.
Row = int | tuple[int, ...]
Rows = Sequence[Row]
_Item = TypeVar("_Item")


@dataclass(frozen=True, eq=False)
class Batch:
    """inputs, targets: int32 (B, T). mask: bool (B, T), true exactly where a row's target is supervised, never at
    padding. supervised_tokens: how many are true. rows: the indices of all samples, in the order of the rows and within
    them. padding_share: padding positions among all B * T. segments: when packed, int32 (B, T), the number of a
    position's document within its row, from 0, never falling; padding has the number after the last."""

    inputs: mx.array
    targets: mx.array
    mask: mx.array
    supervised_tokens: int
    rows: tuple[int, ...]
    padding_share: float
    segments: mx.array | None = None


class RunBatches:
    """The batches of a run: how many, how wide, and which samples are in each, before any array is made.

    Not packed, rows are sorted by their width, so that a batch holds rows of like length; rows of one width are
    shuffled, so that batches differ from epoch to epoch at no cost in padding; then the batches are shuffled. Packed,
    rows are full of documents, all have one width, and batch_size counts rows. Either way the number of batches and of
    their positions is the same for every epoch, and a run has at most WIDTHS + 1 shapes (B, T), packed 2: one more for
    the last, smaller batch.

    widths: ascending, the numbers of positions that rows are padded to. packed_rows: how many an epoch has, None when
    not packed. per_epoch: batches.
    """

    def __init__(
        self, samples: Sequence[Sample], batch_size: int, *, seed: int, max_tokens: int, packing: bool = False
    ) -> None:
        """max_tokens: the run's max_seq_length; no row has more than max_tokens - 1 positions.

        Raises ValueError for a sample of less than 2 or more than max_tokens tokens.
        """
        self.samples, self.batch_size, self.seed, self.max_tokens = samples, batch_size, seed, max_tokens
        positions = np.array([len(sample.ids) - 1 for sample in samples], np.int64)
        if len(positions) and not 1 <= positions.min() <= positions.max() < max_tokens:
            raise ValueError(
                f"samples of {positions.min() + 1} to {positions.max() + 1} tokens; 2 to {max_tokens} are accepted"
            )
        self._packing = plan_packing(positions, max_tokens - 1) if packing else None
        if self._packing:
            self.widths: tuple[int, ...] = (self._packing.width,)
        else:
            self.widths = tuple(min(width, max_tokens - 1) for width in choose_widths(positions, batch_size))
        self.packed_rows = len(self._packing.rows) if self._packing else None
        self.per_epoch = -(-(len(samples) if self.packed_rows is None else self.packed_rows) // batch_size)
        self._bucket = np.searchsorted(self.widths, positions)

    def epoch(self, epoch: int) -> list[Rows]:
        """The batches of one epoch: every sample exactly once, the smaller last batch included, wherever it is.

        A function of the samples' lengths, the constructor's arguments and the number of the epoch alone.
        """
        random = np.random.default_rng([self.seed, epoch])
        rows: Rows
        if self._packing:
            rows = pack(self._packing, random)
        else:
            order = random.permutation(len(self.samples))
            rows = order[np.argsort(self._bucket[order], kind="stable")].tolist()
        batches = _cut(rows, self.batch_size)
        return [batches[i] for i in random.permutation(len(batches))]

    def stream(self, start: int = 0) -> Iterator[tuple[int, Rows]]:
        """(epoch, batch) without end, epochs counted from 0. start: how many batches to pass over, for a resumed run;
        takes no longer than the epoch that it leads to."""
        if not self.samples:
            raise ValueError("no samples to stream")
        epoch, skip = divmod(start, self.per_epoch)
        while True:
            for batch in self.epoch(epoch)[skip:]:
                yield epoch, batch
            epoch, skip = epoch + 1, 0

    def longest(self, iterations: int | None = None) -> Rows:
        """The batch with the most positions B * T, among those the one with the most supervised tokens, of a run of so
        many batches. After one epoch, or with None, the first epoch's: every epoch has batches of the same shapes."""
        count = self.per_epoch if iterations is None else min(iterations, self.per_epoch)
        return max((rows for _, rows in islice(self.stream(), count)), key=self._size)

    def collate(self, rows: Rows, *, pad_id: int = 0) -> Batch:
        """The arrays of one batch."""
        return collate(self.samples, rows, pad_id=pad_id, max_tokens=self.max_tokens, widths=self.widths)

    @property
    def padding_share(self) -> float:
        """Padding positions among all positions of an epoch, 0 to 1, the same for every one."""
        return padding_share(self.samples, self.epoch(0), widths=self.widths)

    def _size(self, rows: Rows) -> tuple[int, int]:
        longest = max(_positions(self.samples, row) for row in rows)
        supervised = sum(int(self.samples[i].supervised.sum()) for row in rows for i in _documents(row))
        return len(rows) * _width(longest, MULTIPLE, self.widths), supervised


def collate(
    samples: Sequence[Sample],
    rows: Rows,
    *,
    pad_id: int = 0,
    multiple: int = MULTIPLE,
    max_tokens: int,
    widths: Sequence[int] = (),
) -> Batch:
    """One batch of these rows, padded at the right; it has segments when they are packed, each a tuple of indices.

    T is the least of widths (ascending) that holds the longest row, or without any its number of positions rounded up
    to multiple; at most max_tokens - 1, where max_tokens is the run's max_seq_length. Raises ValueError for an empty
    batch, a row of no positions or more than max_tokens - 1, and one that no width holds.
    """
    longest = max((_positions(samples, row) for row in rows), default=0)
    if not 1 <= longest < max_tokens:
        raise ValueError(f"the longest row of a batch has {longest} positions; 1 to {max_tokens - 1} are accepted")
    shape = len(rows), min(_width(longest, multiple, widths), max_tokens - 1)
    inputs, targets = (np.full(shape, pad_id, np.int32) for _ in range(2))
    mask, segments = np.zeros(shape, np.bool_), np.zeros(shape, np.int32)
    used = 0
    for b, row in enumerate(rows):
        start = 0
        for number, i in enumerate(_documents(row)):
            sample = samples[i]
            end = start + len(sample.ids) - 1
            inputs[b, start:end] = sample.ids[:-1]
            targets[b, start:end] = sample.ids[1:]
            mask[b, start:end] = sample.supervised[1:]
            segments[b, start:end] = number
            start = end
        segments[b, start:] = len(_documents(row))
        used += start
    return Batch(
        inputs=mx.array(inputs),
        targets=mx.array(targets),
        mask=mx.array(mask),
        supervised_tokens=int(mask.sum()),
        rows=tuple(int(i) for row in rows for i in _documents(row)),
        padding_share=1 - used / mask.size,
        segments=mx.array(segments) if isinstance(rows[0], tuple) else None,
    )


def eval_batches(samples: Sequence[Sample], batch_size: int, *, limit: int | None = None) -> list[Sequence[int]]:
    """Every row once, shortest first, always in the same order; fewer rows than batch_size are one smaller batch.

    limit: at most so many batches, spread evenly over the lengths (the first ones would be the shortest rows only);
    None or a negative number is all.
    """
    lengths = np.array([len(sample.ids) for sample in samples], np.int64)
    batches = _cut(np.argsort(lengths, kind="stable").tolist(), batch_size)
    if limit is None or not 0 <= limit < len(batches):
        return batches
    return [batches[(2 * i + 1) * len(batches) // (2 * limit)] for i in range(limit)]


def padding_share(
    samples: Sequence[Sample], batches: Sequence[Rows], multiple: int = MULTIPLE, widths: Sequence[int] = ()
) -> float:
    """Padding positions among all positions of these batches, 0 to 1. T is that of `collate`, but without the cap at
    max_seq_length where it is a multiple."""
    lengths = [[_positions(samples, row) for row in batch] for batch in batches]
    total = sum(len(rows) * _width(max(rows), multiple, widths) for rows in lengths)
    return 1 - sum(map(sum, lengths)) / total if total else 0.0


def check_enough(samples: Sequence[Sample], batch_size: int, packed_rows: int | None = None) -> None:
    """Raises UserError when there are fewer training rows than a batch has.

    packed_rows: how many the samples make when packed, None when they are not.
    """
    rows = len(samples) if packed_rows is None else packed_rows
    if rows < batch_size:
        packed = "" if packed_rows is None else f", packed from {len(samples)}"
        raise UserError(
            f"batch_size: {batch_size}, but there are {rows} training rows{packed}; at most {rows} is accepted"
        )


def _documents(row: Row) -> tuple[int, ...]:
    return row if isinstance(row, tuple) else (row,)


def _positions(samples: Sequence[Sample], row: Row) -> int:
    """How many a row has, without padding."""
    return sum(len(samples[i].ids) - 1 for i in _documents(row))


def _width(longest: int, multiple: int, widths: Sequence[int]) -> int:
    """T of a batch whose longest row has so many positions."""
    if not widths:
        return -(-max(longest, 1) // multiple) * multiple
    if longest > widths[-1]:
        raise ValueError(f"a row has {longest} positions, and the widths are {', '.join(map(str, widths))}")
    return widths[bisect_left(widths, longest)]


def _cut(rows: Sequence[_Item], batch_size: int) -> list[Sequence[_Item]]:
    return [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
