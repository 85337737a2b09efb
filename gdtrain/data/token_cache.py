"""Tokenised data on disk, so that the same rows are tokenised once.

A file holds one split under a key of all that its ids, masks and counts depend on: what the records say (not the name
of their file), the tokenizer's files and chat template, the options, the text of this package and the versions of the
libraries that tokenise. Records are read and checked anew every time, and faults are never kept.

Kept is what has WORTH_TOKENS or more; less takes a second or two, and a line that says where it came from would be
more to read than to wait for. When a file has been written, those that were not used for the longest time go, until
all of them together have at most LIMIT_BYTES; the new one stays in any case.

A file is written beside its place and renamed, so that several processes may write and read it. One that is damaged,
which its hash tells, is as if it were not there. In it are the SHA-256 of the rest, 32 bytes; a line of JSON, filled up
with spaces to a multiple of 8 bytes; the lengths of the samples, int64; all ids, int32; all masks, a byte each; the
places, a line each, without the name that all begin with.
"""

import hashlib
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from gdtrain.data.cache_folder import cache_folder
from gdtrain.data.conversation import Sample
from gdtrain.data.prepare import Counts
from gdtrain.data.records import Records

WORTH_TOKENS = 250_000  # 2 s with Qwen3's tokenizer on a Xeon at 2.8 GHz, see benchmarks/tokenise-cpu.json
LIMIT_BYTES = 5_000_000_000
# What a process that was killed left in writing is removed after so long.
_ABANDONED_SECONDS = 86_400
# Of a model's folder, all that a tokenizer is read from; config.json has its end-of-sequence tokens.
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "additional_chat_templates/*.jinja")
_DIGEST_BYTES = 32
Prepared = tuple[list[Sample], Counts]


def tokenised(
    records: Records,
    split: str,
    key: "Key",
    prepare: Callable[[], Prepared],
    say: Callable[[str], None],
) -> Prepared:
    """The samples of the records and their counts, from the cache or by `prepare`, which is then kept."""
    file = key.file(records)
    if file is None or not records:
        return prepare()
    if (found := _read(file, records.name)) is not None:
        say(f"{split}: {found[1].rows_read:,} rows from the cache, {file}")
        return found
    samples, counts = prepare()
    if counts.tokens + counts.tokens_lost >= WORTH_TOKENS:
        try:
            _write(file, samples, counts, records.name)
        except OSError as error:
            say(f"{split}: not kept in the cache, {file.parent}: {error.strerror or error}")
    return samples, counts


class Key:
    """What tokenised data depends on besides the records."""

    def __init__(self, model: Path, tokenizer: Any, options: dict[str, Any], *, trust_remote_code: bool) -> None:
        """model: the folder of the tokenizer's files. options: of `prepare`."""
        template = str(tokenizer.chat_template)
        self._parts = {
            "tokenizer": _digest_of(sorted(path for glob in _TOKENIZER_FILES for path in model.glob(glob)), model),
            "template": template,
            "today": str(date.today()) if "strftime_now" in template else None,  # some templates write the date
            "options": options,
            "gdtrain": _package_digest(),
            "versions": {name: version(name) for name in ("transformers", "tokenizers", "mlx-lm", "jinja2")},
        }
        # Code from the Hub may lie anywhere and do anything.
        self._is_complete = not trust_remote_code

    def file(self, records: Records) -> Path | None:
        """Where the samples of the records are or would be, None if not all is known that they depend on."""
        if not self._is_complete or records.digest is None:
            return None
        key = json.dumps(self._parts | {"records": records.digest}, sort_keys=True)
        return cache_folder() / "tokens" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.tokens"


def _read(file: Path, name: str) -> Prepared | None:
    """name: what the places of the records begin with now."""
    try:
        with file.open("rb") as stream:
            content = bytearray(os.fstat(stream.fileno()).st_size)
            stream.readinto(content)
    except OSError:
        return None
    if content[:_DIGEST_BYTES] != hashlib.sha256(memoryview(content)[_DIGEST_BYTES:]).digest():
        return None
    with suppress(OSError):
        os.utime(file)  # used just now
    at = content.index(b"\n", _DIGEST_BYTES) + 1
    described = json.loads(content[_DIGEST_BYTES:at])
    counts = Counts(**described | {"rows_dropped": Counter(described["rows_dropped"])})
    lengths = np.frombuffer(content, np.int64, counts.rows_kept, at)
    ids = np.frombuffer(content, np.int32, counts.tokens, at := at + lengths.nbytes)
    supervised = np.frombuffer(content, np.bool_, counts.tokens, at := at + ids.nbytes)
    places = content[at + supervised.nbytes :].decode().split("\n")
    ends = np.cumsum(lengths)
    spans = zip((ends - lengths).tolist(), ends.tolist(), places, strict=True)
    return [Sample(ids[start:end], supervised[start:end], name + place) for start, end, place in spans], counts


def _write(file: Path, samples: Sequence[Sample], counts: Counts, name: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=file.stem, suffix=".part", dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            digest = hashlib.sha256()
            stream.write(bytes(_DIGEST_BYTES))
            for part in _parts(samples, counts, name):
                digest.update(part)
                stream.write(part)
            stream.seek(0)
            stream.write(digest.digest())
        os.replace(partial, file)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    _make_room(file)


def _parts(samples: Sequence[Sample], counts: Counts, name: str) -> Iterator[bytes]:
    line = json.dumps(vars(counts)).encode()
    yield line + b" " * (-(len(line) + 1) % 8) + b"\n"
    yield np.array([len(sample.ids) for sample in samples], np.int64).tobytes()
    yield from (sample.ids.tobytes() for sample in samples)
    yield from (sample.supervised.tobytes() for sample in samples)
    yield "\n".join(sample.where.removeprefix(name) for sample in samples).encode()


def _make_room(new: Path) -> None:
    """The rule of the module's docstring."""
    now = time.time()
    for partial in new.parent.glob("*.part"):
        with suppress(OSError):
            if now - partial.stat().st_mtime > _ABANDONED_SECONDS:
                partial.unlink()
    total = 0
    for _, size, file in sorted(_files(new.parent, new), reverse=True):
        total += size
        if total > LIMIT_BYTES and file != new:
            with suppress(OSError):
                file.unlink()


def _files(folder: Path, new: Path) -> Iterator[tuple[float, int, Path]]:
    """(last use, bytes, file); the new one was used last."""
    for file in folder.glob("*.tokens"):
        with suppress(OSError):
            stat = file.stat()
            yield np.inf if file == new else stat.st_mtime, stat.st_size, file


@cache
def _package_digest() -> str:
    """Of the text of gdtrain.data: whatever changes there may change a sample."""
    folder = Path(__file__).parent
    return _digest_of(sorted(folder.glob("*.py")), folder)


def _digest_of(files: Sequence[Path], folder: Path) -> str:
    """Of contents, and of names within the folder."""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder).as_posix()} {len(content)} ".encode() + content)
    return digest.hexdigest()
