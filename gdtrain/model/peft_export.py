"""An adapter in the form of Hugging Face peft, for the causal language model of the base in transformers."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from gdtrain.errors import UserError
from gdtrain.files import write_tensors, write_text
from gdtrain.model.adapter import AdapterFiles
from gdtrain.model.layout import text_name

PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_LEAVES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OF_MLPS = ("gate_proj", "up_proj", "down_proj")


def to_peft(adapter: AdapterFiles, base: str) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """The tensors of adapter_model.safetensors, float32, and the adapter_config.json beside them.

    peft's A (r, in) and B (out, r) are the transposes of mlx-lm's, its scale is lora_alpha / r; the magnitude of DoRA
    is the same (out,). Names are those within Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM and Qwen3NextForCausalLM.

    Args:
        base: the model's folder or Hub id, told to peft.

    Raises:
        UserError: trained in full, or an adapter of experts or a router, which are no linear layers there, or DoRA
            where peft can do LoRA alone.
    """
    if adapter.lora is None:
        raise UserError("--format peft: these weights were trained in full, and peft adapts by LoRA; use gdtrain fuse")
    tensors: dict[str, mx.array] = {}
    targets: dict[str, set[int]] = {}
    for name, x in sorted(adapter.weights.items()):
        module, _, leaf = name.rpartition(".")
        module = text_name(module)
        found = _BLOCK.fullmatch(module)
        if leaf not in _LEAVES or found is None:
            raise UserError(f"--format peft: {name} has no equal in peft")
        if ".switch_mlp." in module or module.endswith(".mlp.gate"):
            raise UserError(
                f"--format peft: {name} adapts {'experts' if x.ndim == 3 else 'a router'}, of which transformers makes "
                "no linear layer; use gdtrain fuse, or --format mlx-lm"
            )
        targets.setdefault(found[2], set()).add(int(found[1]))
        x = x.astype(mx.float32)
        tensors[f"base_model.model.{module}.{_LEAVES[leaf]}"] = mx.contiguous(x if leaf == "m" else x.T)
    return tensors, _config(adapter, adapter.lora, base, targets)


def write_peft(folder: Path, tensors: dict[str, mx.array], config: Mapping[str, Any]) -> None:
    """Into an existing folder. Raises OSError or RuntimeError, for example because the disk is full."""
    write_tensors(folder / PEFT_FILE, tensors)
    write_text(folder / PEFT_CONFIG, json.dumps(config, indent=2) + "\n")


def _config(
    adapter: AdapterFiles, lora: Mapping[str, Any], base: str, targets: Mapping[str, set[int]]
) -> dict[str, Any]:
    """targets: the projections by their name within a block, and the blocks where they are adapted."""
    alpha = lora["scale"] * lora["rank"]
    everywhere = adapter.num_layers == -1
    parameters = _targets_by_parameter(adapter, targets)
    if parameters and adapter.fine_tune_type == "dora":
        raise UserError(
            "--format peft: peft adapts MLPs of Qwen3-Next as bare parameters, and those by LoRA alone, not DoRA; "
            "use gdtrain fuse, or --format mlx-lm"
        )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora["rank"],
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": 0.0 if parameters else lora.get("dropout", 0.0),  # which bare parameters cannot have
        "target_modules": sorted(targets.keys() - parameters.keys()),
        "target_parameters": sorted(
            {
                f"{target}.weight" if everywhere else f"layers.{block}.{target}.weight"
                for target, blocks in parameters.items()
                for block in blocks
            }
        ),
        # Of all blocks unless the adapter has only the last ones.
        "layers_to_transform": None if everywhere else sorted(set().union(*targets.values())),
        "layers_pattern": None if everywhere else "layers",
        "use_dora": adapter.fine_tune_type == "dora",
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _targets_by_parameter(adapter: AdapterFiles, targets: Mapping[str, set[int]]) -> dict[str, set[int]]:
    """peft 0.21 takes gate_proj, up_proj and down_proj of Qwen3-Next for those of routed experts, whatever is before
    them, where it reads target_modules (peft.utils.transformers_weight_conversion), but not in target_parameters."""
    if any(name.startswith("language_model.") for name in adapter.weights):  # Qwen3.5, of either kind
        return {}
    return {target: blocks for target, blocks in targets.items() if target.rpartition(".")[2] in _OF_MLPS}
