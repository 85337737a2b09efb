"""All records of a data set in lists, which only a test has the memory for."""

from dataclasses import dataclass
from typing import Any

from gdtrain.data.records import Record, check_records


@dataclass(frozen=True)
class Listed:
    train: list[Record]
    valid: list[Record]
    test: list[Record]
    notes: list[str]


def read(*args: Any, **options: Any) -> Listed:
    """check_records(...), and the records."""
    splits = check_records(*args, **options)
    for records in (splits.train, splits.valid, splits.test):
        assert len(records) == len(list(records))
    return Listed(list(splits.train), list(splits.valid), list(splits.test), splits.notes)
