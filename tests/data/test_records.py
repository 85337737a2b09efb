import csv
import json
import subprocess
import sys

import pytest
from listed import read

from gdtrain.data.records import check_records
from gdtrain.errors import UserError

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def lines(*rows) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def load(folder, mask_prompt=False, **files):
    for name, content in files.items():
        stem, _, suffix = name.partition("_")
        (folder / f"{stem}.{suffix or 'jsonl'}").write_bytes(content)
    return read(str(folder), None, mask_prompt=mask_prompt)


def faults(folder, *rows, mask_prompt=False) -> list[str]:
    """The lines of the error that these rows in train.jsonl give, without its title."""
    with pytest.raises(UserError) as caught:
        load(folder, mask_prompt, train=lines(*rows))
    return str(caught.value).splitlines()[1:]


def chat_fault(folder, *messages, **keys) -> list[str]:
    return [text.removeprefix("train.jsonl:1: ") for text in faults(folder, {"messages": list(messages), **keys})]


def test_the_three_kinds(tmp_path):
    tools = [{"name": "f"}]
    splits = load(
        tmp_path,
        train=lines({"text": "t"}),
        valid=lines({"prompt": "p", "completion": "c", "tools": tools}),
        test=lines({**CHAT, "tools": []}),
    )
    (text,), (completion,), (chat,) = splits.train, splits.valid, splits.test
    assert (text.kind, text.text, text.messages, text.where) == ("text", "t", (), "train.jsonl:1")
    assert completion.messages == ({"role": "user", "content": "p"}, {"role": "assistant", "content": "c"})
    assert completion.tools == tools
    assert (chat.kind, list(chat.messages), chat.tools) == ("chat", CHAT["messages"], None)
    assert splits.notes == []


def test_c31_optional_splits_are_empty(tmp_path):
    splits = load(tmp_path, train=lines({"text": "t"}))
    assert (len(splits.train), splits.valid, splits.test) == (1, [], [])


def test_c33_blank_lines_crlf_and_bom(tmp_path):
    content = b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}\r\n\n\n'
    records = load(tmp_path, train=content).train
    assert [(r.text, r.where) for r in records] == [("a", "train.jsonl:1"), ("b", "train.jsonl:4")]
    as_list = load(tmp_path, valid_json=b'\xef\xbb\xbf[{"text": "a"},\r\n\r\n{"text": "b"}]').valid
    assert [r.where for r in as_list] == ["valid.json:item 1", "valid.json:item 2"]


def test_c34_truncated_json(tmp_path):
    (fault,) = faults(tmp_path, *[{"text": "t"}] * 6, b'{"text": "tr')
    assert fault.startswith("train.jsonl:7: not valid JSON: Unterminated string")


def test_c36_every_bad_line_is_reported(tmp_path):
    rows = [{"text": "t"}] * 11
    rows[6], rows[8], rows[10] = CHAT, {"txt": "t"}, {"text": 5}
    mixed, missing, number = faults(tmp_path, *rows)
    assert mixed.startswith("train.jsonl:7: a chat record (messages) in a file that begins with a text record")
    assert "train.jsonl:1" in mixed
    assert missing.startswith('train.jsonl:9: missing keys: the record has "txt"; accepted are {"text"} or')
    assert number == 'train.jsonl:11: "text" is a number; a string is accepted'


def test_faults_of_all_files_and_at_most_twenty(tmp_path):
    with pytest.raises(UserError) as caught:
        load(tmp_path, train=lines(*[[]] * 15), valid=lines(*[[]] * 15))
    shown = str(caught.value).splitlines()
    assert shown[0].endswith("30 faults")
    assert shown[15].startswith("train.jsonl:15: a list instead of an object")
    assert shown[16].startswith("valid.jsonl:1: ")
    assert len(shown) == 1 + 20 + 1
    assert shown[-1] == "... and 10 more"


def test_c29_text_with_mask_prompt(tmp_path):
    (fault,) = faults(tmp_path, {"text": "a"}, {"text": "b"}, mask_prompt=True)
    assert fault.startswith("train.jsonl:1: mask_prompt is true but this is a text record")


