"""From `data` or `hf_dataset` to checked records. Every row is checked; all that is wrong is told at once."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from gdtrain.data.faults import raise_faults
from gdtrain.data.layouts import COLUMNS, MEANING
from gdtrain.data.schema import Columns, Record, RecordFaults, parse_record
from gdtrain.data.sources import Source, missing_split, open_sources
from gdtrain.data.stdlib import STDLIB, build_stdlib_dataset
from gdtrain.errors import UserError

__all__ = ["Record", "Splits", "load_records"]


@dataclass(frozen=True)
class Splits:
    """The records of each split (empty when it is not there) and notes for the user, one line each."""

    train: list[Record] = field(default_factory=list)
    valid: list[Record] = field(default_factory=list)
    test: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def load_records(
    data: str | None,
    hf_dataset: dict[str, Any] | list[Any] | None,
    *,
    mask_prompt: bool,
    require: str = "train",
    columns: Columns | None = None,
) -> Splits:
    """Reads and checks all records.

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
    splits = Splits(notes=notes)
    faults: list[str] = []
    for source in sources:
        records = _read(source, mask_prompt, faults, notes)
        getattr(splits, source.split).extend(records)
    if faults:
        count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
        raise_faults(f"the data cannot be used: {count}", faults)
    if not getattr(splits, require):
        if empty := [source.name for source in sources if source.split == require]:
            raise UserError(f"{', '.join(empty)}: no records; at least one is needed")
        raise UserError(missing_split(require, None if hf_dataset else data))
    return splits


def _read(source: Source, mask_prompt: bool, faults: list[str], notes: list[str]) -> list[Record]:
    """The records of one source; what is wrong goes to faults, what was not used to notes."""
    records: list[Record] = []
    unused: Counter[str] = Counter()
    first: Record | None = None
    for row in source.rows:
        if row.fault:
            faults.append(f"{row.where}: {row.fault}")
            continue
        try:
            record, extra = parse_record(row.value, row.where, source.columns)
        except RecordFaults as error:
            faults.extend(f"{row.where}: {fault}" for fault in error.faults)
            continue
        unused.update(extra)
        if first is None:
            first = record
            if record.kind == "text" and mask_prompt:
                faults.append(
                    f"{row.where}: mask_prompt is true but this is a text record, which has no prompt; accepted with"
                    ' mask_prompt are {"prompt", "completion"} and {"messages"}'
                )
        if (record.kind, record.layout) != (first.kind, first.layout):
            faults.append(
                f"{row.where}: {_describe(record, source.columns)}) in a file that begins with"
                f" {_describe(first, source.columns)}, {first.where}); one kind a file is accepted"
            )
            continue
        records.append(record)
    if first is not None and first.layout is not None:
        notes.append(f"{source.name}: the {first.layout} layout, read as messages: {MEANING[first.layout]}")
    columns = [f"{name} ({count})" for name, count in unused.items() if "[]." not in name]
    keys = [f"{name} ({count})" for name, count in unused.items() if "[]." in name]
    if columns:
        notes.append(f"{source.name}: columns not used (rows): {', '.join(columns)}")
    if keys:
        notes.append(f"{source.name}: message keys that only the chat template can use (rows): {', '.join(keys)}")
    return records


def _describe(record: Record, columns: Columns) -> str:
    """Such as 'a chat record (messages', to be closed."""
    if record.layout is not None:
        article = "an" if record.layout == "Alpaca" else "a"
        return f"{article} {record.layout} record ({', '.join(COLUMNS[record.layout][0])}"
    return f"a {record.kind} record ({', '.join(columns.of(record.kind))}"
