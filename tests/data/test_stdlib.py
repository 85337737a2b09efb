import ast
import hashlib
import json
import sys
from pathlib import Path

import pytest

from gdtrain.data import stdlib
from gdtrain.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stdlib.build_stdlib_dataset(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def splits(folder: Path) -> dict[str, list[dict[str, str]]]:
    return {s: [json.loads(line) for line in (folder / f"{s}.jsonl").open(encoding="utf-8")] for s in stdlib.SPLITS}


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "library"
    root.mkdir()
    monkeypatch.setattr(stdlib, "_stdlib_root", lambda: root)
    monkeypatch.setattr(stdlib, "MIN_RECORDS", 1)
    return root


def test_has_enough_records_in_the_intended_shares(splits: dict[str, list[dict[str, str]]]) -> None:
    total = sum(map(len, splits.values()))
    assert total >= 2_000
    assert 0.85 < len(splits["train"]) / total < 0.95
    assert len(splits["valid"]) >= 60
    assert len(splits["test"]) >= 60


def test_records_are_source_without_docstring_and_one_line(splits: dict[str, list[dict[str, str]]]) -> None:
    for record in (record for records in splits.values() for record in records):
        assert set(record) == {"prompt", "completion"}
        prompt, completion = record["prompt"], record["completion"]
        assert completion not in prompt
        assert len(prompt) <= 2_000
        assert completion == " ".join(completion.split())
        function = ast.parse(prompt).body[0]
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)


def test_no_source_is_in_two_splits(splits: dict[str, list[dict[str, str]]]) -> None:
    prompts = [{record["prompt"] for record in records} for records in splits.values()]
    assert sum(map(len, prompts)) == len(set.union(*prompts)) == sum(map(len, splits.values()))


def test_all_functions_of_a_file_are_in_the_split_of_its_path(small_library: Path, tmp_path: Path) -> None:
    _write_small_library(small_library)
    folder = stdlib.build_stdlib_dataset(tmp_path)
    for split in stdlib.SPLITS:
        names = [json.loads(line)["prompt"].split("(")[0] for line in (folder / f"{split}.jsonl").open()]
        modules = {name.removeprefix("def f").removesuffix("_twice") for name in names}
        assert modules == {str(i) for i in range(60) if stdlib.split_of(f"m{i}.py") == split}
        assert len(names) == 2 * len(modules) > 0


def test_split_depends_on_the_path_alone() -> None:
    assert [stdlib.split_of(m) for m in ("textwrap.py", "json/decoder.py", "mailbox.py")] == ["train"] * 3
    modules = [f"package/module_{i}.py" for i in range(4_000)]
    assert 3_500 < sum(stdlib.split_of(m) == "train" for m in modules) < 3_700


def test_builds_the_same_bytes_again(small_library: Path, tmp_path: Path) -> None:
    _write_small_library(small_library)
    first, second = (stdlib.build_stdlib_dataset(tmp_path / name) for name in ("first", "second"))
    assert first.name == second.name
    assert _digests(first) == _digests(second)


