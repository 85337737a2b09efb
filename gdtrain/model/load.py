"""A model and its tokenizer from a folder, the Hub or the package, ready for the swap."""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
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
from gdtrain.model.family import MODEL_TYPES, as_mlx_lm_reads, family_of, is_tied
from gdtrain.model.layout import WEIGHTS, main_dtype, part_of, read_heads, to_mlx_layout
from gdtrain.model.safetensors_file import Stored
from gdtrain.model.tiny_path import TINY, tiny_model_path

_FILES = ["*.json", "*.jsonl", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder on this machine, its config.json, the Hub repository that its weights are to come from, and the
    family of mlx-lm's models that it is read as."""

    folder: Path
    config: dict[str, Any]
    repository: str | None
    family: str


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
    if not isinstance(config, dict) or not isinstance(config.get("text_config", {}), dict):
        raise UserError(f"model: {config_file} is not the config.json of a model")
    if repository is None and not any(folder.glob(WEIGHTS)):
        raise UserError(f"model: {folder} has no {WEIGHTS}")
    family = family_of(config, read_heads(folder) if repository is None else {})
    if family is None:
        raise UserError(
            f"model: {name} is of type {config.get('model_type')!r}; accepted: {', '.join(MODEL_TYPES)}, and others "
            "whose config.json and tensors are those of one of these"
        )
    return ModelFiles(folder, config, repository, family)


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
    """The model, all floating weights in `dtype` or that of most of them in the checkpoint, A_log in float32, nothing
    trainable yet. describe_checkpoint says what was made of the checkpoint.

    Weights of a Hub repository are downloaded now, and read from disk when they are evaluated.

    Raises:
        UserError: the weights do not fit the config, or are float16 without being asked for.
    """
    if files.repository is not None:
        _download(files.repository, [WEIGHTS])
    heads = text_heads(files)
    if small := [name for name, head in heads.items() if head.dtype.startswith("F8")]:
        raise UserError(
            f"model: {len(small)} tensors of {files.folder} are 8-bit floats ({small[0]}), which mlx-lm does not read "
            "for these models; take the original checkpoint, or one that mlx_lm.convert quantised"
        )
    main = main_dtype(heads) if dtype is None else getattr(mx, dtype)
    if main == mx.float16 and dtype is None:
        raise UserError(
            "model: the weights are float16, whose range gradients overflow; set dtype: bfloat16, "
            "or dtype: float16 if that is what you want"
        )
    try:
        model, _ = load_weights(
            files.folder,
            lazy=True,
            model_config=as_mlx_lm_reads(files.config, files.family),
            get_model_classes=_classes(files),
        )
    except UserError:
        raise
    except Exception as error:  # mlx-lm raises whatever a faulty config.json or weights file leads to
        raise UserError(f"model: {files.folder} cannot be loaded: {_shortened(error)}") from error
    model.update(tree_map_with_path(lambda path, x: _cast(path, x, main), model.parameters()))
    model.freeze()
    return model


def text_heads(files: ModelFiles) -> dict[str, Stored]:
    """The heads of the tensors that are loaded, by the names in the files. Those of a Hub repository are downloaded by
    load_model."""
    tied = is_tied(files.config)
    return {name: head for name, head in read_heads(files.folder).items() if part_of(name, tied=tied) == "text"}


def _classes(files: ModelFiles) -> Callable[[dict[str, Any]], tuple[type[nn.Module], type]]:
    """mlx-lm's classes, with the layout of the checkpoint settled before they see its weights."""

    def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        module: Any = import_module(f"mlx_lm.models.{files.family}")
        if files.family not in MODEL_TYPES:
            return module.Model, module.ModelArgs
        stock: Any = module.Model

        class Model(stock):
            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                prefix = "language_model." if "language_model" in self else ""
                weights = to_mlx_layout(weights, prefix=prefix, tied=is_tied(files.config))
                _check_names(flat(self.parameters()).keys(), weights.keys(), files)
                return super().sanitize(weights)

        return Model, module.ModelArgs

    return classes


def _check_names(expected: Collection[str], given: Collection[str], files: ModelFiles) -> None:
    """Raise UserError with the names of tensors that are missing or belong nowhere."""
    text = files.config.get("text_config", files.config)
    quantised = "quantization" in files.config
    if not quantised and ("quantization_config" in files.config or "quantization_config" in text):
        return  # packed by another tool: mlx-lm renames the tensors later
    parts = {
        f"{name.removesuffix('weight')}{part}" for name in expected for part in ("scales", "biases", "global_scale")
    }
    unknown = sorted(set(given) - set(expected) - (parts if quantised else set()))
    missing = sorted(set(expected) - set(given))
    faults = [f"Missing {len(missing)} parameters: {_listed(missing)}"] if missing else []
    if unknown:
        faults.append(f"Received {len(unknown)} tensors that this model has no place for: {_listed(unknown)}")
        if not quantised and parts & set(unknown):
            faults.append("They are those of quantised weights, but config.json has no `quantization`")
    if faults:
        raise UserError(f"model: {files.folder} cannot be loaded: " + "\n  ".join(faults))


def _listed(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _cast(path: str, x: mx.array, dtype: mx.Dtype) -> mx.array:
    # The halves of fused experts are strided views, which MLX 0.32.4 multiplies wrongly on CUDA.
    x = mx.contiguous(x)
    if path.endswith("A_log"):
        return x.astype(mx.float32)
    if not mx.issubdtype(x.dtype, mx.floating) or path.endswith("global_scale"):
        return x
    return x.astype(dtype)


def _download(name: str, patterns: list[str]) -> Path:
    """The folder of a Hub repository in the cache. Files that are there are not asked for again, and a connection that
    drops within a file is taken up where it ended."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"model: no folder {name}; accepted: a folder, a Hub id such as Qwen/Qwen3.5-0.8B, or tiny")
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise UserError(
            f"model: {name} is neither a folder here nor to be had from the Hub: {_shortened(error, lines=1)}"
        ) from error
    except Exception as error:  # requests, httpx and httpx2 have their own; which it is depends on huggingface_hub
        raise UserError(
            f"model: the download of {name} broke off: {_shortened(error, lines=1)}. Run the same command again: files "
            "that came whole are kept"
        ) from error


def _shortened(error: Exception, lines: int = 12) -> str:
    """The type and the first lines of the message: of missing weights it names every one."""
    text = str(error).strip().splitlines() or [""]
    more = [f"... and {len(text) - lines} lines more"] if len(text) > lines > 1 else []
    return f"{type(error).__name__}: " + "\n".join([*text[:lines], *more])