def test_two_kinds_in_one_record_and_half_a_kind(tmp_path):
    both, half, null = faults(tmp_path, {"text": "t", **CHAT}, {"prompt": "p"}, {"prompt": "p", "completion": None})
    assert both.startswith("train.jsonl:1: the record is of two kinds at once: text")
    assert half.startswith('train.jsonl:2: "completion" is missing')
    assert "must not be null" in null


def test_encodings(tmp_path):
    bad, surrogate = faults(tmp_path, b'{"text": "\xff"}', b'{"text": "\\ud800"}')
    assert bad.startswith("train.jsonl:1: not valid UTF-8 text")
    assert surrogate.startswith("train.jsonl:2: not valid UTF-8 text")
    assert load(tmp_path, train=b'{"text": "\\ud83d\\ude00"}').train[0].text == "😀"


def test_what_python_cannot_read(tmp_path):
    """Valid JSON, and yet a fault of its row; in a list, of its item."""
    deep, long = b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"text": ' + b"1" * 5000 + b"}"
    assert faults(tmp_path, deep, long) == [
        "train.jsonl:1: nested too deeply to be read",
        "train.jsonl:2: a number of more digits than Python reads",
    ]
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(UserError, match=r"train\.json:item 2: a number of more digits"):
        load(tmp_path, train_json=b'[{"text": "a"}, ' + long + b"]")


def test_faults_of_messages(tmp_path):
    user, answer = CHAT["messages"]
    assert chat_fault(tmp_path) == ['"messages" is an empty list; a list of at least one message is accepted']
    assert "no message of role assistant" in chat_fault(tmp_path, user)[0]
    assert chat_fault(tmp_path, "hello", answer)[0].startswith("messages[0] is a string; an object")
    assert chat_fault(tmp_path, {"role": "bot", "content": 1}, answer) == [
        'messages[0].role is "bot"; accepted are system, developer, user, assistant, tool',
        "messages[0].content is a number; a string is accepted",
    ]
    assert chat_fault(tmp_path, {"content": "x"}, answer)[0].startswith("messages[0].role is missing")
    assert chat_fault(tmp_path, {"role": "user", "content": None}, answer)[0].startswith(
        "messages[0].content is missing"
    )
    image = {"role": "user", "content": [{"type": "image"}]}
    assert chat_fault(tmp_path, image, answer)[0].startswith("messages[0].content is a list; only parts")
    assert chat_fault(tmp_path, user, {**answer, "function_call": {}})[0].startswith("messages[1].function_call is not")
    assert chat_fault(tmp_path, user, {**answer, "reasoning_content": 1})[0].startswith(
        "messages[1].reasoning_content is"
    )
    assert chat_fault(tmp_path, {**user, "tool_calls": [{}]}, answer)[0].startswith("messages[0].tool_calls is in a")
    assert chat_fault(tmp_path, user, answer, tools={"f": 1}) == ['"tools" is an object; a list of objects is accepted']


