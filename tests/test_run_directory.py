"""Which files are a run's, which are somebody else's."""

from pathlib import Path

import pytest

from gdtrain.errors import UserError
from gdtrain.run_directory import (
    check_run_directory,
    drop_old_checkpoints,
    find_adapter,
    list_checkpoints,
    make_run_directory,
)


def checkpoints(run: Path, *iterations: int) -> None:
    for iteration in iterations:
        (run / "checkpoints" / f"{iteration:07d}").mkdir(parents=True)


def test_files_of_a_file_manager_are_no_checkpoints(tmp_path):
    checkpoints(tmp_path, 5, 10, 15)
    (tmp_path / "checkpoints" / ".DS_Store").write_text("")
    (tmp_path / "checkpoints" / "notes").mkdir()
    drop_old_checkpoints(tmp_path, 2)
    assert list_checkpoints(tmp_path) == ["10", "15"]
    assert find_adapter(tmp_path, "15").name == "0000015"
    with pytest.raises(UserError, match=r"no '5'; it has: 10, 15$"):
        find_adapter(tmp_path, "5")
    assert (tmp_path / "checkpoints" / ".DS_Store").exists()


def test_what_an_earlier_run_left_is_moved_and_nothing_else(tmp_path):
    run = tmp_path / "run"
    checkpoints(run, 5)
    for name in ("metrics.jsonl", "notes.txt"):
        (run / name).write_text(name)
    (tmp_path / "run-1").mkdir()
    moved = make_run_directory(run, "model: tiny\n")
    assert moved == tmp_path / "run-2"
    assert sorted(p.name for p in moved.iterdir()) == ["checkpoints", "metrics.jsonl"]
    assert sorted(p.name for p in run.iterdir()) == ["config.yaml", "notes.txt"]


def test_the_current_directory_is_not_emptied(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("mine")
    with pytest.raises(UserError, match=r"already holds config\.yaml"):
        check_run_directory(Path("."))
    check_run_directory(Path("run"))
