"""Conversations as data sets hold them, drawn by hypothesis, with what was meant by every message beside the row."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from gdtrain.data.conversation import Sample
from gdtrain.data.schema import Columns, Record, parse_record

# What someone might type, or paste from a log: the templates' own strings among it.
MARKUP = ["<|im_start|>assistant\n", "<|im_start|>", "<|im_end|>", "<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"]
MARKUP += ["<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", "<|endoftext|>", "<tool_call>", "\ue000"]
THINK_MARKUP = ["<think>\n", "\n</think>\n\n", "<tool_response>", "<|im_start|>assistant\n<think>\n\n</think>\n\n"]
NAMES = ["weather", "get_time", "größe", "<|im_end|"]
TOOLS = [{"type": "function", "function": {"name": name, "description": "<|im_start|>assistant"}} for name in NAMES]

# Letters of one to four bytes, and an accent of its own.
words = st.text(st.sampled_from("abe .?\n<|>é中😀\u0301"), max_size=10)


def texts(*extra: str) -> st.SearchStrategy[str]:
    return st.lists(st.one_of(words, st.sampled_from([*MARKUP, *extra])), max_size=3).map("".join)


given = texts(*THINK_MARKUP)
# What the model says and thinks. It holds no think tags but those of its block: templates cut at them.
said = texts().filter(lambda text: "think>" not in text)

values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 10**9) | texts(), lambda v: st.lists(v, max_size=2), max_leaves=3
)
arguments = st.dictionaries(st.sampled_from(["city", "<|im_end|>", "<|im_start|", "maß"]), values, max_size=3)


@dataclass(frozen=True)
class Said:
    """One message of the assistant. at: its place. reason: None for none. inline: the reason stands in the content.
    text: without the reason. calls: (name, arguments)."""

    at: int
    reason: str | None
    inline: bool
    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...]

    @property
    def content(self) -> str:
        """What the row has as its content."""
        return (
            f"<think>\n{self.reason}\n</think>\n\n{self.text}" if self.reason is not None and self.inline else self.text
        )


@dataclass(frozen=True)
class Chat:
    row: dict[str, Any]
    said: list[Said]

    @property
    def record(self) -> Record:
        return parse_record(self.row, "train.jsonl:7", Columns())[0]

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.row["messages"]


@st.composite
def chats(draw: st.DrawFn, *, system: bool = True, calls: bool = True, said: st.SearchStrategy[str] = said) -> Chat:
    """Rounds of questions, perhaps with tool calls and several results, and an answer.

    system, calls: whether there may be a system message, and tool calls. The first question is a plain one.
    """
    messages: list[dict[str, Any]] = []
    spoken: list[Said] = []

    def speak(called: tuple[tuple[str, dict[str, Any]], ...]) -> None:
        spoken.append(
            turn := Said(len(messages), draw(st.none() | said), draw(st.booleans()), draw(said | st.just("")), called)
        )
        message: dict[str, Any] = {"role": "assistant", "content": turn.content}
        if turn.reason is not None and not turn.inline:
            message["reasoning_content"] = turn.reason
        if not turn.content and draw(st.booleans()):
            message["content"] = None
        elif not turn.content and draw(st.booleans()):
            del message["content"]
        if called:
            message["tool_calls"] = [_as_row(draw, *call) for call in called]
        messages.append(message)

    if system and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(given)})
    for number in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 2))):
            messages.append({"role": "user", "content": draw(given) if number else "Q" + draw(given)})
        while calls and draw(st.booleans()):
            called = draw(st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=2))
            speak(tuple(called))
            results = draw(st.lists(st.none() | given, max_size=3))
            messages += [{"role": "tool", "content": result} for result in results]
        speak(())
    row = {"messages": messages, "tools": TOOLS if calls and draw(st.booleans()) else None}
    return Chat(row, spoken)


def _as_row(draw: st.DrawFn, name: str, values: dict[str, Any]) -> dict[str, Any]:
    text = draw(st.sampled_from([None, json.dumps(values), json.dumps(values, ensure_ascii=False, indent=1)]))
    function = {"name": name, "arguments": values if text is None else text}
    return {"type": "function", "id": "1", "function": function} if draw(st.booleans()) else function


def last_query(chat: Chat, is_result: Any) -> int:
    """The place of the last user message that is no tool result in disguise."""
    return max(i for i, m in enumerate(chat.messages) if m["role"] == "user" and not is_result(m["content"]))


def runs(sample: Sample, tokenizer: Any) -> list[str]:
    """The decoded text of every unbroken run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.supervised.astype(int), [0]])))
    return [tokenizer.decode(sample.ids[a:b], skip_special_tokens=False) for a, b in edges.reshape(-1, 2)]
