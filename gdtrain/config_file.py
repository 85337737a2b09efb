"""A run's YAML file in and out: line numbers, overrides, every fault at once, nearest names."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gdtrain.config import RunConfig
from gdtrain.config_faults import KeyPath, fault_message
from gdtrain.config_section import Contradictions, show
from gdtrain.errors import UserError


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a config: a file, or the bare name of one that comes with gdtrain, such as quickstart.

    `overrides` ("key=value", "a.b=value", values in YAML) win over the file.
    Raises UserError with one line per fault, all of them at once.
    """
    source = _read(shipped_config(Path(path)) or Path(path))
    for override in overrides:
        source.apply(override)
    config, found = _validate(source.values)
    source.faults += [source.fault(path, message) for path, message in found]
    if source.faults or config is None:
        raise UserError("\n".join(fault.text for fault in sorted(source.faults, key=lambda fault: fault.order)))
    return config


def shipped_config(path: Path) -> Path | None:
    """The file of the config that comes with gdtrain under this bare name, if no file here has that name."""
    file = _SHIPPED / f"{path}.yaml"
    return file if len(path.parts) == 1 and file.is_file() and not path.is_file() else None


def shipped_configs() -> list[str]:
    """The names that `shipped_config` knows."""
    return sorted(file.stem for file in _SHIPPED.glob("*.yaml"))


def dump_yaml(config: RunConfig) -> str:
    """The resolved config as YAML, in the order of the schema. load_config reads it back to an equal config."""
    values = config.model_dump()
    if config.epochs is not None:
        del values["iters"]  # the two exclude each other
    if config.optimizer == "adafactor" and config.optimizer_config.adafactor.relative_step:
        del values["learning_rate"]  # the two exclude each other
    if config.lora_parameters.alpha is not None:
        del values["lora_parameters"]["scale"]
    arguments = config.optimizer_config.model_dump(exclude_none=True)
    values["optimizer_config"] = {name: chosen for name, chosen in arguments.items() if chosen}
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


_SHIPPED = Path(__file__).with_name("configs")  # in the repository a link to configs/

# PyYAML reads 1e-5 as text because YAML 1.1 wants a dot; mlx-lm adds the same rule.
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


@dataclass(frozen=True)
class _Fault:
    order: float
    text: str


@dataclass
class _Source:
    """The values of a file with the place each key came from."""

    name: str
    values: dict[str, Any]
    lines: dict[KeyPath, int]
    set_by: dict[KeyPath, str] = field(default_factory=dict)
    faults: list[_Fault] = field(default_factory=list)

    def fault(self, path: KeyPath, message: str) -> _Fault:
        """One line of the report: where `path` was written, its name, what is wrong."""
        key = ".".join(str(part) for part in path)
        for length in range(len(path), 0, -1):
            start = path[:length]
            if start in self.set_by:
                option = self.set_by[start]
                label = "" if option.partition("=")[0].strip() == key else f"{key}: "
                return _Fault(float("inf"), f"--set {option}: {label}{message}")
            if start in self.lines:
                return _Fault(self.lines[start], f"{self.name}:{self.lines[start]}: {key}: {message}")
        return _Fault(0, f"{self.name}: {key}: {message}")

    def apply(self, override: str) -> None:
        """Set one "a.b=value" over the file's values."""
        key, equals, text = override.partition("=")
        path = tuple(key.strip().split("."))
        try:
            if not equals or "" in path:
                raise ValueError("must be key=value, such as lora_parameters.rank=16")
            value = _parse(text)[0]
            target = self.values
            for part in path[:-1]:
                if target.get(part) is None:
                    target[part] = {}
                target = target[part]
                if not isinstance(target, dict):
                    raise ValueError(f"{part} is not a mapping in {self.name}")
        except (ValueError, yaml.YAMLError) as error:
            problem = getattr(error, "problem", None)
            reason = f"not valid YAML: {problem}" if problem else str(error)
            self.faults.append(_Fault(float("inf"), f"--set {override}: {reason}"))
            return
        target[path[-1]] = value
        for places in (self.lines, self.set_by):
            for place in [place for place in places if place[: len(path)] == path]:
                del places[place]
        self.set_by[path] = override


