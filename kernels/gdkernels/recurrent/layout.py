"""How the state lies in the threads, and how many tokens one launch takes."""

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from gdkernels.portable.program import SIMD_WIDTH
from gdkernels.sizes import Sizes

MAX_KEY_DIM = 256

# Partial sums of dq and dk that one launch of the backward may leave behind, unless a single chunk needs more.
SUMS_BYTES = 256 * 2**20
# Multiply-adds of one launch, unless a single chunk needs more: about 50 ms on an M1 (2.6 TFLOP/s, a tenth of it used),
# because a display driver may end a kernel that runs for long. Estimated, not measured.
LAUNCH_MULTIPLY_ADDS = 6 * 10**9

# Tokens of a chunk at most: the backward's scratch grows with it. A longer chunk_size is cut to this.
MAX_CHUNK = 256

# Tokens whose decayed states the backward holds in registers; even, as two tokens share its threadgroup memory, and a
# power of two. With 2 the states written and read again would double; 8 leaves room for 6 state values a lane instead
# of 12, and unrolls into more text than the 12 KB instruction cache of an M1. Reasoned, not measured.
STEPS = 4

# Values alive in a lane of the backward, at most; beyond 128 an Apple GPU spills, and addresses need their share.
MAX_LIVE_FLOATS = 100


@dataclass(frozen=True)
class Layout:
    """Rows of the state in the threads.

    Attributes:
        lane_rows: value rows of a SIMD group; a lane holds Dk / 32 values of each.
        simd_groups: SIMD groups of a threadgroup.
    """

    lane_rows: int
    simd_groups: int

    @property
    def threads(self) -> int:
        return SIMD_WIDTH * self.simd_groups

    def blocks(self, Dv: int) -> int:
        """Threadgroups of one value head."""
        return -(-Dv // (self.lane_rows * self.simd_groups))


def layout_of(Dk: int) -> Layout:
    """As many rows a lane as its registers hold, as a power of two: what is loaded for one row serves all, and the sums
    of several rows share shuffles."""
    lane_rows = 8
    while lane_rows > 1 and live_floats(Dk, lane_rows) > MAX_LIVE_FLOATS:
        lane_rows //= 2
    return Layout(lane_rows, simd_groups=4)


def live_floats(Dk: int, lane_rows: int) -> int:
    """Values alive in a lane on the backward's way back: the decayed states and the gradient of the state; k, q and one
    of dq and dk; v's error, dy and the gradient of delta; a decay and a gradient of it for every step; half a dozen
    sums."""
    width = Dk // SIMD_WIDTH
    return (STEPS + 1) * lane_rows * width + 3 * width + 3 * lane_rows + 2 * STEPS + 6


def arena_floats(Dk: int, simd_groups: int) -> int:
    """Threadgroup memory of the backward: dq and dk of two tokens, and the gates of STEPS, for every SIMD group."""
    return simd_groups * (2 * 2 * Dk + 2 * STEPS)


def spans(T: int, C: int, bytes_per_token: int, multiply_adds_per_token: int) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) token of every launch: whole chunks, as many as both limits allow, at least one.

    Args:
        bytes_per_token: of partial sums, 0 where there are none.
    """
    tokens = LAUNCH_MULTIPLY_ADDS // multiply_adds_per_token
    if bytes_per_token:
        tokens = min(tokens, SUMS_BYTES // bytes_per_token)
    tokens = C * max(1, tokens // C)
    for first in range(0, T, tokens):
        yield first, min(T, first + tokens)


def span_array(sizes: Sizes, first: int, last: int) -> mx.array:
    """The run-time values of both kernels."""
    return mx.array([sizes.T, sizes.B, sizes.C, first, last, sizes.Hk, sizes.Hv], mx.int32)
