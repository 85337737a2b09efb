"""The wording of a fault in a config: pydantic's in this tool's words, and what an unknown key may have meant."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator
from typing import Any

from gdtrain.config import RunConfig
from gdtrain.config_section import Section, show

KeyPath = tuple[str | int, ...]


def fault_message(path: KeyPath, details: dict[str, Any]) -> str:
    """pydantic's fault in this tool's words."""
    given, context = show(details["input"]), details.get("ctx", {})
    match details["type"]:
        case "missing":
            return "required"
        case "extra_forbidden":
            return "unknown key; " + _suggestion(path)
        case "literal_error":
            return f"must be one of {context['expected'].replace(chr(39), '')}, not {given}"
        case "bool_type":
            return f"must be true or false, not {given}"
        case "string_type":
            return f"must be text, not {given} (quote it if it is a name)"
        case "string_too_short" | "too_short":
            return "must not be empty" if context["min_length"] == 1 else f"needs {context['min_length']} entries"
        case "too_long":
            return f"takes {context['max_length']} entries, not {context['actual_length']}"
        case "greater_than_equal":
            return f"must be at least {context['ge']}, not {given}"
        case "greater_than":
            return f"must be more than {context['gt']:g}, not {given}"
        case "less_than":
            return f"must be less than {context['lt']:g}, not {given}"
        case "list_type":
            return f"must be a list, not {given}"
        case "model_type" | "dict_type":
            return f"must be a mapping of keys to values, not {given}"
        case "none_required":
            return f"must be null or left out, not {given}"
        case "value_error":
            return str(context["error"])
    return str(details["msg"])


# What other tools call these keys.
_ALIASES = {
    "lora_layer": "num_layers",
    "lora_layers": "num_layers",
    "layers": "num_layers",
    "lr": "learning_rate",
    "lr_scheduler": "lr_schedule",
    "lr_scheduler_type": "lr_schedule.name",
    "warmup_steps": "lr_schedule.warmup",
    "max_length": "max_seq_length",
    "max_seq_len": "max_seq_length",
    "cutoff_len": "max_seq_length",
    "sequence_len": "max_seq_length",
    "epoch": "epochs",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_steps": "iters",
    "steps": "iters",
    "iterations": "iters",
    "per_device_train_batch_size": "batch_size",
    "micro_batch_size": "batch_size",
    "gradient_accumulation_steps": "grad_accumulation_steps",
    "gradient_checkpointing": "grad_checkpoint",
    "gradient_clipping": "max_grad_norm",
    "weight_decay": "optimizer_config.adamw.weight_decay",
    "betas": "optimizer_config.adamw.betas",
    "output_dir": "adapter_path",
    "save_steps": "save_every",
    "eval_steps": "steps_per_eval",
    "logging_steps": "steps_per_report",
    "save_total_limit": "keep_checkpoints",
    "dataset": "data",
    "patience": "early_stopping_patience",
    "r": "lora_parameters.rank",
    "lora_rank": "lora_parameters.rank",
    "lora_r": "lora_parameters.rank",
    "lora_alpha": "lora_parameters.alpha",
    "lora_scale": "lora_parameters.scale",
    "lora_dropout": "lora_parameters.dropout",
    "lora_keys": "lora_parameters.keys",
    "target_modules": "lora_parameters.keys",
    "lora_target_modules": "lora_parameters.keys",
    "use_rslora": "lora_parameters.rslora",
    "use_dora": "fine_tune_type",
    "lora_config": "lora_parameters",
    "torch_dtype": "dtype",
    "backend": "kernel",
    "subset": "config",
}


def _suggestion(path: KeyPath) -> str:
    """What an unknown key may have meant: its alias, the name elsewhere, the nearest of its level, else all of them."""
    *parents, key = [str(part) for part in path if isinstance(part, str)]
    name = key.lower().replace("-", "_")
    here = _names(parents)
    target = name if name in here else _ALIASES.get(name)
    prefix = "".join(f"{parent}." for parent in parents)
    if target is not None:
        leaf = target.removeprefix(prefix)
        return f"did you mean {leaf!r}?" if leaf in here or not parents else f"did you mean {target!r} (top level)?"
    for section in ("lora_parameters", "lr_schedule"):
        if name in _names([section]):
            return f"did you mean '{section}.{name}'?"
    if parents and name in RunConfig.model_fields:
        return f"did you mean {name!r} (top level)?"
    if near := difflib.get_close_matches(name, here, n=1):
        return f"did you mean {near[0]!r}?"
    return "valid keys: " + ", ".join(sorted(here))


def _names(parents: list[str]) -> list[str]:
    """Names of the fields of the section at `parents`."""
    section: type[Section] = RunConfig
    for parent in parents:
        section = next(_sections(section.model_fields[parent].annotation))
    return [name for name in section.model_fields if (*parents, name) != ("config",)]


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _sections(argument)