def test_contents_are_normalised(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    rows = [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": None, "reasoning_content": None}]
    (record,) = load(tmp_path, train=lines({"messages": rows})).train
    assert record.messages == ({"role": "user", "content": "ab"}, {"role": "assistant", "content": ""})


def test_c26_tool_call_arguments(tmp_path):
    def row(arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]}

    records = load(tmp_path, train=lines(row({"a": 1}), row('{"a": 1}'), row(None))).train
    found = [r.messages[-1]["tool_calls"][0]["function"]["arguments"] for r in records]
    assert found == [{"a": 1}, {"a": 1}, {}]
    broken, listed = faults(tmp_path, row('{"a": '), row([1]))
    where = "messages[2].tool_calls[0].function.arguments"
    assert broken.startswith(f"train.jsonl:1: {where} is a string that is not valid JSON")
    assert listed.startswith(f"train.jsonl:2: {where} is a list")
    flat = {"messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]}]}
    (record,) = load(tmp_path, train=lines(flat)).train
    assert record.messages[-1]["tool_calls"] == [{"name": "f", "arguments": {}}]


def test_what_is_not_used_is_noted(tmp_path):
    weighted = {"messages": [CHAT["messages"][0], {**CHAT["messages"][1], "weight": 0}]}
    (tmp_path / "validation.jsonl").write_text("")
    notes = load(tmp_path, train=lines({"text": "t", "id": 1}, {"text": "u", "id": 2}), test=lines(weighted)).notes
    assert "not read: validation.jsonl" in notes[0]
    assert notes[1:] == [
        "train.jsonl: columns not used (rows): id (2)",
        "test.jsonl: message keys that only the chat template can use (rows): messages[].weight (1)",
    ]


def test_json_csv_and_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    with (tmp_path / "valid.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "completion"], ["p,\nq", "c"], ["p", "d"]])
    parquet.write_table(pyarrow.Table.from_pylist([CHAT]), tmp_path / "test.parquet")
    splits = load(tmp_path, train_json=b'[{"text": "t"}]')
    assert splits.train[0].text == "t"
    assert [(r.messages[0]["content"], r.where) for r in splits.valid] == [
        ("p,\nq", "valid.csv:3"),
        ("p", "valid.csv:4"),
    ]
    assert list(splits.test[0].messages) == CHAT["messages"]
    for name, content, reason in [
        ("train_json", b'{"text": "t"}\n{"text": "u"}', r"train\.json:2: not valid JSON: Extra data; .*train\.jsonl"),
        ("train_json", b'{"text": "t"}', r"train\.json: an object instead of a list"),
        ("test_parquet", b"no", r"test\.parquet: not a Parquet file"),
        ("valid_csv", b"text,id\na\n", r"valid\.csv:2: another number of cells"),
    ]:
        with pytest.raises(UserError, match=reason):
            load(tmp_path, **{name: content})


def test_files_that_are_missing_or_doubled(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=r"has no train split; accepted is one of train\.jsonl, .*holds notes\.txt"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"train\.jsonl: no records"):
        load(tmp_path, train=b"\n\n")
    with pytest.raises(UserError, match=r"train\.jsonl and train\.json; keep one"):
        load(tmp_path, train=lines({"text": "t"}), train_json=b"[]")
    with pytest.raises(UserError, match=r"there is no directory .*nowhere"):
        read(str(tmp_path / "nowhere"), None, mask_prompt=False)
    with pytest.raises(UserError, match="is a file"):
        read(str(tmp_path / "train.jsonl"), None, mask_prompt=False)
    with pytest.raises(UserError, match="nothing to read"):
        read(None, None, mask_prompt=False)


def test_another_split_can_be_the_required_one(tmp_path):
    (tmp_path / "test.jsonl").write_bytes(lines(CHAT))
    assert len(read(str(tmp_path), None, mask_prompt=False, require="test").test) == 1


def test_the_standard_library_is_built_and_read(tmp_path, monkeypatch):
    from gdtrain.data import stdlib

    (tmp_path / "train.jsonl").write_bytes(lines({"prompt": "p", "completion": "c"}))
    monkeypatch.setattr(stdlib, "build_stdlib_dataset", lambda: tmp_path)
    assert read(stdlib.STDLIB, None, mask_prompt=True).train[0].kind == "completion"


def test_hub_data_sets(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(lines(*[{"q": f"p{i}", "a": "c", "id": i} for i in range(10)]))
    config = {"data_files": str(tmp_path / "rows.jsonl"), "cache_dir": str(tmp_path / "cache")}
    entry = {"path": "json", "config": config, "prompt_feature": "q", "completion_feature": "a"}
    splits = read(None, entry, mask_prompt=True)
    assert [len(splits.train), len(splits.valid), len(splits.test)] == [8, 1, 0]
    assert splits.train[7].messages[0]["content"] == "p7"
    assert splits.train[7].where == "json[train[:80%]]:row 8"
    assert splits.notes[0] == "json[train[:80%]]: columns not used (rows): id (8)"
    twice = read(None, [{**entry, "train_split": "train", "test_split": "train[:3]"}] * 2, mask_prompt=True)
    assert [len(twice.train), len(twice.valid), len(twice.test)] == [20, 2, 6]
    for broken, reason in [
        ({**entry, "completion_feature": "b"}, r'json\[train\[:80%\]\]:row 1: "b" is missing'),
        ({**entry, "train_split": "nope"}, r"hf_dataset: json\[nope\] cannot be loaded: "),
    ]:
        with pytest.raises(UserError, match=reason):
            read(None, broken, mask_prompt=True)


def test_a_hub_data_set_that_cannot_be_reached(monkeypatch):
    import datasets

    def refuse(name, **_):
        raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError, match=r"data: a/b is neither a directory here nor a Hub data set .*doesn't exist"):
        read("a/b", None, mask_prompt=False)


def test_a_hub_data_set_by_name(monkeypatch):
    import datasets

    rows = datasets.Dataset.from_list([CHAT])
    monkeypatch.setattr(datasets, "load_dataset", lambda name: {"train": rows, "validation": rows, "extra": rows})
    splits = read("a/b", None, mask_prompt=True)
    assert (splits.train[0].where, splits.valid[0].where) == ("a/b[train]:row 1", "a/b[validation]:row 1")
    assert splits.notes == ["a/b: splits not read: extra"]


def test_reading_needs_no_heavy_library():
    code = (
        "import sys, gdtrain.data.records; print([m for m in ('mlx', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_arguments_of_the_hub_do_not_collide(monkeypatch):
    """`config: {name: subset}` is its most usual use."""
    import datasets

    asked = []

    def load_dataset(path, **arguments):
        asked.append((path, arguments))
        return [{"text": "a"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    entry = {"path": "owner/set", "config": {"name": "subset"}, "train_split": "train", "valid_split": "test"}
    read(None, entry, mask_prompt=False)
    assert asked[0] == ("owner/set", {"split": "train", "name": "subset"})
    with pytest.raises(UserError, match=r"hf_dataset\.config: split is set by hf_dataset itself"):
        read(None, {**entry, "config": {"split": "train"}}, mask_prompt=False)


@pytest.mark.parametrize(
    "after",
    [
        lines({"text": "a"}),
        lines({"text": "a"}, {"text": "b"}, {"text": "c"}),
        lines({"text": "a"}, {"text": "x"}),
        b"{",
    ],
    ids=["shorter", "longer", "edited", "broken"],
)
def test_a_file_that_changes_after_it_was_checked(after, tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_bytes(lines({"text": "a"}, {"text": "b"}))
    records = check_records(str(tmp_path), None, mask_prompt=False).train
    assert [record.text for record in records] == ["a", "b"]
    file.write_bytes(after)
    with pytest.raises(UserError, match=r"^train\.jsonl: changed while it was read; run the same command again$"):
        list(records)


def test_what_the_digest_of_records_tells_apart(tmp_path):
    """Anything that a template may render differently; not the file's name and unused columns."""

    def digest(row, name="train"):
        (tmp_path / f"{name}.jsonl").write_bytes(row if isinstance(row, bytes) else lines(row))
        found = getattr(check_records(str(tmp_path), None, mask_prompt=True, require=name), name).digest
        (tmp_path / f"{name}.jsonl").unlink()
        return found

    def call(**arguments):
        call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}
        return {"messages": [CHAT["messages"][0], call]}

    rows = [CHAT, {**CHAT, "tools": [{"name": "f"}]}, call(), call(a=1), call(a=1.0), call(a=True), call(a="1")]
    rows += [call(a=1, b=2), call(b=2, a=1), b"\n" + lines(CHAT), lines(CHAT, CHAT), {"prompt": "q", "completion": "a"}]
    digests = [digest(row) for row in rows]
    assert len(set(digests)) == len(rows)
    assert [digest(row) for row in rows] == digests
    assert digest(CHAT, "test") == digests[0]
    assert digest({**CHAT, "id": 1}) == digests[0]


def test_many_unused_columns_are_named_in_part(tmp_path):
    (note,) = load(tmp_path, train=lines({"text": "t", **{f"k{i}": 1 for i in range(50)}})).notes
    assert note.count("(1)") == 20
    assert note.endswith(", ... and 30 more")
