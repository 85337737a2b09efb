"""A model and its tokenizer from a folder, the Hub or the package, ready for the swap."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_model as load_weights
from mlx_lm.utils import load_tokenizer as load_hf_tokenizer

from gdtrain.arrays import flat
from gdtrain.errors import UserError
from gdtrain.model.tiny_path import TINY, tiny_model_path

MODEL_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
_FILES = ["*.json", "*.jsonl", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]
_WEIGHTS = "model*.safetensors"


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder on this machine, its config.json, and the Hub repository that its weights are to come from."""

    folder: Path
    config: dict[str, Any]
    repository: str | None


def find_model(name: str) -> ModelFiles:
    """Find a model and read its config.json, before any weights are read.

    Args:
        name: "tiny" (the model inside the package), a folder, or the id of a Hub repository, of which all but the
            weights is downloaded.

    Raises:
        UserError: not found, not readable, or not a model this tool trains.
    """
    folder = tiny_model_path() if name == TINY else Path(name).expanduser()
    repository = None if folder.exists() else name
    if repository is not None:
        folder = _download(repository, _FILES)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise UserError(f"model: {folder} has no config.json")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"model: {config_file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"model: {config_file} is not a JSON object")
    if config.get("model_type") not in MODEL_TYPES:
        raise UserError(f"model: {name} is of type {config.get('model_type')!r}; accepted: {', '.join(MODEL_TYPES)}")
    if repository is None and not any(folder.glob(_WEIGHTS)):
        raise UserError(f"model: {folder} has no {_WEIGHTS}")
    return ModelFiles(folder, config, repository)


def load_tokenizer(files: ModelFiles, *, trust_remote_code: bool = False) -> TokenizerWrapper:
    """The tokenizer of the model's folder.

    Raises:
        UserError: the folder has none, or it cannot be read.
    """
    try:
        options = {"trust_remote_code": trust_remote_code}
        tokenizer = load_hf_tokenizer(files.folder, options, eos_token_ids=files.config.get("eos_token_id"))
    except Exception as error:  # transformers raises whatever the files of a folder lead to
        raise UserError(f"model: {files.folder} has no usable tokenizer: {_shortened(error)}") from error
    if not tokenizer.encode("a"):  # what transformers makes of a folder without the tokenizer's own file
        raise UserError(f"model: {files.folder} has no usable tokenizer: its vocabulary is empty")
    return tokenizer


def vocabulary_size(files: ModelFiles) -> int:
    """Rows of the model's embedding, as its config says.

    Raises:
        UserError: the config does not say.
    """
    size = files.config.get("text_config", files.config).get("vocab_size")
    if not isinstance(size, int):
        raise UserError(f"model: {files.folder / 'config.json'} has no vocab_size")
    return size


def load_model(files: ModelFiles, *, dtype: str | None = None) -> nn.Module:
    """The model, weights in the checkpoint's dtype (or `dtype`), A_log in float32, nothing trainable yet.

    Weights of a Hub repository are downloaded now, and read from disk when they are evaluated.

    Raises:
        UserError: the weights do not fit the config, or are float16 without being asked for.
    """
    if files.repository is not None:
        _download(files.repository, [_WEIGHTS])
    try:
        model, _ = load_weights(files.folder, lazy=True)
    except Exception as error:  # mlx-lm raises whatever a faulty config.json or weights file leads to
        raise UserError(f"model: {files.folder} cannot be loaded: {_shortened(error)}") from error
    model.update(tree_map_with_path(lambda path, x: _cast(path, x, dtype), model.parameters()))
    if dtype != "float16" and any(x.dtype == mx.float16 for x in flat(model.parameters()).values()):
        raise UserError(
            "model: the weights are float16, whose range gradients overflow; set dtype: bfloat16, "
            "or dtype: float16 if that is what you want"
        )
    model.freeze()
    return model


def _cast(path: str, x: mx.array, dtype: str | None) -> mx.array:
    # mlx-lm cuts the fused experts of raw checkpoints into strided halves, which MLX 0.32.4 multiplies wrongly on CUDA.
    x = mx.contiguous(x)
    if path.endswith("A_log"):
        return x.astype(mx.float32)
    if dtype is None or not mx.issubdtype(x.dtype, mx.floating):
        return x
    return x.astype(getattr(mx, dtype))


def _download(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"model: no folder {name}; accepted: a folder, a Hub id such as Qwen/Qwen3.5-0.8B, or tiny")
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"model: {name} is neither a folder here nor to be had from the Hub: {_shortened(error, lines=1)}"
        ) from error


def _shortened(error: Exception, lines: int = 12) -> str:
    """The type and the first lines of the message: of missing weights it names every one."""
    text = str(error).strip().splitlines() or [""]
    more = [f"... and {len(text) - lines} lines more"] if len(text) > lines > 1 else []
    return f"{type(error).__name__}: " + "\n".join([*text[:lines], *more])
