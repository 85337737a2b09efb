"""From `data` or `hf_dataset` to checked records. Every row is checked; all that is wrong is told at once.

Memory does not grow with the data: rows are gone through one at a time, first to check them all, then again by who
needs the records. That the second reading gives what the first one checked is made sure by a hash of all records.
"""

import hashlib
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gdtrain.data.faults import Faults
from gdtrain.data.layouts import COLUMNS, MEANING
from gdtrain.data.progress import checking
from gdtrain.data.schema import Columns, Record, RecordFaults, parse_record
from gdtrain.data.sources import SPLITS, Source, missing_split, open_sources
from gdtrain.data.stdlib import STDLIB, build_stdlib_dataset
from gdtrain.errors import UserError

__all__ = ["Record", "Records", "Splits", "check_records"]

NAMED = 20  # Columns that are not used, in a note.


@dataclass(frozen=True)
class Records:
    """The records of a split, which were checked. Each time they are gone through they are read again, in their order,
    and one at a time is in memory.

    count: how many there are. kinds: of the records. digest: a hash of all that they say and of their places but for
    the file's name; None if it could not be taken, because a Hub data set holds more than JSON can say.
    """

    sources: tuple[Source, ...] = ()
    count: int = 0
    kinds: frozenset[str] = frozenset()
    digest: str | None = None

    @property
    def name(self) -> str:
        """What every record's place begins with: the name of the only source, "" if there are several."""
        return self.sources[0].name if len(self.sources) == 1 else ""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Record]:
        """Raises UserError, at the latest after the last record, if they are no longer what was checked."""
        digest = _Digest(self.name)
        for source in self.sources:
            for row in source.rows():
                if row.fault:
                    raise _changed(source)
                try:
                    record, _ = parse_record(row.value, row.where, source.columns)
                except RecordFaults as error:
                    raise _changed(source) from error
                digest.add(record)
                yield record
        if (digest.count, digest.hexdigest()) != (self.count, self.digest):
            raise _changed(*self.sources)


@dataclass(frozen=True)
class Splits:
    """The records of each split (none when it is not there) and notes for the user, one line each."""

    train: Records = field(default_factory=Records)
    valid: Records = field(default_factory=Records)
    test: Records = field(default_factory=Records)
    notes: list[str] = field(default_factory=list)


def check_records(
    data: str | None,
    hf_dataset: dict[str, Any] | list[Any] | None,
    *,
    mask_prompt: bool,
    require: str = "train",
    columns: Columns | None = None,
) -> Splits:
    """Reads all records once and checks them.

    data: a directory with train, valid and test files (.jsonl, .json, .csv or .parquet), "python-stdlib", or the
        name of a Hub data set. hf_dataset: mlx-lm's key of that name, one entry or a list of them; it goes before
        data. mask_prompt: text records are refused with it. require: the split that must have records.
        columns: the names of the fields in data (an entry of hf_dataset has its own), if not the usual ones.
    The order of the records is that of the files.
    Raises UserError: with every faulty record of every file, one line each ("train.jsonl:7: ..."), or naming the
    directory when the split that is required is missing.
    """
    if not hf_dataset and data == STDLIB:
        data = str(build_stdlib_dataset())
    sources, notes = open_sources(data, hf_dataset, columns or Columns())
    faults = Faults()
    records = {split: _check(sources, split, mask_prompt, faults, notes) for split in SPLITS}
    faults.raise_any()
    if not records[require]:
        if empty := [source.name for source in sources if source.split == require]:
            raise UserError(f"{', '.join(empty)}: no records; at least one is needed")
        raise UserError(missing_split(require, None if hf_dataset else data))
    return Splits(records["train"], records["valid"], records["test"], notes)


def _check(all_sources: list[Source], split: str, mask_prompt: bool, faults: Faults, notes: list[str]) -> Records:
    """The records of one split; what is wrong goes to faults, what was not used to notes."""
    sources = tuple(source for source in all_sources if source.split == split)
    digest = _Digest(Records(sources).name)
    kinds: set[str] = set()
    for source in sources:
        for record in _checked(source, mask_prompt, faults, notes):
            digest.add(record)
            kinds.add(record.kind)
    return Records(sources, digest.count, frozenset(kinds), digest.hexdigest())


def _checked(source: Source, mask_prompt: bool, faults: Faults, notes: list[str]) -> Iterator[Record]:
    """The records of one source that have no fault."""
    unused: Counter[str] = Counter()
    first: Record | None = None
    with checking(source.rows(), source.name) as rows:
        for row in rows:
            if row.fault:
                faults.add(f"{row.where}: {row.fault}")
                continue
            try:
                record, extra = parse_record(row.value, row.where, source.columns)
            except RecordFaults as error:
                for fault in error.faults:
                    faults.add(f"{row.where}: {fault}")
                continue
            unused.update(extra)
            if first is None:
                first = record
                if record.kind == "text" and mask_prompt:
                    faults.add(
                        f"{row.where}: mask_prompt is true but this is a text record, which has no prompt; accepted"
                        ' with mask_prompt are {"prompt", "completion"} and {"messages"}'
                    )
            if (record.kind, record.layout) != (first.kind, first.layout):
                faults.add(
                    f"{row.where}: {_describe(record, source.columns)}) in a file that begins with"
                    f" {_describe(first, source.columns)}, {first.where}); one kind a file is accepted"
                )
                continue
            yield record
    if first is not None and first.layout is not None:
        meaning = MEANING[first.layout].format(messages=first.column)
        notes.append(f"{source.name}: the {first.layout} layout, read as messages: {meaning}")
    columns = [f"{name} ({count})" for name, count in unused.items() if "[]." not in name]
    keys = [f"{name} ({count})" for name, count in unused.items() if "[]." in name]
    if columns:
        notes.append(f"{source.name}: columns not used (rows): {_listed(columns)}")
    if keys:
        notes.append(f"{source.name}: message keys that only the chat template can use (rows): {_listed(keys)}")


class _Digest:
    """A hash of records, taken one by one.

    Of their pickled form: it tells apart whatever may be rendered differently (1, 1.0, true, "1"; the order of keys)
    and is the same whenever the same file is read. The same records in another kind of file may have another hash.
    """

    def __init__(self, name: str) -> None:
        self.count = 0
        self._name, self._hash = name, hashlib.sha256()
        self._complete = True

    def add(self, record: Record) -> None:
        self.count += 1
        place = record.where.removeprefix(self._name)
        try:
            self._hash.update(pickle.dumps((place, record.kind, record.text, record.messages, record.tools), 5))
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError):
            self._complete = False

    def hexdigest(self) -> str | None:
        return self._hash.hexdigest() if self._complete else None


def _changed(*sources: Source) -> UserError:
    names = ", ".join(source.name for source in sources)
    return UserError(f"{names}: changed while it was read; run the same command again")


def _listed(names: list[str]) -> str:
    more = f", ... and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _describe(record: Record, columns: Columns) -> str:
    """Such as 'a chat record (messages', to be closed."""
    if record.layout is not None:
        article = "an" if record.layout == "Alpaca" else "a"
        names = (record.column,) if record.layout == "ShareGPT" else COLUMNS[record.layout][0]
        return f"{article} {record.layout} record ({', '.join(names)}"
    return f"a {record.kind} record ({', '.join(columns.of(record.kind))}"
