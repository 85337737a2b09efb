"""The widths of a run: the few numbers of positions T that rows are padded to, chosen from the run's own lengths."""

import numpy as np

# A shape costs a compilation where the step is compiled, and buffers that other shapes cannot reuse; a width less costs
# padding. 1000 lognormal lengths, median 200, sigma 0.6 to 1, at most 2048 tokens, batch sizes 1 to 8: of all positions
# 6.7 to 8.7 % are padding with 24 widths, 8.2 to 11.3 % with 16, 4.8 to 8.3 % with all 64 multiples of 32, and 8.8 to
# 10.9 % with 24 widths in a fixed ratio.
WIDTHS = 24


def round_width(positions: int) -> int:
    """The next width that may be chosen: a multiple of 32 to 512, of 64 to 4096, then of 64 and less than 1/32 more.

    64 is the chunk of the gated delta rule on GPUs: half a chunk costs as much as a whole one.
    """
    step = 32 if positions <= 512 else max(64, 1 << (positions - 1 >> 6).bit_length())
    return -(-positions // step) * step


def choose_widths(positions: np.ndarray, batch_size: int) -> tuple[int, ...]:
    """At most WIDTHS widths, ascending, for rows of so many positions (int, (n,)), cut into batches in order of length.

    No others have less padding: a batch is as wide as the chosen width of its longest row, so the positions of an epoch
    depend on the widths alone, and dynamic programming finds their least. A fixed ladder would spend widths where the
    run has no rows.
    """
    ordered = np.sort(positions)
    ends = np.minimum(np.arange(batch_size, len(ordered) + batch_size, batch_size), len(ordered))
    heights = np.diff(ends, prepend=0)  # rows of each batch
    rounded = np.array([round_width(int(n)) for n in ordered[ends - 1]], np.int64)
    widths, which = np.unique(rounded, return_inverse=True)
    rows = np.concatenate([[0], np.cumsum(np.bincount(which, heights, len(widths)).astype(np.int64))])
    # least[j]: positions of the batches of the j smallest widths, of which so many are chosen as rounds were made.
    least = np.concatenate([[0], widths * rows[1:]])
    stops: list[np.ndarray] = [np.zeros(len(rows), np.int64)]
    for _ in range(min(WIDTHS, len(widths)) - 1):
        stop, fewer = np.zeros(len(rows), np.int64), least.copy()
        for j in range(1, len(rows)):
            cost = fewer[:j] + widths[j - 1] * (rows[j] - rows[:j])
            stop[j] = cost.argmin()
            least[j] = cost[stop[j]]
        stops.append(stop)
    chosen, j = [], len(widths)
    for stop in reversed(stops):
        if j:
            chosen.append(int(widths[j - 1]))
            j = int(stop[j])
    return tuple(reversed(chosen))
