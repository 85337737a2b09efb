"""Drawn conversations under several styles of template: the ids are those of the whole render, and supervised is what
the assistant says and the end of its turn, once, and nothing else."""

import json
from collections.abc import Callable

import pytest
from chats import Chat, Said, chats, last_query, runs
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tokenizer import TEMPLATES, toy_tokenizer

from gdtrain.data import conversation
from gdtrain.data.conversation import encode

TOKENIZERS = {name: toy_tokenizer(name) for name in TEMPLATES}
THINKING = st.sampled_from([None, True, False])

# What the model itself says in a turn, told from the template's rules alone and not from a render.
Speech = Callable[[Chat, Said, bool | None], str]


def qwen(chat: Chat, turn: Said, thinking: bool | None) -> str:
    inline = turn.inline and turn.reason is not None
    text = turn.text.rstrip().lstrip("\n") if inline else turn.text.strip()
    for number, (name, arguments) in enumerate(turn.calls):
        text += "\n" * bool(text or number) + f"<tool_call>\n<function={name}>\n"
        for key, value in arguments.items():
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += f"<parameter={key}>\n{shown}\n</parameter>\n"
        text += "</function>\n</tool_call>"
    if turn.at < last_query(chat, lambda content: content.strip().startswith("<tool_response>")):
        return text
    reason = (turn.reason or "").strip()
    if thinking is False:  # Inference is given an empty block.
        return f"<think>\n{reason}\n</think>\n\n{text}" if reason else text
    return f"{reason}\n</think>\n\n{text}"  # It is given the "<think>\n".


def plain(chat: Chat, turn: Said, thinking: bool | None) -> str:
    return turn.content


def suffix(chat: Chat, turn: Said, thinking: bool | None) -> str:
    return turn.content.removeprefix("<think>\n")


def strips(chat: Chat, turn: Said, thinking: bool | None) -> str:
    return turn.content if turn.at == len(chat.messages) - 1 else turn.text.lstrip("\n")


def llama(chat: Chat, turn: Said, thinking: bool | None) -> str:
    return turn.content.strip()


STYLES: dict[str, tuple[Speech, dict[str, bool]]] = {
    "qwen": (qwen, {}),
    "plain": (plain, {"system": False, "calls": False}),
    "suffix": (suffix, {"calls": False}),
    "strips": (strips, {"calls": False}),
    "llama": (llama, {"calls": False}),
}


def check(name: str, chat: Chat, thinking: bool | None) -> None:
    tokenizer, speech = TOKENIZERS[name], STYLES[name][0]
    options = {} if thinking is None else {"enable_thinking": thinking}
    record = chat.record
    ids = tokenizer.apply_chat_template(list(record.messages), tools=record.tools, return_dict=False, **options)
    expected = [speech(chat, turn, thinking) + tokenizer.eos_token for turn in chat.said]
    for supervise, said in (("all", expected), ("last", expected[-1:])):
        sample = encode(record, tokenizer, mask_prompt=True, supervise=supervise, enable_thinking=thinking)
        assert sample.ids.tolist() == ids
        assert runs(sample, tokenizer) == said


@pytest.mark.parametrize("name", STYLES)
def test_supervised_is_what_the_assistant_says(name):
    @settings(max_examples=100, deadline=None)
    @given(chat=chats(**STYLES[name][1]), thinking=THINKING)
    def run(chat, thinking):
        check(name, chat, thinking)

    run()


@pytest.mark.parametrize("fault", ["the newline after the end", "the header", "no end"])
def test_a_fault_would_be_seen(fault, monkeypatch):
    find = conversation.find_turns
    begins, ends = {"the newline after the end": (0, 1), "the header": (-1, 0), "no end": (0, -1)}[fault]
    monkeypatch.setattr(conversation, "find_turns", lambda *a: [(b + begins, e + ends) for b, e in find(*a)])
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for name in ("qwen", "plain", "suffix", "strips"):
        with pytest.raises(AssertionError):
            check(name, Chat({"messages": messages}, [Said(1, None, False, "a", ())]), None)
