"""Which of mlx-lm's model classes reads a checkpoint: by its config.json and the names of its tensors, so that later
checkpoints of the same architecture load whatever they call themselves. Imports nothing of MLX."""

from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

MODEL_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
_HYBRID = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def family_of(config: dict[str, Any], tensors: Collection[str] = ()) -> str | None:
    """The name of a module of mlx_lm.models, one of MODEL_TYPES wherever it can be; None for other architectures.

    Args:
        config: a config.json. tensors: the names of the checkpoint's tensors where they are known.
    """
    kind = config.get("model_type")
    if kind in MODEL_TYPES:
        return str(kind)
    text = config.get("text_config", config)
    if not isinstance(kind, str) or not all(isinstance(text.get(key), int) for key in _HYBRID):
        return None
    if (plain := kind.removesuffix("_text")) in MODEL_TYPES:
        return plain
    if kind.isidentifier() and find_spec(f"mlx_lm.models.{kind}"):
        return kind
    if any(".in_proj_qkvz." in name for name in tensors):
        return "qwen3_next"
    # Only Qwen3.5 has a text_config; without that and without tensors the two are not to be told apart.
    if "text_config" in config or any(".in_proj_qkv." in name for name in tensors):
        return "qwen3_5_moe" if text.get("num_experts") else "qwen3_5"
    return None


def as_mlx_lm_reads(config: dict[str, Any], family: str) -> dict[str, Any]:
    """The keys of a config.json that mlx-lm 0.32.2 looks for elsewhere, to put over it: the type, whether embeddings
    are tied (beside text_config in some checkpoints), and Qwen3-Next's rope (nested by transformers 5)."""
    changed: dict[str, Any] = {"model_type": family}
    text = config.get("text_config")
    if text is not None and "tie_word_embeddings" in config:
        changed["text_config"] = {"tie_word_embeddings": config["tie_word_embeddings"], **text}
    if family == "qwen3_next" and isinstance(rope := config.get("rope_parameters"), dict):
        changed |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        changed |= {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    return changed


def is_tied(config: dict[str, Any]) -> bool:
    """Whether the embedding is the head too."""
    return bool({**config, **config.get("text_config", {})}.get("tie_word_embeddings"))
