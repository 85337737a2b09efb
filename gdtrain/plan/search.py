"""The longest rows and the largest batches that a budget allows."""

from collections.abc import Callable

from gdtrain.plan.forecast import Planner

SEQUENCE_STEP = 64
_LARGEST = 4096


def longest_rows(planner: Planner, budget: int) -> int | None:
    """The greatest max_seq_length, a multiple of 64, that fits at the configured batch size; None if 64 does not.

    It is at most what the model was made for.
    """
    return _greatest(lambda n: planner.forecast(max_seq_length=n).total <= budget, SEQUENCE_STEP, planner.longest)


def largest_batch(planner: Planner, budget: int) -> int | None:
    """The greatest batch size that fits at the configured max_seq_length; None if a single row does not."""
    return _greatest(lambda n: planner.forecast(batch_size=n).total <= budget, 1, _LARGEST)


def _greatest(fits: Callable[[int], bool], step: int, most: int) -> int | None:
    """The greatest multiple of step that fits, while the next one does not; at most the last one up to `most`."""
    last = most // step
    low, high = 0, 1
    while high <= last and fits(high * step):
        low, high = high, 2 * high
    high = min(high, last + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step or None