def _read(path: Path) -> _Source:
    """Parse the file. What keeps it from being a mapping is raised at once; duplicate keys are collected."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a YAML file")
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        bare = len(path.parts) == 1
        names = f"; accepted: a YAML file, or {', '.join(shipped_configs())}" if bare else ""
        raise UserError(f"{path}: no such file{names}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: not UTF-8 (byte 0x{raw[error.start]:02x}); save the file as UTF-8") from None
    try:
        values, node = _parse(text)
    except yaml.MarkedYAMLError as error:
        start, mark = error.context_mark, error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else f"{path}"
        since = f" ({error.context} from line {start.line + 1})" if start and mark and start.line < mark.line else ""
        raise UserError(f"{where}: not valid YAML: {error.problem or error.context}{since}") from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise UserError(f"{path}:{line}: not valid YAML: character #x{error.character:04x} is not allowed") from None
    except RecursionError:
        raise UserError(f"{path}: not valid YAML: nested too deeply") from None
    except ValueError as error:  # PyYAML lets impossible dates and numbers through as bare ValueErrors
        raise UserError(f"{path}: not valid YAML: {error}") from None
    if node is None or values is None:
        raise UserError(f"{path}: is empty; at least model and data are needed")
    if not isinstance(values, dict):
        raise UserError(f"{path}: must be a mapping of keys to values, such as model: Qwen/Qwen3.5-0.8B")
    source = _Source(str(path), values, {})
    for key_path, line, first in _keys(node, (), set()):
        if first is not None:
            text = f"{path}:{line}: {'.'.join(map(str, key_path))}: duplicate key, first set on line {first}"
            source.faults.append(_Fault(line, text))
        source.lines[key_path] = line
    return source


def _parse(text: str) -> tuple[Any, yaml.Node | None]:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines = node and copy.deepcopy(node)  # construction rewrites the nodes of merge keys
        return (_text_keys(loader.construct_document(node)) if node else None), lines
    finally:
        loader.dispose()


def _keys(node: yaml.Node, path: KeyPath, seen: set[int]) -> Iterator[tuple[KeyPath, int, int | None]]:
    """Every key below `node`: its path, its line, and the line of an earlier twin."""
    if id(node) in seen:  # an alias, perhaps of a parent
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            yield (*path, str(key.value)), line, lines.get(str(key.value))
            lines.setdefault(str(key.value), line)
            yield from _keys(value, (*path, str(key.value)), seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, index), value.start_mark.line + 1, None
            yield from _keys(value, (*path, index), seen)


def _validate(values: dict[str, Any]) -> tuple[RunConfig | None, list[tuple[KeyPath, str]]]:
    """Check `values`; then again without the faulty keys, so that rules over several keys are reported too."""
    values = copy.deepcopy(values)
    found: list[tuple[KeyPath, str]] = []
    faulty: set[KeyPath] = set()
    while True:
        try:
            return RunConfig.model_validate(values), found
        except ValidationError as error:
            new = [fault for details in error.errors() for fault in _faults(values, dict(details))]
        # What follows from a key that was taken out is no fault of the user's.
        found += [
            (keys[0], text) for keys, text in new if not any(_related(key, bad) for key in keys for bad in faulty)
        ]
        bad_now = {key for keys, _ in new for key in keys}
        if sum(_remove(values, key) for key in bad_now) == 0:
            return None, found
        faulty |= bad_now


def _faults(values: dict[str, Any], details: dict[str, Any]) -> list[tuple[list[KeyPath], str]]:
    """One of pydantic's errors as (keys, message) pairs, the key to point at first."""
    path = _path_in(values, details["loc"])
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, Contradictions):
        return [([path + tuple(key.split(".")) for key in item.keys], item.message) for item in cause.found]
    return [([path], fault_message(path, details))]


def _related(one: KeyPath, other: KeyPath) -> bool:
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def _text_keys(value: Any) -> Any:
    """A copy with every key as text, so that a key such as 1 or true is reported as unknown."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else show(key): _text_keys(item) for key, item in value.items()}
    return [_text_keys(item) for item in value] if isinstance(value, list) else value


def _path_in(values: Any, location: KeyPath) -> KeyPath:
    """`location` without the index that a single hf_dataset gains in the schema."""
    path: KeyPath = ()
    for part in location:
        if isinstance(part, int) and isinstance(values, dict):
            continue
        path = (*path, part)
        inside = isinstance(values, dict) or (isinstance(values, list) and isinstance(part, int))
        try:
            values = values[part] if inside else None
        except (KeyError, IndexError):
            values = None
    return path


def _remove(values: dict[str, Any], path: KeyPath) -> bool:
    """Take a faulty key out of `values` (its section, if it is a key that is missing there)."""
    if path == ("model",):
        values["model"] = "to be named"
        return True
    names = [part for part in path if isinstance(part, str)] if not isinstance(path[0], int) else []
    if any(isinstance(part, int) for part in path):
        names = names[:1]  # an item of a list takes the list with it
    target: Any = values
    for depth, name in enumerate(names):
        if not isinstance(target, dict):
            return False
        if name not in target:
            return depth > 0 and _remove(values, tuple(names[:depth]))
        if depth == len(names) - 1:
            del target[name]
            return True
        target = target[name]
    return False