def test_order_does_not_come_from_the_file_system(small_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.py", "a.py", "c.py"):
        (small_library / name).write_text("x = 1\n")
    walk = stdlib.os.walk
    monkeypatch.setattr(stdlib.os, "walk", lambda root: ((d, s, sorted(f, reverse=True)) for d, s, f in walk(root)))
    assert [name for name, _ in stdlib.iter_stdlib_sources()] == ["a.py", "b.py", "c.py"]


def test_reuses_what_is_complete_and_replaces_what_is_not(
    tmp_path: Path, small_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_small_library(small_library)
    folder = stdlib.build_stdlib_dataset(tmp_path)
    whole = _digests(folder)
    (folder / "train.jsonl").write_text("")
    assert _digests(stdlib.build_stdlib_dataset(tmp_path)) == whole
    monkeypatch.setattr(stdlib, "_collect", lambda: pytest.fail("built again"))
    assert stdlib.build_stdlib_dataset(tmp_path) == folder
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


def test_counts_what_it_leaves_out(tmp_path: Path, small_library: Path) -> None:
    _write_small_library(small_library)
    (small_library / "broken.py").write_text("def f(:\n")
    (small_library / "latin.py").write_bytes(b"x = '\xe9'\n")
    (small_library / "odd.py").write_text(
        'def empty():\n    """Does nothing at all."""\n'
        'def word(x):\n    """Word."""\n    return x\n'
        'def shared(x):\n    """Shares its line."""; return x\n'
        'def long(x):\n    """Is too long."""\n    return "' + "x" * 2_000 + '"\n'
    )
    (small_library / "test").mkdir()
    (small_library / "test" / "skipped.py").write_text("def f(:\n")
    manifest = json.loads((stdlib.build_stdlib_dataset(tmp_path) / "dataset.json").read_text())
    assert manifest["left_out"] == {
        "file does not parse": 2,
        "nothing left beside the docstring, or on its lines": 2,
        "sentence under 2 words": 1,
        "source over 2000 characters": 1,
    }


def test_keeps_decorators_comments_and_strings(small_library: Path, tmp_path: Path) -> None:
    _write_small_library(small_library)
    (small_library / "one.py").write_text(
        "class A:\n    @property\n    def f(self):\n"
        '        """Give é. Then\n        more."""  # noqa\n\n        # why\n        return """a\n  b"""\n'
    )
    folder = stdlib.build_stdlib_dataset(tmp_path)
    records = [json.loads(line) for split in stdlib.SPLITS for line in (folder / f"{split}.jsonl").open()]
    expected = '@property\ndef f(self):\n    # why\n    return """a\nb"""'
    assert {"prompt": expected, "completion": "Give é."} in records


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Return x.", "Return x."),
        ("Return x.  Raise y.", "Return x."),
        ("Return\n    the sum\nof x. More.", "Return the sum of x."),
        ("No stop here\n\nSecond paragraph.", "No stop here"),
        ("Use it, e.g. so. Next.", "Use it, e.g. so."),
        ("By J. Smith of 3.11 times. Next.", "By J. Smith of 3.11 times."),
        ('Say "stop." Next.', 'Say "stop."'),
        ("Is it so? Yes.", "Is it so?"),
    ],
)
def test_first_sentence(docstring: str, expected: str) -> None:
    assert stdlib.first_sentence(docstring) == expected


def test_missing_sources_are_one_clear_error(small_library: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"python-stdlib is built from the sources.*has no \.py files"):
        stdlib.build_stdlib_dataset(tmp_path / "cache")
    (small_library / "os.py").write_text("x = 1\n")
    with pytest.raises(UserError, match="gives only 0 functions"):
        stdlib.build_stdlib_dataset(tmp_path / "cache")


def test_unwritable_cache_is_one_clear_error(small_library: Path, tmp_path: Path) -> None:
    _write_small_library(small_library)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the data set to .*Set XDG_CACHE_HOME"):
        stdlib.build_stdlib_dataset(tmp_path / "file")


def test_default_cache_folder(small_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_small_library(small_library)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert stdlib.build_stdlib_dataset().parent == tmp_path / "xdg" / "gdtrain" / "python-stdlib"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    caches = "Library/Caches" if sys.platform == "darwin" else ".cache"
    assert stdlib.build_stdlib_dataset().parent == tmp_path / "home" / caches / "gdtrain" / "python-stdlib"


def _write_small_library(root: Path) -> None:
    """Two functions in each of sixty files: enough for each split to have some."""
    for i in range(60):
        (root / f"m{i}.py").write_text(
            f'def f{i}(x):\n    """Add {i} to it."""\n    return x + {i}\n'
            f'\f\ndef f{i}_twice(x):\n    """Add {i} to it twice."""\n    return x + 2 * {i}\n'
        )


def _digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
