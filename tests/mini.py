"""Mini models of the three families, random but with the gates of trained ones, and checkpoints of them on disk."""

import importlib
import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gdkernels.backends import BACKENDS, Rule, available
from gdkernels.sizes import Sizes
from mlx.utils import tree_flatten, tree_unflatten

from gdtrain.data.batches import Batch, collate
from gdtrain.data.conversation import Sample
from gdtrain.model.lora import adapt
from gdtrain.model.swap import swap_linear_attention

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")

_ROPE = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
_TEXT = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}


def kernels(chunk_size: int = 64) -> list[str]:
    """The backends that run a mini model on this machine."""
    heads = [_TEXT[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")]
    return available(Sizes(1, 64, *heads, mx.float32, chunk_size))


def replace_rule(monkeypatch: pytest.MonkeyPatch, name: str, rule: Rule) -> None:
    """Put another computation into a backend."""
    monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], rule=rule))


def make_config(family: str = "qwen3_5", **config_overrides: Any) -> dict[str, Any]:
    """config.json of a mini model; overrides are keys of its text part, such as num_hidden_layers=8."""
    if family == "qwen3_next":
        return {"model_type": family, **_TEXT, **_EXPERTS, **_ROPE, "mlp_only_layers": [], **config_overrides}
    experts = _EXPERTS if family == "qwen3_5_moe" else {}
    rope = {"rope_parameters": {"type": "default", "mrope_section": [1, 1, 0], **_ROPE}}
    text = {"model_type": f"{family}_text", **_TEXT, **experts, **rope, **config_overrides}
    return {"model_type": family, "tie_word_embeddings": text["tie_word_embeddings"], "text_config": text}


def build(
    family: str = "qwen3_5", *, seed: int = 0, dtype: str = "float32", **config_overrides: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """A stock mlx-lm model and its config.json: 4 blocks, 3 of them Gated DeltaNet, in training mode as mlx-lm's are.

    Args:
        family: one of FAMILIES. dtype: of all weights but A_log, which is float32 as in published checkpoints.
        seed: of the weights, and of MLX's random state afterwards, so that an adapter added next is reproducible too.
    """
    config = make_config(family, **config_overrides)
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config))))
    rng = np.random.default_rng([seed, FAMILIES.index(family)])
    weights = [(name, _draw(rng, name, x.shape)) for name, x in tree_flatten(model.parameters())]
    model.update(
        tree_unflatten(
            [(n, mx.array(x, mx.float32 if n.endswith("A_log") else getattr(mx, dtype))) for n, x in weights]
        )
    )
    mx.eval(model.parameters())
    mx.random.seed(seed)
    return model, config


def write_checkpoint(
    folder: Path,
    family: str = "qwen3_5",
    *,
    seed: int = 0,
    dtype: str = "float32",
    tokenizer: Any = None,
    **config_overrides: Any,
) -> Path:
    """Write config.json, model.safetensors (MLX's layout) and a tokenizer into `folder`, which is made and returned.

    Args:
        tokenizer: a fast Hugging Face tokenizer; None is the toy tokenizer, one token a byte, with Qwen's template.
    """
    tokenizer = tokenizer or toy_tokenizer("qwen")
    model, config = build(family, seed=seed, dtype=dtype, **config_overrides)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    config["eos_token_id"] = tokenizer.eos_token_id
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tokenizer.save_pretrained(str(folder))
    return folder


def toy_tokenizer(template: str | None = "qwen", **options: Any) -> Any:
    """That of tests/data, which is not importable from everywhere."""
    return runpy.run_path(str(Path(__file__).parent / "data" / "toy_tokenizer.py"))["toy_tokenizer"](
        template, **options
    )


def trainable(
    family: str = "qwen3_5",
    *,
    kernel: str = "auto",
    chunk_size: int = 64,
    lora: dict[str, Any] | None = None,
    fill: bool = True,
    **build_arguments: Any,
) -> nn.Module:
    """`build`, swapped onto the trainable rule and adapted, in training mode; seeded throughout.

    Args:
        lora: arguments of `adapt`; rank 4 and scale 2 unless given. fill: see `fill_adapter`.
    """
    model, config = build(family, **build_arguments)
    swap_linear_attention(model, config, kernel=kernel, chunk_size=chunk_size)
    adapt(model, **{"rank": 4, "scale": 2.0, **(lora or {})})
    if fill:
        fill_adapter(model)
    return model.train()


def fill_adapter(model: nn.Module, seed: int = 0) -> None:
    """Random values for every lora_b, which is zero at first: then lora_a has gradients, and the adapter an effect."""
    rng = np.random.default_rng(seed)
    weights = tree_flatten(model.trainable_parameters())
    drawn = [(n, mx.array((0.05 * rng.standard_normal(x.shape)).astype(np.float32))) for n, x in weights]
    model.load_weights([(n, x) for n, x in drawn if n.endswith("lora_b")], strict=False)


def samples(*lengths: int, seed: int = 0, supervised: list[int] | None = None, vocabulary: int = 260) -> list[Sample]:
    """Rows of so many random tokens, all of them targets but the first, or the last `supervised[i]` of row i."""
    rng = np.random.default_rng([seed, *lengths])
    rows = []
    for i, length in enumerate(lengths):
        ids = rng.integers(1, vocabulary, length).astype(np.int32)
        first = 1 if supervised is None else length - supervised[i]
        rows.append(Sample(ids, np.arange(length) >= first, f"train.jsonl:{i + 1}"))
    return rows


def whole(ids: list[int], where: str = "train.jsonl:1") -> Sample:
    """A row of these tokens, all of them targets but the first."""
    return Sample(np.array(ids, np.int32), np.arange(len(ids)) > 0, where)


def unsupervised(row: Sample) -> Sample:
    """The same row with no target."""
    return Sample(row.ids, np.zeros_like(row.supervised), row.where)


def batch(rows: list[Sample], indices: list[int] | None = None, **options: Any) -> Batch:
    """`collate` of these rows (all of them: None), without padding beyond the longest unless `multiple` says so."""
    chosen = list(range(len(rows))) if indices is None else indices
    return collate(rows, chosen, **{"multiple": 1, "max_tokens": 4096, **options})


def relative_l2(got: mx.array, want: mx.array) -> float:
    """|got - want| / |want| in float32; shapes must be equal. inf where only one side is zero or not finite."""
    assert got.shape == want.shape, f"{got.shape} is not {want.shape}"
    got, want = (np.array(x.astype(mx.float32), np.float64) for x in (got, want))
    distance, size = np.linalg.norm(got - want), np.linalg.norm(want)
    if not np.isfinite(distance):
        return np.inf
    return float(distance / size) if size else (np.inf if distance else 0.0)


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    match name.rsplit(".", 2)[-2:]:
        case [*_, "A_log"]:
            x = np.log(rng.uniform(0.5, 8, shape))
        case [*_, "dt_bias"]:  # softplus(dt_bias) from 0.001 to 0.1, as the layers are initialised for training
            x = np.log(np.expm1(np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape))))
        case ["conv1d", "weight"]:
            x = 0.3 * rng.standard_normal(shape)
        case ["embed_tokens", "weight"]:
            x = rng.standard_normal(shape)
        case _ if len(shape) == 1:
            x = 1 + 0.1 * rng.standard_normal(shape)
        case _:
            x = rng.standard_normal(shape) / np.sqrt(shape[-1])
    return x.astype(np.float32)
