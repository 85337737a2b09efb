"""A run as the records of metrics.jsonl tell it: the parts of a resumed run put together, how far it came, its end."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]

# What may differ between two parts of a run, and is then said.
_COMPARED = ("gdtrain", "mlx", "mlx_lm", "device", "kernel", "convolution", "compiled", "iterations")


@dataclass(frozen=True)
class Part:
    """A further part of a run: from which iteration it goes on, how many records it takes the place of, and what its
    header says otherwise than the one before, as {key: (before, now)}."""

    iteration: int
    replaced: int
    changes: dict[str, tuple[Any, Any]]


@dataclass
class History:
    """header: of the newest part. train, val: their records by iteration, ascending. stop: of the newest part."""

    header: Record = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    train: list[Record] = field(default_factory=list)
    val: list[Record] = field(default_factory=list)
    stop: Record | None = None

    @property
    def planned(self) -> int | None:
        """Iterations of the whole run; None where the header does not say."""
        return _whole(self.header.get("iterations"))

    @property
    def reached(self) -> int:
        last = [records[-1]["iteration"] for records in (self.train, self.val) if records]
        return max(
            [*last, *(part.iteration for part in self.parts[-1:]), _whole((self.stop or {}).get("iteration")) or 0]
        )

    @property
    def ended(self) -> bool:
        """A stop was recorded, or the last iteration and, in a run with validations, the one after it."""
        if self.stop is not None:
            return True
        done = self.planned is not None and self.reached >= self.planned
        return done and (not self.val or self.val[-1]["iteration"] >= self.reached)

    @property
    def best(self) -> Record | None:
        """The validation of the lowest loss, the first of equals."""
        finite = [record for record in self.val if number(record, "loss") is not None]
        return min(finite, key=lambda record: record["loss"], default=None)


def read_history(records: Iterable[Record]) -> History:
    """Later records of an iteration count, and a part that goes on from iteration n leaves none after n of before."""
    history, train, val = History(), dict[int, Record](), dict[int, Record]()
    for record in records:
        kind, iteration = record.get("kind"), _whole(record.get("iteration"))
        if kind in ("header", "resume"):
            if history.header:
                stale = [(of, n) for of in (train, val) for n in of if iteration is not None and n > iteration]
                for of, n in stale:
                    del of[n]
                before, start = history.header, iteration if iteration is not None else max([0, *train, *val])
                changes = {
                    key: (before.get(key), record.get(key)) for key in _COMPARED if before.get(key) != record.get(key)
                }
                history.parts.append(Part(start, len(stale), changes))
            history.header, history.stop = record, None
        elif kind == "stop":
            history.stop = record
        elif iteration is not None and kind in ("train", "val"):
            (train if kind == "train" else val)[iteration] = record
    history.train, history.val = ([of[n] for n in sorted(of)] for of in (train, val))
    return history


def column(records: list[Record], key: str) -> list[float | None]:
    """`number` of every record."""
    return [number(record, key) for record in records]


def number(record: Record, key: str) -> float | None:
    """None for what is missing, null or not finite, or too large to draw."""
    value: Any = record.get(key)
    return value if type(value) in (float, int) and -1e100 < value < 1e100 else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
