"""Records to samples of bounded length, with a count of everything that was lost on the way."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from gdtrain.data.conversation import Sample, encode_all
from gdtrain.data.faults import SHOWN, raise_faults
from gdtrain.data.schema import Record
from gdtrain.errors import UserError

TOO_LONG = "longer than max_seq_length"
NO_TARGET = "without supervised tokens"
CUT_AWAY = "whose supervised tokens were all cut off"


@dataclass
class Counts:
    """What became of the rows. A target is a supervised token; the first token of a row is never one.

    rows_read = rows_kept + the sum of rows_dropped. tokens and supervised_tokens are those kept, tokens_lost and
    supervised_lost those of cut ends and of dropped rows. rows_truncated: rows kept, but cut. rows_of_one: rows kept
    with a single target, which in a conversation is the end of an empty answer.
    """

    max_seq_length: int
    rows_read: int = 0
    rows_kept: int = 0
    rows_truncated: int = 0
    rows_of_one: int = 0
    rows_dropped: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    tokens_lost: int = 0
    supervised_tokens: int = 0
    supervised_lost: int = 0

    def summary(self) -> str:
        """All of it in one line; what did not happen is left out."""
        kept = f"{self.rows_kept:,} of {self.rows_read:,} rows kept"
        parts = [f"{kept}, {self.tokens:,} tokens, {self.supervised_tokens:,} supervised"]
        if self.rows_truncated:
            parts.append(f"{self.rows_truncated:,} rows cut to {self.max_seq_length:,} tokens")
        if self.rows_of_one:
            parts.append(f"{self.rows_of_one:,} rows with one supervised token only (an empty answer?)")
        parts += [f"{count:,} rows dropped {reason}" for reason, count in sorted(self.rows_dropped.items())]
        if self.tokens_lost:
            parts.append(f"lost {self.tokens_lost:,} tokens, {self.supervised_lost:,} supervised")
        return "; ".join(parts)


def prepare(
    records: Iterable[Record],
    tokenizer: Any,
    *,
    max_seq_length: int,
    on_long: Literal["truncate", "drop", "error"] = "truncate",
    mask_prompt: bool = False,
    supervise: Literal["all", "last"] = "all",
    enable_thinking: bool | None = None,
) -> tuple[list[Sample], Counts]:
    """Tokenises the records, in their order, and settles what to do with long ones and with those that teach nothing.

    Memory grows with the tokens that are kept, 5 bytes each, and with nothing else: records are taken one at a time.

    on_long: a row of more than max_seq_length tokens keeps its first max_seq_length, is dropped, or is an error. A
    row without a target is dropped and counted. The other arguments are those of `encode`.
    Raises UserError for rows that cannot be encoded or are too long with on_long="error" (each named), and when
    records were given but no row is left.
    """
    if max_seq_length < 2:
        raise UserError(f"max_seq_length: {max_seq_length} leaves nothing to predict; 2 or more is accepted")
    if on_long not in ("truncate", "drop", "error"):
        raise UserError(f"on_long: {on_long!r}; accepted are truncate, drop and error")
    samples: list[Sample] = []
    counts = Counts(max_seq_length)
    faults: list[str] = []
    for sample in encode_all(
        records, tokenizer, mask_prompt=mask_prompt, supervise=supervise, enable_thinking=enable_thinking
    ):
        if len(faults) == SHOWN:
            faults.append("(the rows after these were not looked at)")
            break
        if isinstance(sample, UserError):
            faults.append(str(sample))
            continue
        if len(sample.ids) > max_seq_length and on_long == "error":
            faults.append(f"{sample.where}: {len(sample.ids)} tokens, but max_seq_length is {max_seq_length}")
            continue
        if (kept := _settle(sample, counts, on_long)) is not None:
            samples.append(kept)
    if faults:
        raise_faults("the data cannot be used:", faults)
    if counts.rows_read and not samples:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.rows_dropped.items()))
        raise UserError(f"no row is left to learn from: {reasons} (max_seq_length is {max_seq_length})")
    return samples, counts


def _settle(sample: Sample, counts: Counts, on_long: str) -> Sample | None:
    """The sample as it is kept, or None; counted either way."""
    length, targets = len(sample.ids), int(sample.supervised.sum())
    limit = counts.max_seq_length
    reason = None
    if length > limit:
        if on_long == "drop":
            reason = TOO_LONG
        # Copies, so that the rest of a long row is freed.
        sample = Sample(np.array(sample.ids[:limit]), np.array(sample.supervised[:limit]), sample.where)
    kept = int(sample.supervised.sum())
    if reason is None and not kept:
        reason = CUT_AWAY if targets else NO_TARGET
    counts.rows_read += 1
    if reason:
        counts.rows_dropped[reason] += 1
        counts.tokens_lost += length
        counts.supervised_lost += targets
        return None
    counts.rows_kept += 1
    counts.rows_truncated += length > limit
    counts.rows_of_one += kept == 1
    counts.tokens += len(sample.ids)
    counts.tokens_lost += length - len(sample.ids)
    counts.supervised_tokens += kept
    counts.supervised_lost += targets - kept
    return sample
