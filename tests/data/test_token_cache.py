"""Tokenised data from the cache is what tokenising gives, and comes from there only where nothing has changed."""

import json
import os
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from toy_tokenizer import toy_tokenizer

from gdtrain.data import token_cache
from gdtrain.data.cache_folder import cache_folder
from gdtrain.data.prepare import prepare
from gdtrain.data.records import check_records
from gdtrain.data.schema import Columns
from gdtrain.data.token_cache import Key, tokenised
from gdtrain.errors import UserError

PAIRS = [{"prompt": "p" * n, "completion": f"é{n}"} for n in (3, 50, 7)]
OPTIONS = {"max_seq_length": 60, "on_long": "drop", "mask_prompt": True, "supervise": "all", "enable_thinking": None}


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(token_cache, "WORTH_TOKENS", 0)
    write_rows("data/train.jsonl", PAIRS)
    Path("model").mkdir()
    Path("model/tokenizer.json").write_text("1")


def write_rows(file: str, rows: list[dict[str, str]]) -> None:
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def take(data="data", template="plain", trust_remote_code=False, columns=None, **options):
    """(whether it came from the cache, the samples, the counts)"""
    options = OPTIONS | options
    tokenizer = toy_tokenizer(template)
    records = check_records(data, None, mask_prompt=options["mask_prompt"], columns=columns).train
    key = Key(Path("model"), tokenizer, options, trust_remote_code=trust_remote_code)
    said, ran = [], []

    def tokenise():
        ran.append(1)
        return prepare(records, tokenizer, **options)

    samples, counts = tokenised(records, "train", key, tokenise, said.append)
    assert len(said) == 1 - len(ran)
    return not ran, [(s.ids.tolist(), s.supervised.tolist(), s.where) for s in samples], counts


def files() -> list[Path]:
    return sorted(cache_folder().rglob("*.*"))


def test_the_second_time_is_the_same_from_the_cache():
    first, second = take(), take()
    assert (first[0], second[0]) == (False, True)
    assert first[1:] == second[1:]
    assert [where for *_, where in second[1]] == ["train.jsonl:1", "train.jsonl:3"]  # the long one was dropped
    assert second[2].rows_dropped.total() == 1


def test_an_edit_of_one_byte_is_seen():
    take()
    file = Path("data/train.jsonl")
    stat = file.stat()
    file.write_bytes(file.read_bytes().replace(b"ppp", b"qpp", 1))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    cached, samples, _ = take()
    assert not cached
    assert samples == [
        (s.ids.tolist(), s.supervised.tolist(), s.where)
        for s in prepare(check_records("data", None, mask_prompt=True).train, toy_tokenizer("plain"), **OPTIONS)[0]
    ]


def test_another_line_is_another_place():
    take()
    file = Path("data/train.jsonl")
    file.write_bytes(b"\n" + file.read_bytes())
    cached, samples, _ = take()
    assert not cached
    assert samples[0][2] == "train.jsonl:2"


def test_another_name_is_the_same_data():
    """In another folder, under other columns, in another split."""
    _, first, _ = take()
    write_rows("other/train.jsonl", [{"q": row["prompt"], "a": row["completion"]} for row in PAIRS])
    cached, samples, _ = take("other", columns=Columns(prompt="q", completion="a"))
    assert (cached, samples) == (True, first)
    Path("data/train.jsonl").rename("data/test.jsonl")
    records = check_records("data", None, mask_prompt=True, require="test").test
    key = Key(Path("model"), toy_tokenizer("plain"), OPTIONS, trust_remote_code=False)
    found, _ = tokenised(records, "test", key, pytest.fail, lambda _: None)
    assert [sample.where for sample in found] == ["test.jsonl:1", "test.jsonl:3"]


def test_columns_that_are_not_used_do_not_count():
    take()
    write_rows("data/train.jsonl", [{**row, "id": 1} for row in PAIRS])
    assert take()[0]


@pytest.mark.parametrize(
    "changed",
    [
        {"max_seq_length": 61},
        {"on_long": "truncate"},
        {"mask_prompt": False},
        {"supervise": "last"},
        {"enable_thinking": False},
        {"template": "strips"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_option_counts(changed):
    take()
    assert not take(**changed)[0]
    assert take(**changed)[0]
    assert take()[0]


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "chat_template.jinja", "vocab.txt", "merges.txt"])
def test_the_tokenizer_s_files_count(name):
    take()
    (Path("model") / name).write_text("2")
    assert not take()[0]


def test_the_program_and_the_libraries_count(monkeypatch):
    take()
    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "_package_digest", lambda: "another text")
        assert not take()[0]
    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "version", lambda name: f"9 of {name}")
        assert not take()[0]
    assert take()[0]


