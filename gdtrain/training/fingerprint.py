"""What a run is made of, so that a run that goes on is known to be the same: config, rows and model.

Contents, not names: a run may go on in another folder or on another machine.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gdtrain.config import RunConfig
from gdtrain.data.conversation import Sample

# Keys that change nothing in what is learned, or name what is compared by content. Any other key counts.
_FREE = {
    # how long, how often and where to
    *("train", "iters", "epochs", "steps_per_report", "steps_per_eval", "save_every", "keep_checkpoints"),
    *("early_stopping_patience", "test", "test_batches", "adapter_path", "report_to", "project_name", "config"),
    # compared by content
    *("model", "trust_remote_code", "data", "hf_dataset", "resume_adapter_file"),
    *("prompt_feature", "completion_feature", "chat_feature", "text_feature"),
    # how it is computed: the same but for rounding
    *("kernel", "chunk_size", "grad_checkpoint", "compile"),
    *("clear_cache_threshold", "memory_limit_gb", "cache_limit_gb", "wired_limit_gb"),
}
# Of a file of weights its length, its head and so many blocks spread over it: 18 GB would take a minute to read.
_BLOCKS, _BLOCK_BYTES = 64, 1 << 16


@dataclass(frozen=True)
class Rows:
    """Of one split: how many rows and tokens, and a hash of all ids and masks in their order."""

    rows: int
    tokens: int
    digest: str


@dataclass(frozen=True)
class Fingerprint:
    """config: the keys that count. rows: by split. model: hash of its config.json and of samples of its weights."""

    config: dict[str, Any]
    rows: dict[str, Rows]
    model: str

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def read(record: dict[str, Any]) -> "Fingerprint":
        """Raises KeyError or TypeError for what `record` did not make."""
        rows = {split: Rows(**found) for split, found in record["rows"].items()}
        return Fingerprint(record["config"], rows, record["model"])


def counting_keys(config: RunConfig) -> dict[str, Any]:
    """The keys of a config that a run which goes on must not change, with their values as JSON has them."""
    return {key: value for key, value in config.model_dump(mode="json").items() if key not in _FREE}


def take_fingerprint(config: RunConfig, samples: dict[str, list[Sample]], model: Path) -> Fingerprint:
    """samples: of the train and valid splits. model: its folder, weights included."""
    rows = {split: _rows(samples[split]) for split in ("train", "valid")}
    return Fingerprint(counting_keys(config), rows, _model_digest(model))


def changed_keys(then: dict[str, Any], now: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """One line for every key of two configs that differs, nested ones with their dotted name."""
    for key in sorted(then.keys() | now.keys()):
        one, other = then.get(key), now.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from changed_keys(one, other, f"{prefix}{key}.")
        elif one != other:
            yield f"{prefix}{key}: {_shown(one)} in the checkpoint, {_shown(other)} here"


def changed_contents(then: Fingerprint, now: Fingerprint) -> Iterator[str]:
    """One line for every split, and for the model, that is not what it was."""
    for split in sorted(then.rows.keys() | now.rows.keys()):
        one, other = then.rows[split], now.rows[split]
        if one != other:
            counts = (f"{rows.rows:,} rows, {rows.tokens:,} tokens" for rows in (one, other))
            same = "" if (one.rows, one.tokens) != (other.rows, other.tokens) else ", with other contents"
            yield f"data: {split} has changed: {' in the checkpoint, '.join(counts)} here{same}"
    if then.model != now.model:
        yield "model: its config.json or its weights are not those of the checkpoint"


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _rows(samples: Iterable[Sample]) -> Rows:
    digest, rows, tokens = hashlib.sha256(), 0, 0
    for sample in samples:
        for part in (sample.ids, sample.supervised):
            digest.update(f"{part.dtype.str} {len(part)} ".encode() + part.tobytes())
        rows += 1
        tokens += len(sample.ids)
    return Rows(rows, tokens, digest.hexdigest())


def _model_digest(folder: Path) -> str:
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("model*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            for block in range(_BLOCKS):
                stream.seek(block * size // _BLOCKS)
                digest.update(stream.read(_BLOCK_BYTES))
    return digest.hexdigest()
