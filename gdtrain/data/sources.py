"""Where rows come from: the files of a directory or data sets of the Hugging Face Hub. Rows are parsed, not checked."""

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gdtrain.data.json_list import JsonListError, read_json_list
from gdtrain.data.schema import Columns
from gdtrain.errors import UserError

SPLITS = ("train", "valid", "test")
HUB_ALIASES = {"valid": ("valid", "validation")}
# Keys of the configuration and of an hf_dataset entry that name a column, and the field of `Columns` they set.
COLUMN_KEYS = {
    "prompt_feature": "prompt",
    "completion_feature": "completion",
    "text_feature": "text",
    "chat_feature": "messages",
}
LIKELY_MISNAMED = ("val", "validation", "dev", "eval", "training", "testing")
_TOO_LONG_A_NUMBER = "a number of more digits than Python reads"


class Row(NamedTuple):
    """One row: its place ("train.jsonl:7"), and either its parsed value or why it has none."""

    where: str
    value: Any
    fault: str | None = None


@dataclass(frozen=True)
class Source:
    """One file, or one split of a Hub data set.

    name: how every row's place begins. rows: reads them from the first, one at a time, as often as it is called.
    """

    split: str
    name: str
    rows: Callable[[], Iterator[Row]]
    columns: Columns = field(default_factory=Columns)


def open_sources(
    data: str | None, hf_dataset: dict[str, Any] | list[Any] | None, columns: Columns
) -> tuple[list[Source], list[str]]:
    """The sources that the configuration names, in the order train, valid, test, and notes for the user.

    columns: of data; each entry of hf_dataset names its own.
    Raises UserError when neither names something that exists, or a split has two files.
    """
    if hf_dataset:
        entries = hf_dataset if isinstance(hf_dataset, list) else [hf_dataset]
        sources = [source for entry in entries for source in _hub_entry(entry)]
        return sorted(sources, key=lambda source: SPLITS.index(source.split)), []
    if not data:
        raise UserError("data: nothing to read; accepted are a directory, a Hub data set, or the key hf_dataset")
    path = Path(data).expanduser()
    if path.is_dir():
        return _directory(path, columns)
    if path.exists():
        raise UserError(f"data: {path} is a file; the directory that holds {_accepted('train')} is accepted")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", data):
        raise UserError(f"data: there is no directory {path}")
    return _hub_dataset(data, columns)


def columns_of(keys: dict[str, Any]) -> Columns:
    """The columns that prompt_feature and its like name among these keys; null leaves the usual name."""
    return Columns(**{field: keys[key] for key, field in COLUMN_KEYS.items() if keys.get(key) is not None})


def describe_directory(path: Path) -> str:
    """What a directory holds, in one line, for messages about missing files."""
    names = sorted(entry.name + "/" * entry.is_dir() for entry in path.iterdir())
    shown = ", ".join(names[:12]) + (f", ... and {len(names) - 12} more" if len(names) > 12 else "")
    return shown or "nothing"


def missing_split(split: str, data: str | None) -> str:
    """Why a split that is needed is not there, and what would be accepted."""
    path = Path(data).expanduser() if data else None
    if path is None or not path.is_dir():
        return f"{split}: the data set {data or 'in hf_dataset'} has no such split"
    return f"data: {path} has no {split} split; accepted is {_accepted(split)}; it holds {describe_directory(path)}"


def _accepted(split: str) -> str:
    return "one of " + ", ".join(f"{split}{suffix}" for suffix in READERS)


def _directory(path: Path, columns: Columns) -> tuple[list[Source], list[str]]:
    sources = []
    for split in SPLITS:
        files = [file for suffix in READERS if (file := path / f"{split}{suffix}").is_file()]
        if len(files) > 1:
            raise UserError(f"data: {path} has {' and '.join(file.name for file in files)}; keep one file a split")
        sources += [Source(split, file.name, partial(READERS[file.suffix], file, columns), columns) for file in files]
    others = sorted(f.name for f in path.iterdir() if f.suffix in READERS and f.stem in LIKELY_MISNAMED)
    names = ", ".join(others)
    return sources, [f"{path}: not read: {names} (the splits are train, valid and test)"] if others else []