def test_the_program_is_its_text(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    before = token_cache._digest_of([tmp_path / "a.py"], tmp_path)
    (tmp_path / "a.py").write_text("x = 2")
    assert token_cache._digest_of([tmp_path / "a.py"], tmp_path) != before


def test_a_template_that_writes_the_date_is_rendered_every_day(monkeypatch):
    from gdtrain.data.token_cache import date

    tokenizer = toy_tokenizer("plain")
    tokenizer.chat_template += "{# strftime_now #}"
    records = check_records("data", None, mask_prompt=True).train
    monkeypatch.setattr(token_cache, "date", type("D", (), {"today": staticmethod(lambda: date(2030, 1, 1))}))
    first = Key(Path("model"), tokenizer, OPTIONS, trust_remote_code=False).file(records)
    monkeypatch.setattr(token_cache, "date", type("D", (), {"today": staticmethod(lambda: date(2030, 1, 2))}))
    assert Key(Path("model"), tokenizer, OPTIONS, trust_remote_code=False).file(records) != first


def test_what_is_not_known_is_not_kept():
    for _ in range(2):
        assert not take(trust_remote_code=True)[0]
    assert files() == []


def test_little_is_not_kept(monkeypatch):
    monkeypatch.setattr(token_cache, "WORTH_TOKENS", 10_000)
    for _ in range(2):
        assert not take()[0]
    assert files() == []


def test_faults_are_not_kept():
    for _ in range(2):
        with pytest.raises(UserError, match=r"train\.jsonl:2: \d+ tokens"):
            take(on_long="error")
    assert files() == []


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other", "folder"])
def test_a_damaged_file_is_as_if_it_were_not_there(damage):
    first = take()
    (file,) = files()
    content = file.read_bytes()
    if damage == "folder":
        file.unlink()
        file.mkdir()
    else:
        flipped = bytearray(content)
        flipped[-1] ^= 1
        file.write_bytes({"cut": content[:-30], "flipped": bytes(flipped), "empty": b"", "other": b"x" * 99}[damage])
    records = check_records("data", None, mask_prompt=True).train
    assert token_cache._read(file, records.name) is None
    if damage != "folder":
        assert take()[1:] == first[1:]
        assert take()[0]


def test_every_flipped_bit_is_found():
    take()
    (file,) = files()
    content = file.read_bytes()
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        file.write_bytes(bytes(flipped))
        assert token_cache._read(file, "train.jsonl") is None
    file.write_bytes(content)
    samples, _ = token_cache._read(file, "train.jsonl")
    assert all(sample.ids.flags.aligned for sample in samples)


def test_a_folder_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    said = []
    records = check_records("data", None, mask_prompt=True).train
    key = Key(Path("model"), toy_tokenizer("plain"), OPTIONS, trust_remote_code=False)
    samples, _ = tokenised(
        records, "train", key, partial(prepare, records, toy_tokenizer("plain"), **OPTIONS), said.append
    )
    assert len(samples) == 2
    assert said[0].startswith("train: not kept in the cache, ")


def test_several_at_once():
    """All get the right samples, and one whole file is left."""
    expected = take()[1]
    for file in files():
        file.unlink()
    found, start = [], threading.Barrier(6)

    def work():
        start.wait()
        found.append(take()[1])

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 6
    assert [file.suffix for file in files()] == [".tokens"]
    assert take()[0]


def test_the_oldest_go(monkeypatch):
    for length in (60, 61, 62):
        take(max_seq_length=length)
    sizes = [file.stat().st_size for file in files()]
    for age, file in enumerate(files()):
        os.utime(file, (time.time() - 100 * age,) * 2)
    monkeypatch.setattr(token_cache, "LIMIT_BYTES", 3 * max(sizes) - 1)
    left = files()[-1]  # not used for the longest time
    abandoned = left.with_name("x.part")
    abandoned.write_bytes(b"")
    os.utime(abandoned, (0, 0))
    take(max_seq_length=63)
    assert len(files()) == 3 - (3 * max(sizes) - 1 < sum(sizes[:2]) + max(sizes))
    assert not left.exists()
    assert not abandoned.exists()
    monkeypatch.setattr(token_cache, "LIMIT_BYTES", 0)
    take(max_seq_length=64)
    assert len(files()) == 1
    assert take(max_seq_length=64)[0]  # the new one stays


def test_what_was_used_stays(monkeypatch):
    for length in (60, 61):
        take(max_seq_length=length)
    for file in files():
        os.utime(file, (1, 1))
    assert take(max_seq_length=60)[0]
    monkeypatch.setattr(token_cache, "LIMIT_BYTES", 2 * max(file.stat().st_size for file in files()) + 10)
    take(max_seq_length=62)
    assert take(max_seq_length=60)[0]
    assert not take(max_seq_length=61)[0]


def test_folders(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache" / "gdtrain"
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        for system, folder in (("linux", ".cache"), ("darwin", "Library/Caches")):
            monkeypatch.setattr("sys.platform", system)
            assert cache_folder() == tmp_path / folder / "gdtrain"
