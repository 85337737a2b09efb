"""Columns under other names, and the layouts of other tools."""

import csv
import json

import pytest
from listed import read

from gdtrain.data.schema import Columns
from gdtrain.errors import UserError

MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHAREGPT = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
ALPACA = {"instruction": "add", "input": "1 2", "output": "3"}


def load(folder, *rows, mask_prompt=True, **columns):
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read(str(folder), None, mask_prompt=mask_prompt, columns=Columns(**columns))


def faults(folder, *rows, **columns) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(folder, *rows, **columns)
    return str(caught.value).splitlines()[1:]


def contents(record) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in record.messages]


def test_columns_under_other_names(tmp_path):
    (pair,) = load(tmp_path, {"q": "x", "a": "y"}, prompt="q", completion="a").train
    assert (pair.kind, contents(pair)) == ("completion", [("user", "x"), ("assistant", "y")])
    (chat,) = load(tmp_path, {"turns": MESSAGES}, messages="turns").train
    assert (chat.kind, list(chat.messages)) == ("chat", MESSAGES)
    (text,) = load(tmp_path, {"body": "t"}, text="body", mask_prompt=False).train
    assert (text.kind, text.text) == ("text", "t")


def test_without_the_names_the_same_rows_are_refused(tmp_path):
    for row, named in (({"q": "x", "a": "y"}, '"q", "a"'), ({"body": "t"}, '"body"')):
        (fault,) = faults(tmp_path, row)
        assert fault.startswith(f"train.jsonl:1: missing keys: the record has {named}; accepted are ")
    (fault,) = faults(tmp_path, {"q": "x", "a": "y"}, prompt="q")
    assert fault == 'train.jsonl:1: "completion" is missing; a completion record has "q", "completion"'


def test_a_renamed_column_has_one_meaning(tmp_path):
    """billsum has text and summary, and no text record is meant."""
    row = {"text": "long", "summary": "short"}
    (record,) = load(tmp_path, row, prompt="text", completion="summary").train
    assert contents(record) == [("user", "long"), ("assistant", "short")]
    assert load(tmp_path, row, mask_prompt=False).train[0].kind == "text"
    pair = {"prompt": "p", "completion": "c"}
    assert load(tmp_path, pair, text="prompt", mask_prompt=False).train[0].text == "p"
    # A column that Alpaca would use is not Alpaca's once it has a name here.
    (fault,) = faults(tmp_path, ALPACA, prompt="instruction")
    assert '"completion" is missing' in fault


