"""A line of very many points, reduced to those that can be seen."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Thinned:
    """What is drawn of a line, as (iteration, value); None is a gap. means: of columns of pixels, none where all points
    are drawn."""

    points: list[tuple[int, float | None]]
    means: list[tuple[int, float]]


def thin(iterations: Sequence[int], values: Sequence[float | None], last: int, columns: int) -> Thinned:
    """Of every column of pixels the smallest and the largest value, in their order, and the two ends of the line.

    Args:
        iterations: ascending.
        values: one for each; None is a gap, and is kept where a column has nothing else.
        last: the iteration at the right end.
        columns: of pixels. Up to twice as many points are all kept.
    """
    if len(values) <= 2 * columns:
        return Thinned(list(zip(iterations, values, strict=True)), [])
    x, y = np.asarray(iterations), np.array(values, np.float64)  # None becomes NaN
    column = np.minimum(columns - 1, x * columns // max(1, last))
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    kept, means = {0, len(x) - 1}, []
    for start, end in zip(starts, [*starts[1:], len(x)], strict=True):
        here = y[start:end]
        if np.isnan(here).all():
            kept.add(int(start))
        else:
            kept |= {int(start + np.nanargmin(here)), int(start + np.nanargmax(here))}
            means.append((int(x[(start + end) // 2]), float(np.nanmean(here))))
    return Thinned([(iterations[i], values[i]) for i in sorted(kept)], means)
