"""A model's config.json, found without its weights, and the keys that a forecast reads."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdtrain.errors import UserError
from gdtrain.model.family import MODEL_TYPES, family_of, is_tied
from gdtrain.model.tiny_path import TINY, tiny_model_path

_FILE = "config.json"


@dataclass(frozen=True)
class ModelConfig:
    """A config.json. file: where it was found, for messages. family: one of MODEL_TYPES. text: the part about the
    language model."""

    file: Path
    values: dict[str, Any]
    family: str

    @property
    def tied(self) -> bool:
        """Whether the embedding is the head too."""
        return is_tied(self.values)

    @property
    def text(self) -> dict[str, Any]:
        return self.values.get("text_config", self.values)

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number from 0 on.

        Raises:
            UserError: it is missing and has no default, or it is something else.
        """
        value = self.text.get(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"model: {self.file} has no {key}, without which there is no forecast")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UserError(f"model: {self.file}: {key} is {value!r}; accepted: a whole number")
        return value

    def flag(self, key: str) -> bool:
        return bool(self.text.get(key))


def find_model_config(name: str) -> ModelConfig:
    """Read the config.json of a model; nothing is downloaded.

    Args:
        name: "tiny", a folder that needs to hold nothing but its config.json, a config.json, or the id of a Hub
            repository whose config.json is in the cache.

    Raises:
        UserError: there is none, it cannot be read, or it is not of a model this tool trains.
    """
    file = _find(name)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"model: {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"model: {file} is not valid JSON: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("text_config", {}), dict):
        raise UserError(f"model: {file} is not the config.json of a model")
    family = family_of(values)
    if family not in MODEL_TYPES:
        kind = values.get("model_type")
        raise UserError(f"model: {name} is of type {kind!r}; a forecast can be made for {', '.join(MODEL_TYPES)}")
    return ModelConfig(file, values, family)


def _find(name: str) -> Path:
    path = tiny_model_path() if name == TINY else Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / _FILE).is_file():
            raise UserError(f"model: {path} has no {_FILE}")
        return path / _FILE
    accepted = f"a folder with a {_FILE}, a {_FILE}, a Hub id whose {_FILE} is in the cache, or tiny"
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"model: there is no {name}; accepted: {accepted}")
    return _find_in_cache(name, accepted)


def _find_in_cache(name: str, accepted: str) -> Path:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, _FILE)
    except HFValidationError as error:
        raise UserError(f"model: {name} is neither a folder here nor a Hub id: {error}") from error
    if not isinstance(cached, str):
        raise UserError(
            f"model: {name} is no folder here, and its {_FILE} is not in the cache of the Hub; accepted: {accepted}. "
            f"`hf download {name} {_FILE}` puts it there; `--set model=FILE` takes a config.json from elsewhere"
        )
    return Path(cached)
