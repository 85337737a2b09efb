"""A histogram in plain characters, which any terminal, pipe and encoding can show."""

from collections.abc import Sequence
from itertools import count

import numpy as np

BINS, WIDTH = 12, 40


def histogram(values: Sequence[int], *, bins: int = BINS, width: int = WIDTH) -> list[str]:
    """One line for each range of values: "10-19 | ##### 5". Ranges are equally wide, at most `bins`.

    values: whole numbers, 0 or more. width: the longest bar, in characters; only an empty range has a bar of none.
    Without values there are no lines.
    """
    if not len(values):
        return []
    numbers = np.asarray(values, np.int64)
    first, last = int(numbers.min()), int(numbers.max())
    steps = (unit * 10**power for power in count() for unit in (1, 2, 5))
    step = next(step for step in steps if last // step - first // step < bins)
    rows = np.bincount(numbers // step - first // step).tolist()
    starts = [(first // step + i) * step for i in range(len(rows))]
    labels = [f"{start:,}" if step == 1 else f"{start:,}-{start + step - 1:,}" for start in starts]
    pad, bars = max(map(len, labels)), ["#" * -(-n * width // max(rows)) for n in rows]
    return [f"{label:>{pad}} | {bar}{' ' * bool(bar)}{n:,}" for label, bar, n in zip(labels, bars, rows, strict=True)]
