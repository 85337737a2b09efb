"""What a run is made of, so that a run that goes on is known to be the same: config, rows and model.

Contents, not names: a run may go on in another folder or on another machine.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gdtrain.config import RunConfig
from gdtrain.data.conversation import Sample
from gdtrain.reporting.header import device_name
from gdtrain.session import Session

# Keys that change nothing in what is learned, or name what is compared by content. Any other key counts.
_FREE = {
    # how long, how often and where to
    *("train", "iters", "epochs", "steps_per_report", "steps_per_eval", "save_every", "keep_checkpoints"),
    *("early_stopping_patience", "test", "test_batches", "adapter_path", "report_to", "project_name", "config"),
    # compared by content
    *("model", "trust_remote_code", "data", "hf_dataset"),
    *("prompt_feature", "completion_feature", "chat_feature", "text_feature"),
    # where it began, which a checkpoint has left behind
    "resume_adapter_file",
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
    """config: the keys that count. rows: by split. model: hash of its config.json and of samples of its weights.
    computed: on what and how, which may round otherwise."""

    config: dict[str, Any]
    rows: dict[str, Rows]
    model: str
    computed: dict[str, Any]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def read(record: dict[str, Any]) -> "Fingerprint":
        """Raises KeyError or TypeError for what `record` did not make."""
        rows = {split: Rows(**found) for split, found in record["rows"].items()}
        return Fingerprint(record["config"], rows, record["model"], record["computed"])


def counting_keys(config: RunConfig) -> dict[str, Any]:
    """The keys of a config that a run which goes on must not change, with their values as JSON has them."""
    return {key: value for key, value in config.model_dump(mode="json").items() if key not in _FREE}


def take_fingerprint(session: Session, model: Path) -> Fingerprint:
    """Of a session with the splits train and valid. model: its folder, weights included."""
    config = session.config
    rows = {split: _rows(session.data.samples[split]) for split in ("train", "valid")}
    computed = {
        "device": device_name(),
        "mlx": version("mlx"),
        "kernel": session.swapped.choice.backend,
        **{key: getattr(config, key) for key in ("chunk_size", "grad_checkpoint", "compile")},
    }
    return Fingerprint(counting_keys(config), rows, _model_digest(model), computed)


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
            then_, now_ = (f"{rows.rows:,} rows, {rows.tokens:,} tokens" for rows in (one, other))
            same = ", with other contents" if then_ == now_ else ""
            yield f"data: {split} has changed: {then_} in the checkpoint, {now_} here{same}"
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