def _json_lines(path: Path, _: Columns) -> Iterator[Row]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            where = f"{path.name}:{number}"
            try:
                value = json.loads(line.rstrip().decode("utf-8"))
                if b"\\ud" in line.lower():
                    json.dumps(value, ensure_ascii=False).encode("utf-8")  # A lone surrogate is no text.
            except json.JSONDecodeError as error:
                yield Row(
                    where, None, f"not valid JSON: {error.msg}, column {error.colno}; one object a line is accepted"
                )
            except (UnicodeDecodeError, UnicodeEncodeError) as error:
                yield Row(where, None, f"not valid UTF-8 text ({error.reason}); UTF-8 is accepted")
            except RecursionError:
                yield Row(where, None, "nested too deeply to be read")
            except ValueError:  # Python's own, on the digits of a number
                yield Row(where, None, _TOO_LONG_A_NUMBER)
            else:
                yield Row(where, value)


def _json_list(path: Path, _: Columns) -> Iterator[Row]:
    accepted = f"a list of objects is accepted (JSON Lines are read from {path.stem}.jsonl)"
    number = 0
    try:
        with _open(path) as file:
            for number, value in enumerate(read_json_list(file), start=1):
                json.dumps(value, ensure_ascii=False).encode("utf-8")
                yield Row(f"{path.name}:item {number}", value)
    except JsonListError as error:
        yield Row(f"{path.name}:{error.line}" if error.line else path.name, None, f"{error}; {accepted}")
    except UnicodeEncodeError as error:
        yield Row(f"{path.name}:item {number}", None, f"not valid UTF-8 text ({error.reason}); UTF-8 is accepted")
    except UnicodeDecodeError as error:
        yield Row(path.name, None, f"not valid UTF-8 text ({error.reason}); UTF-8 is accepted")
    except RecursionError:
        yield Row(f"{path.name}:item {number + 1}", None, "nested too deeply to be read")
    except ValueError:
        yield Row(f"{path.name}:item {number + 1}", None, _TOO_LONG_A_NUMBER)


def _csv(path: Path, columns: Columns) -> Iterator[Row]:
    """Rows of strings; the columns of messages (`conversations` too) and tools hold JSON."""
    _open(path).close()
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                where, fault = f"{path.name}:{reader.line_num}", None
                if None in row or None in row.values():
                    fault = f"another number of cells than the first line, which has {len(reader.fieldnames or [])}"
                value: dict[str, Any] = {key: cell for key, cell in row.items() if cell or key != columns.tools}
                for name in {columns.messages, "conversations"} & value.keys():
                    try:
                        value[name] = json.loads(value[name]) if value[name] else value[name]
                    except ValueError as error:
                        fault = fault or f'"{name}" is not valid JSON ({error})'
                yield Row(where, value, fault)
    except (UnicodeError, csv.Error) as error:
        yield Row(path.name, None, f"not a CSV file in UTF-8 ({error})")


def _parquet(path: Path, _: Columns) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    _open(path).close()
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(f"{path.name}:row {number}", value)
    except pyarrow.ArrowException as error:
        yield Row(path.name, None, f"not a Parquet file ({error})")


READERS: dict[str, Callable[[Path, Columns], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".json": _json_list,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"data: {path} cannot be read: {error.strerror}") from error


def _hub_dataset(name: str, columns: Columns) -> tuple[list[Source], list[str]]:
    data = _load(name, f"data: {name} is neither a directory here nor a Hub data set that can be loaded")
    sources, notes = [], []
    for split in SPLITS:
        found = [alias for alias in HUB_ALIASES.get(split, (split,)) if alias in data]
        if found:
            place = f"{name}[{found[0]}]"
            sources.append(Source(split, place, partial(_hub_rows, data[found[0]], place), columns))
    if unused := sorted(set(data) - {source.name.partition("[")[2][:-1] for source in sources}):
        notes.append(f"{name}: splits not read: {', '.join(unused)}")
    return sources, notes


def _hub_entry(entry: Any) -> Iterator[Source]:
    path, config = entry["path"], entry.get("config") or {}
    if fixed := [key for key in ("path", "split") if key in config]:
        raise UserError(f"hf_dataset.config: {', '.join(fixed)} is set by hf_dataset itself; remove it there")
    columns = columns_of(entry)
    defaults = {"train": "train[:80%]", "valid": "train[-10%:]", "test": None}  # mlx-lm's
    for split in SPLITS:
        part = entry.get(f"{split}_split", defaults[split])
        if part:
            name = f"{path}[{part}]"
            rows = _load(path, f"hf_dataset: {name} cannot be loaded", split=part, **config)
            yield Source(split, name, partial(_hub_rows, rows, name), columns)


def _load(name: str, failure: str, /, **arguments: Any) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, **arguments)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()
        raise UserError(f"{failure}: {reason[0] if reason else type(error).__name__}") from error


def _hub_rows(rows: Any, name: str) -> Iterator[Row]:
    return (Row(f"{name}:row {number}", value) for number, value in enumerate(rows, start=1))
