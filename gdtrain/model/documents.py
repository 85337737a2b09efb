"""Documents packed into rows, as the blocks of a model need to know them."""

from typing import NamedTuple, Self

import mlx.core as mx


class Documents(NamedTuple):
    """What `hidden_states` hands to every block in place of a mask; both (B, T) int32.

    segments: the number of a token's document; tokens of a row belong together where it is the same.
    positions: of a token within its document, from 0.
    """

    segments: mx.array
    positions: mx.array

    @classmethod
    def of(cls, segments: mx.array) -> Self:
        """From the number of the document at each position, (B, T) int32: wherever it changes, a document begins.

        Raises:
            ValueError: another shape or dtype.
        """
        if segments.ndim != 2 or segments.dtype != mx.int32:
            raise ValueError(f"segments are {segments.dtype} {segments.shape}; accepted: mlx.core.int32 (B, T)")
        here = mx.arange(segments.shape[1], dtype=mx.int32)
        starts = mx.pad(segments[:, 1:] != segments[:, :-1], [(0, 0), (1, 0)])
        # A document is numbered by its first token, so that no two of a row share a number, whatever the caller's are.
        first = mx.cummax(mx.where(starts, here, 0), axis=1)
        return cls(first, here - first)
