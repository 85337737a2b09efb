"""Writes docs/config.md from the schema in gdtrain/config.py: python scripts/config_reference.py

Where the page and the schema do not agree, tests/test_config_reference.py fails.
"""

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt, MaxLen
from mlx_lm.lora import CONFIG_DEFAULTS
from pydantic import AfterValidator, BeforeValidator
from pydantic.fields import FieldInfo

from gdtrain.config import SCHEDULES, SERVICES, RunConfig
from gdtrain.config_section import Section, size_in_bytes

PAGE = Path(__file__).parents[1] / "docs" / "config.md"

INTRO = """\
# Config

Made by scripts/config_reference.py from [the schema](../gdtrain/config.py).

A config is a YAML file; the smallest names `model` and `data`. `gdtrain check CONFIG` says whether it is right, with
its data, before any weights are read. `--set KEY=VALUE` overrides a key, `--set lora_parameters.rank=16` a nested one.
Unknown keys, wrong types and keys that exclude each other are refused, all at once, with their lines. `null` means
"not set". Numbers may be written `1e-5`. The resolved config is printed and saved in the run directory.

The name of a config that comes with gdtrain will do instead of a file: `gdtrain finetune quickstart`. A file of that
name goes first.
"""

# The first key of each group of RunConfig.
GROUPS = {
    "model": "Model and data",
    "fine_tune_type": "What is trained",
    "train": "Training",
    "val_batches": "Evaluation, reports, files",
    "kernel": "Kernel and memory",
}

# Why a default is not that of mlx-lm.
REASONS = {
    "model": "a run says what it trains",
    "data": "a run says what it learns from",
    "train": "that is what a config is for",
    "num_layers": '"the last 16" is an invisible default',
    "val_batches": "a validation loss should not depend on chance: all rows, in a fixed order",
    "grad_checkpoint": "memory is what runs out first",
}

# What no default shows.
MEANINGS = {
    "lora_parameters.keys": "null adapts every projection of attention, GDN and dense or shared MLP, never a router,\n"
    "  and experts only where they are named",
    "optimizer": "adafactor takes `learning_rate`, which MLX's default ignores",
    "grad_accumulation_steps": "the last window is used although it is not full; all tokens of a window weigh the same",
    "batch_size": "the last, smaller batch is used",
    "grad_checkpoint": "with dropout, the recomputed block drops the same elements and not others",
}


def main() -> None:
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The whole page."""
    parts = [INTRO.rstrip("\n")]
    for title, keys in _groups():
        parts.append(f"## {title}\n\n{_keys(RunConfig, keys)}")
    parts += [f"## {name}\n\n{_keys(section)}" for name, section in _nested(RunConfig)]
    schedules = (
        ["schedule", "arguments"],
        [
            [f"`{name}`", ", ".join(arguments[:required]) + "".join(f"[, {last}]" for last in arguments[required:])]
            for name, (arguments, required) in SCHEDULES.items()
        ],
    )
    parts.append(f"The arguments of each `lr_schedule.name`, those in brackets optional:\n\n{_table(*schedules)}")
    return "\n".join([*(f"{part}\n" for part in parts), _differences()])


def _groups() -> Iterator[tuple[str, list[str]]]:
    keys = list(RunConfig.model_fields)
    starts = [*map(keys.index, GROUPS), len(keys)]
    for title, start, end in zip(GROUPS.values(), starts, starts[1:], strict=False):
        yield title, keys[start:end]


def _nested(section: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Every section below this one, with its dotted name."""
    for name, field in section.model_fields.items():
        if (inner := _section(field.annotation)) is not None:
            yield f"{prefix}{name}", inner
            yield from _nested(inner, f"{prefix}{name}.")


def _keys(section: type[Section], keys: list[str] | None = None) -> str:
    fields = section.model_fields
    rows = [
        [f"`{key}`", _type(key, fields[key]), _default(fields[key]), fields[key].description] for key in keys or fields
    ]
    return _table(["key", "accepted", "default", "meaning"], rows)


def _differences() -> str:
    """Every default that is not mlx-lm's; a new one needs a reason here."""
    rows = []
    for key, theirs in CONFIG_DEFAULTS.items():
        field = RunConfig.model_fields[key]
        ours = None if field.is_required() else field.default
        if _section(field.annotation) is None and ours != theirs:
            rows.append([f"`{key}`", _default(field), _yaml(theirs), REASONS[key]])
    meanings = "\n".join(f"* `{key}`: {meaning}." for key, meaning in MEANINGS.items())
    return (
        f"## Different from mlx-lm on purpose\n\n{_table(['key', 'here', 'mlx-lm', 'why'], rows)}\n\n"
        f"Beside the defaults:\n\n{meanings}\n"
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if _section(field.annotation) is not None and field.default is not None:
        return ""
    return _yaml(field.default)


def _yaml(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else yaml.safe_dump(value, default_flow_style=True).split("\n")[0]
    return f"`{text}`"


def _section(annotation: Any) -> type[Section] | None:
    """The section that a key holds, also in a list or with null."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section, get_args(annotation))), None)


def _type(key: str, field: FieldInfo) -> str:
    if key == "report_to":  # its values are checked by a validator
        return " or ".join(f"`{name}`" for name in SERVICES) + ", or both"
    return _accepted(field.annotation, field.metadata)


def _accepted(annotation: Any, rules: list[Any]) -> str:
    """What a person may write, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [rule for item in arguments[1:] for rule in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return _accepted(arguments[0], inner + rules)
    if origin in (Union, types.UnionType):
        return " or ".join(_accepted(part, rules) for part in arguments if part is not type(None))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        most = next((f"{rule.max_length} " for rule in rules if isinstance(rule, MaxLen)), "")
        return f"list of {most}{_plural(_accepted(arguments[0], []))}"
    if origin is dict or annotation is dict:
        return "mapping"
    if _section(annotation) is not None:
        return "section, see below"
    words = {bool: "`true`, `false`", str: "text", int: "whole number", float: "number", type(None): "`null`"}
    return words[annotation] + _limits(rules)


def _limits(rules: list[Any]) -> str:
    validators = [rule.func for rule in rules if isinstance(rule, AfterValidator | BeforeValidator)]
    if size_in_bytes in validators:
        return " of bytes, or `500MB`, `2GB`"
    if any(isinstance(rule, AfterValidator) for rule in rules):
        return " from 1, or `-1`"
    text = ""
    for rule in rules:
        for kind, name, word in ((Ge, "ge", "from"), (Gt, "gt", "above"), (Le, "le", "up to"), (Lt, "lt", "below")):
            if isinstance(rule, kind):
                text += f" {word} {getattr(rule, name)}"
    return text


def _plural(word: str) -> str:
    return {"text": "texts", "number": "numbers", "section, see below": "sections, or one"}[word]


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


if __name__ == "__main__":
    main()