def test_columns_of_csv_under_other_names(tmp_path):
    with (tmp_path / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["turns"], [json.dumps(MESSAGES)]])
    with (tmp_path / "valid.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["turns"], ["[{"]])
    with pytest.raises(UserError, match=r'1 fault\nvalid\.csv:2: "turns" is not valid JSON'):
        read(str(tmp_path), None, mask_prompt=True, columns=Columns(messages="turns"))
    (tmp_path / "valid.csv").unlink()
    splits = read(str(tmp_path), None, mask_prompt=True, columns=Columns(messages="turns"))
    assert list(splits.train[0].messages) == MESSAGES


def test_alpaca(tmp_path):
    rows = [ALPACA, {"instruction": "hello", "input": "", "output": "hi"}, {**ALPACA, "system": "s", "input": None}]
    splits = load(tmp_path, *rows)
    assert [contents(record) for record in splits.train] == [
        [("user", "add\n\n1 2"), ("assistant", "3")],
        [("user", "hello"), ("assistant", "hi")],
        [("system", "s"), ("user", "add"), ("assistant", "3")],
    ]
    (note,) = splits.notes
    assert note.startswith("train.jsonl: the Alpaca layout, read as messages: instruction, a blank line and input")
    output, question = faults(tmp_path, {**ALPACA, "output": 3}, {**ALPACA, "input": ["x"]})
    assert output == 'train.jsonl:1: "output" is a number; a string is accepted'
    assert question == 'train.jsonl:2: "input" is a list; a string is accepted'


def test_sharegpt(tmp_path):
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "a"},
    ]
    splits = load(tmp_path, {"conversations": turns}, {**SHAREGPT, "system": "t", "tools": '[{"name": "f"}]'})
    first, second = splits.train
    assert contents(first) == [("system", "s"), ("user", "q"), ("assistant", ""), ("tool", "2"), ("assistant", "a")]
    assert first.messages[2]["tool_calls"] == [{"name": "f", "arguments": {"x": 1}}]
    assert contents(second) == [("system", "t"), ("user", "q"), ("assistant", "a")]
    assert second.tools == [{"name": "f"}]
    assert splits.notes == [
        "train.jsonl: the ShareGPT layout, read as messages: conversations are the messages, from is the role, value"
        " the content"
    ]


def test_sharegpt_under_another_name_and_conversations_with_roles(tmp_path):
    (record,) = load(tmp_path, {"chat": SHAREGPT["conversations"]}, messages="chat").train
    assert contents(record) == [("user", "q"), ("assistant", "a")]
    (record,) = load(tmp_path, {"conversations": MESSAGES}).train
    assert contents(record) == [("user", "q"), ("assistant", "a")]


def test_faults_of_sharegpt(tmp_path):
    def row(*turns):
        return {"conversations": [{"from": speaker, "value": value} for speaker, value in turns]}

    rows = [SHAREGPT, row(("robot", "x"), ("gpt", "a")), row(("human", 1), ("gpt", "a")), row(("human", "q"))]
    speaker, value, nothing, call, empty = faults(
        tmp_path, *rows, row(("human", "q"), ("function_call", "f(")), {"conversations": []}
    )
    assert speaker == (
        'train.jsonl:2: conversations[0].from is "robot"; accepted are system, human, user, gpt, assistant,'
        " function_call, tool, observation"
    )
    assert value == "train.jsonl:3: conversations[0].value is a number; a string is accepted"
    assert nothing == 'train.jsonl:4: "conversations" has no message of role assistant: there is nothing to learn'
    assert call.startswith("train.jsonl:5: conversations[1].value is a function_call that is not valid JSON")
    assert empty.startswith('train.jsonl:6: "conversations" is an empty list')


def test_faults_count_from_the_file_s_first_turn(tmp_path):
    """Also where the system prompt has a column of its own."""
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "tool_calls": "f"}]
    (fault,) = faults(tmp_path, {"system": "s", "conversations": turns})
    assert fault.startswith("train.jsonl:1: conversations[1].tool_calls is a string")


def test_layouts_are_not_mixed(tmp_path):
    (both,) = faults(tmp_path, {**ALPACA, **SHAREGPT})
    assert both.startswith("train.jsonl:1: the record has two layouts at once: Alpaca and ShareGPT")
    alpaca, chat = faults(tmp_path, SHAREGPT, ALPACA, {"messages": MESSAGES})
    assert alpaca == (
        "train.jsonl:2: an Alpaca record (instruction, output) in a file that begins with a ShareGPT record"
        " (conversations, train.jsonl:1); one kind a file is accepted"
    )
    assert chat.startswith("train.jsonl:3: a chat record (messages) in a file that begins with a ShareGPT record")


def test_the_three_kinds_go_before_a_layout(tmp_path):
    splits = load(tmp_path, {**ALPACA, "text": "t"}, mask_prompt=False)
    assert splits.train[0].kind == "text"
    assert splits.notes == ["train.jsonl: columns not used (rows): instruction (1), input (1), output (1)"]


def test_sharegpt_under_another_name_says_that_name(tmp_path):
    turns = SHAREGPT["conversations"]
    (note,) = load(tmp_path, {"chat": turns}, messages="chat").notes
    assert note == (
        "train.jsonl: the ShareGPT layout, read as messages: chat are the messages, from is the role, value the content"
    )
    speaker, empty, mixed = faults(
        tmp_path,
        {"chat": turns},
        {"chat": [{"from": "robot", "value": "x"}]},
        {"chat": turns[:1]},
        {"chat": MESSAGES},
        messages="chat",
    )
    assert speaker.startswith('train.jsonl:2: chat[0].from is "robot"')
    assert empty == 'train.jsonl:3: "chat" has no message of role assistant: there is nothing to learn'
    assert mixed == (
        "train.jsonl:4: a chat record (chat) in a file that begins with a ShareGPT record (chat, train.jsonl:1); one"
        " kind a file is accepted"
    )
