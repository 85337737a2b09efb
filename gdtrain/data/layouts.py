"""Layouts of other tools, Alpaca and ShareGPT, brought into messages. Only names are changed, no text is."""

import json
from typing import Any, Literal

from gdtrain.data.faults import name_type

Layout = Literal["Alpaca", "ShareGPT"]

# The columns that a row of the layout must have, and those that it may have.
COLUMNS: dict[Layout, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Alpaca": (("instruction", "output"), ("input", "system")),
    "ShareGPT": (("conversations",), ("system",)),
}
# messages: the column of them.
MEANING: dict[Layout, str] = {
    "Alpaca": "instruction, a blank line and input (if there is one) are the user's message, output is the answer",
    "ShareGPT": "{messages} are the messages, from is the role, value the content",
}
# What ShareGPT files write in `from`, and the role it stands for.
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}


def layouts_of(row: dict[str, Any], taken: set[str]) -> list[Layout]:
    """The layouts whose columns the row has; a column in `taken` means something else here."""
    return [
        layout
        for layout, (required, _) in COLUMNS.items()
        if all(row.get(name) is not None and name not in taken for name in required)
    ]


def to_messages(row: dict[str, Any], layout: Layout, faults: list[str]) -> tuple[list[dict[str, Any]], Any]:
    """The system message of a row of that layout, if it has a column for it, and the other messages, which are still to
    be checked as such, apart because their faults count from the file's first; faults are added to the list."""
    first = []
    if (system := row.get("system")) not in (None, ""):
        first.append({"role": "system", "content": _string(system, '"system"', faults)})
    if layout == "ShareGPT":
        return first, from_speakers(row["conversations"], "conversations", faults)
    question = _string(row["instruction"], '"instruction"', faults)
    if context := _string(row.get("input") or "", '"input"', faults):
        question += f"\n\n{context}"
    answer = _string(row["output"], '"output"', faults)
    return first, [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def from_speakers(messages: Any, name: str, faults: list[str]) -> Any:
    """The messages with `from` and `value` under the names role and content. Messages that have a role stay as they
    are, and so does what is no list; name: of the column, for faults such as "conversations[0].from is ..."."""
    if not isinstance(messages, list):
        return messages
    return [
        _renamed(message, f"{name}[{i}]", faults) if isinstance(message, dict) and _has_speaker(message) else message
        for i, message in enumerate(messages)
    ]


def has_speakers(messages: Any) -> bool:
    """Whether any message names its role in `from`."""
    return isinstance(messages, list) and any(isinstance(item, dict) and _has_speaker(item) for item in messages)


def _has_speaker(message: dict[str, Any]) -> bool:
    return message.get("role") is None and message.get("from") is not None


def _renamed(message: dict[str, Any], path: str, faults: list[str]) -> dict[str, Any]:
    speaker, value = message["from"], message.get("value")
    renamed = {key: item for key, item in message.items() if key not in ("from", "value")}
    role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        what = json.dumps(speaker, ensure_ascii=False, default=str)
        faults.append(f"{path}.from is {what}; accepted are {', '.join(SPEAKERS)}")
        return {**renamed, "role": "user", "content": ""}
    text = _string(value, f"{path}.value", faults)
    if speaker != "function_call":
        return {**renamed, "role": role, "content": text}
    try:
        calls = json.loads(text) if text else {}
    except ValueError as error:
        faults.append(f'{path}.value is a function_call that is not valid JSON ({error}); {{"name", "arguments"}}')
        calls = {"name": ""}
    return {**renamed, "role": role, "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}


def _string(value: Any, path: str, faults: list[str]) -> str:
    if isinstance(value, str):
        return value
    faults.append(f"{path} is {name_type(value)}; a string is accepted")
    return ""
