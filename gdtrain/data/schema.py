"""What a record may be: one parsed object in, a `Record` or the list of its faults out.

The three kinds are mlx-lm's: {"text"}, {"prompt", "completion"} and {"messages"}, the last two with optional "tools".
A row that has none of them may have the layout of another tool, see layouts.py.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gdtrain.data.faults import name_type
from gdtrain.data.layouts import COLUMNS, Layout, from_speakers, has_speakers, layouts_of, to_messages

KINDS = {"text": ("text",), "completion": ("prompt", "completion"), "chat": ("messages",)}
ACCEPTED = 'a record is {"text"}, {"prompt", "completion"} or {"messages"}'
LAYOUTS = 'Alpaca\'s {"instruction", "output"} and ShareGPT\'s {"conversations"}'
ROLES = ("system", "developer", "user", "assistant", "tool")
# What chat templates read; any other key reaches the template too, and is noted.
MESSAGE_KEYS = frozenset(
    ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking")
)


@dataclass(frozen=True, slots=True)
class Record:
    """One checked row of the data.

    kind: 'text', 'completion' or 'chat'.
    text: the text of a text record, else None.
    messages: a chat's messages, or a completion as a user and an assistant message; empty for text. `content` is
        always a string (parts of type text are joined, null is ""), `reasoning_content` a string or absent,
        `tool_calls` a non-empty list or absent, and their `arguments` an object.
    tools: a non-empty list of objects, or None.
    where: where the row stands, such as "train.jsonl:7".
    layout: of the row before it was brought into messages, if it was not one of the three kinds.
    column: of the messages in a row of kind chat, else "".
    """

    kind: str
    text: str | None
    messages: tuple[dict[str, Any], ...]
    tools: list[dict[str, Any]] | None
    where: str
    layout: Layout | None = None
    column: str = ""


@dataclass(frozen=True)
class Columns:
    """The names under which a data set keeps its fields (mlx-lm's prompt_feature and so on).

    A name that is not the usual one belongs to its field alone: with prompt="text", the column "text" makes no text
    record.
    """

    text: str = "text"
    prompt: str = "prompt"
    completion: str = "completion"
    messages: str = "messages"
    tools: str = "tools"

    def of(self, kind: str) -> tuple[str, ...]:
        """The columns that a record of this kind must have."""
        return tuple(getattr(self, field) for field in KINDS[kind])

    def renamed(self, kind: str) -> set[str]:
        """Those of them that are not the usual names."""
        return {name for field, name in zip(KINDS[kind], self.of(kind), strict=True) if name != field}

    @cached_property
    def kinds(self) -> list[str]:
        """The kinds that a record may have: not those of which a column was given to another kind."""
        return [
            kind
            for kind in KINDS
            if self.renamed(kind)
            or not any(self.renamed(other) & set(self.of(kind)) for other in KINDS if other != kind)
        ]


class RecordFaults(ValueError):
    """All that is wrong with one record; `faults` is a list of texts without the place."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


def parse_record(row: Any, where: str, columns: Columns) -> tuple[Record, list[str]]:
    """Checks one row and brings it into the one form that the rest of the program knows.

    row: whatever the file held. Returns the record and the names of what was not used: columns by their name,
    message keys that no usual template reads as "messages[].NAME".
    Raises RecordFaults with everything that is wrong with the row.
    """
    if not isinstance(row, dict):
        raise RecordFaults([f"{name_type(row)} instead of an object; {ACCEPTED}"])
    kind, layout = _kind_of(row, columns)
    faults: list[str] = []
    tools = _tools(row.get(columns.tools), faults) if kind != "text" else None
    names = columns.of(kind) if layout is None else tuple(name for group in COLUMNS[layout] for name in group)
    used = {*names, *([columns.tools] if kind != "text" else [])}
    unused = [str(key) for key in row if key not in used and row[key] is not None]
    text, messages, name = None, [], ""
    if kind == "chat":
        first: list[dict[str, Any]] = []
        given, name = row.get(columns.messages), columns.messages
        if layout is not None:
            (first, given), name = to_messages(row, layout, faults), COLUMNS[layout][0][0]
        elif has_speakers(given):
            given, layout = from_speakers(given, name, faults), "ShareGPT"
        if faults:
            raise RecordFaults(faults)
        messages = [*first, *_messages(given, name, faults)]
        unknown = {key for message in messages for key in message if key not in MESSAGE_KEYS}
        unused += [f"{name}[].{key}" for key in sorted(unknown)]
    else:
        values = [_string(row[name], name, faults) for name in columns.of(kind)]
        if kind == "text":
            text = values[0]
        else:
            roles = ("user", "assistant")
            messages = [{"role": role, "content": value} for role, value in zip(roles, values, strict=True)]
    if faults:
        raise RecordFaults(faults)
    return Record(kind, text, tuple(messages), tools, where, layout, name), unused


def _kind_of(row: dict[str, Any], columns: Columns) -> tuple[str, Layout | None]:
    # A column that is null is absent: Hub data sets fill the columns that a row lacks with null.
    accepted_kinds = columns.kinds
    present = [kind for kind in accepted_kinds if all(row.get(name) is not None for name in columns.of(kind))]
    if len(present) == 1:
        return present[0], None
    if present:
        kinds = " and ".join(f"{kind} ({_quoted(columns.of(kind))})" for kind in present)
        raise RecordFaults([f"the record is of two kinds at once: {kinds}; keep the keys of one"])
    layouts = layouts_of(row, {name for kind in KINDS for name in columns.renamed(kind)})
    if len(layouts) == 1:
        return "chat", layouts[0]
    if layouts:
        raise RecordFaults([f"the record has two layouts at once: {' and '.join(layouts)}; keep the keys of one"])
    for kind in accepted_kinds:
        names = columns.of(kind)
        if any(name in row for name in names):
            missing = [name for name in names if name not in row]
            why = f"{_quoted(missing)} is missing" if missing else f"{_quoted(names)} must not be null"
            raise RecordFaults([f"{why}; a {kind} record has {_quoted(names)}"])
    keys = _quoted(list(row)[:8]) if row else "none"
    accepted = " or ".join(f"{{{_quoted(columns.of(kind))}}}" for kind in accepted_kinds)
    raise RecordFaults([f"missing keys: the record has {keys}; accepted are {accepted}, and {LAYOUTS}"])


def _messages(value: Any, name: str, faults: list[str]) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else name_type(value)
        faults.append(f'"{name}" is {what}; a list of at least one message is accepted')
        return []
    before = len(faults)
    messages = [_message(message, f"{name}[{i}]", faults) for i, message in enumerate(value)]
    if len(faults) == before and not any(message["role"] == "assistant" for message in messages):
        faults.append(f'"{name}" has no message of role assistant: there is nothing to learn')
    return messages


def _message(value: Any, path: str, faults: list[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        faults.append(f"{path} is {name_type(value)}; an object with role and content is accepted")
        return {}
    message = {key: item for key, item in value.items() if item is not None}
    role = message.get("role")
    if role not in ROLES:
        what = "missing" if role is None else json.dumps(role, ensure_ascii=False, default=str)
        faults.append(f"{path}.role is {what}; accepted are {', '.join(ROLES)}")
    if "function_call" in message:
        faults.append(f"{path}.function_call is not accepted; write it as tool_calls")
    for key in ("reasoning_content", "reasoning", "thinking", "name", "tool_call_id"):
        if not isinstance(message.get(key, ""), str):
            faults.append(f"{path}.{key} is {name_type(message[key])}; a string is accepted")
    message["content"] = _content(value.get("content"), role, path, faults)
    calls = message.pop("tool_calls", None)
    if calls is not None and (not isinstance(calls, list) or (calls and role != "assistant")):
        what = name_type(calls) if role == "assistant" else f"in a message of role {role}"
        faults.append(f"{path}.tool_calls is {what}; a list in an assistant message is accepted")
    elif calls:
        message["tool_calls"] = [_tool_call(call, f"{path}.tool_calls[{i}]", faults) for i, call in enumerate(calls)]
    return message


def _content(value: Any, role: Any, path: str, faults: list[str]) -> str:
    if isinstance(value, str):
        return value
    if value is None and role in ("assistant", "tool"):
        return ""  # An assistant that only calls tools, a tool without output. Some templates would print "None".
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in value]
        kinds = [part.get("type", "text") if isinstance(part, dict) else None for part in value]
        if all(kind == "text" and isinstance(part, str) for kind, part in zip(kinds, parts, strict=True)):
            return "".join(str(part) for part in parts)
        faults.append(f'{path}.content is a list; only parts {{"type": "text", "text": string}} are accepted')
        return ""
    faults.append(f"{path}.content is {'missing or null' if value is None else name_type(value)}; a string is accepted")
    return ""


def _tool_call(value: Any, path: str, faults: list[str]) -> dict[str, Any]:
    """A tool call, {"function": {"name", "arguments"}} or {"name", "arguments"}, with its arguments as an object."""
    if not isinstance(value, dict):
        faults.append(f'{path} is {name_type(value)}; {{"function": {{"name", "arguments"}}}} is accepted')
        return {}
    call = {key: item for key, item in value.items() if item is not None}
    nested = "function" in call
    function = call["function"] if nested else call
    path = f"{path}.function" if nested else path
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        faults.append(f"{path} has no name; an object with name (a string) and arguments is accepted")
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            faults.append(f"{path}.arguments is a string that is not valid JSON ({error}); an object is accepted")
            return call
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        faults.append(f"{path}.arguments is {name_type(arguments)}; an object, or one as a JSON string, is accepted")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if nested else function


def _tools(value: Any, faults: list[str]) -> list[dict[str, Any]] | None:
    if isinstance(value, str):  # Hub data sets keep tools so, as their columns have one type only.
        try:
            value = json.loads(value)
        except ValueError as error:
            faults.append(f'"tools" is a string that is not valid JSON ({error}); a list of objects is accepted')
            return None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        what = "a list of other things" if isinstance(value, list) else name_type(value)
        faults.append(f'"tools" is {what}; a list of objects is accepted')
        return None
    return value


def _string(value: Any, name: str, faults: list[str]) -> str:
    if isinstance(value, str):
        return value
    faults.append(f'"{name}" is {name_type(value)}; a string is accepted')
    return ""


def _quoted(names: tuple[str, ...] | list[Any]) -> str:
    return ", ".join(f'"{name}"' for name in names)
