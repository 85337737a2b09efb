"""Several documents in a row: which, so that rows are full, in other company every epoch.

A document of n tokens takes n - 1 positions, because no target crosses from one to the next. Documents go, longest
first, each into the fullest row that has room for it (best fit decreasing). Before every epoch their order is shaken,
which changes the company and hardly the number of rows.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from gdtrain.data.buckets import round_width

# Before they are sorted, lengths are multiplied by 0.5 to 1.5, or by something nearer to 1 where this would cost more
# than 1 % of the rows: 60 documents of 1022 and 60 of 1025 positions fill 60 rows, shaken 65. 10,000 documents of
# median length 200 (lognormal, sigma 0.6) in rows of 2047 positions: 1170 rows, 1168 unshaken, 1174 in random order; of
# the pairs that share a row in one epoch 0.3 % do so in the next, and 24 % when only documents of equal length change
# places.
_SHAKES = (0.5, 0.25, 0.125, 0.0)
_COST = 1.01

_Rows = list[list[int]]


@dataclass(frozen=True, eq=False)
class Packing:
    """positions: int (n,), of each document. capacity: the most a row may hold. width: T of every row, which no epoch's
    fullest row exceeds. rows: a packing as document numbers, of as many rows as every epoch has. shakes: how much the
    order may be shaken, as a share of the lengths, most first."""

    positions: np.ndarray
    capacity: int
    width: int
    rows: _Rows
    shakes: tuple[float, ...]


def plan_packing(positions: np.ndarray, capacity: int) -> Packing:
    """How documents of so many positions are packed, the same for every epoch and seed.

    Raises ValueError for a document of less than one position or more than a row holds.
    """
    if len(positions) and not 1 <= positions.min() <= positions.max() <= capacity:
        raise ValueError(
            f"documents of {positions.min()} to {positions.max()} positions; 1 to {capacity} fit into a row"
        )
    plans = [_shaken(positions, np.random.default_rng(0), shake, capacity) for shake in _SHAKES]
    fewest = min(map(len, plans))
    most = next(i for i, rows in enumerate(plans) if len(rows) <= _COST * fewest)
    return Packing(positions, capacity, _width(positions, capacity), plans[most], _SHAKES[most:])


def pack(packing: Packing, random: np.random.Generator) -> list[tuple[int, ...]]:
    """The rows of one epoch as document numbers, every document once; a function of its arguments alone."""
    for shake in packing.shakes:
        rows = _shaken(packing.positions, random, shake, packing.capacity)
        if len(rows) <= len(packing.rows):
            break
    else:
        rows = _exchanged(packing.rows, packing.positions, random)
    rows.sort(key=len)
    while len(rows) < len(packing.rows):
        longest = rows.pop()
        half = len(longest) // 2
        for part in (longest[:half], longest[half:]):
            insort(rows, part, key=len)
    return [tuple(rows[i]) for i in random.permutation(len(rows))]


def _shaken(positions: np.ndarray, random: np.random.Generator, shake: float, capacity: int) -> _Rows:
    """Rows by best fit, the longest documents first, nearly; those of equal length in random order."""
    tied = random.permutation(len(positions))
    shaken = positions[tied] * random.uniform(1 - shake, 1 + shake, len(positions))
    return _best_fit(positions, tied[np.argsort(-shaken, kind="stable")], capacity)


def _exchanged(rows: _Rows, positions: np.ndarray, random: np.random.Generator) -> _Rows:
    """The same rows with documents of equal length in each other's place."""
    shuffled = random.permutation(len(positions))
    instead = np.empty_like(shuffled)
    instead[np.argsort(positions, kind="stable")] = shuffled[np.argsort(positions[shuffled], kind="stable")]
    return [instead[row].tolist() for row in rows]


def _best_fit(positions: np.ndarray, order: np.ndarray, capacity: int) -> _Rows:
    """Documents one after another, each into the row with the least room that is enough, or a new one."""
    lengths = positions.tolist()
    rows: _Rows = []
    rooms: list[int] = []  # the different rooms left, ascending
    with_room: dict[int, _Rows] = {}
    for document in order.tolist():
        length = lengths[document]
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room = capacity
            rows.append(row := [])
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[at], with_room[room]
        row.append(document)
        if left := room - length:
            if left not in with_room:
                insort(rooms, left)
            with_room.setdefault(left, []).append(row)
    return rows


def _width(positions: np.ndarray, capacity: int) -> int:
    """The fullest row that any packing can have, rounded up: documents of 1100 positions do not pair up in 2047."""
    sums, kept, fullest = 1, (2 << capacity) - 1, 0  # bit i of sums: some documents have i positions together
    for length in positions.tolist():
        sums |= sums << length & kept
        fullest = sums.bit_length() - 1
        if round_width(fullest) >= capacity:
            return capacity
    return round_width(fullest)
