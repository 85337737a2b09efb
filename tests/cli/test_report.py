"""gdtrain report: the page of a real run, and what it refuses."""

import fcntl
import json
import re
from pathlib import Path

from command import call, finish, metrics


def test_page_of_a_run(trained):
    assert finish("report", "run") == "run/report.html\n"
    page = Path("run/report.html").read_text(encoding="utf-8")
    head, *_ = metrics("run", "header")
    last = metrics("run", "val")[-1]
    assert f"finished, {head['iterations']} iterations" in page
    assert f"<td>{last['iteration']}</td>" in page
    assert f"{last['loss']:.3f}</td>" in page
    assert head["kernel_reason"] in page
    assert Path("run/config.yaml").read_text(encoding="utf-8").splitlines()[0] in page
    losses = re.search(r'data-out="loss-0" data-x="([^"]*)"', page)[1]
    assert losses.split() == [str(record["iteration"]) for record in metrics("run", "train")]


def test_a_run_that_broke_off_and_one_that_goes_on(trained):
    """What tells them apart is the lock that a run holds."""
    file = Path("run/metrics.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0] + lines[1] + '{"kind": "tra')
    finish("report", "run")
    assert "broken off, 0 of" in Path("run/report.html").read_text()
    with Path("run/run.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        finish("report", "run")
    page = Path("run/report.html").read_text()
    assert "running, 0 of" in page
    assert 'http-equiv="refresh"' in page


def test_what_is_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("empty").mkdir()
    Path("begun").mkdir()
    Path("begun/metrics.jsonl").write_text("")
    Path("bad").mkdir()
    Path("bad/metrics.jsonl").write_text(json.dumps({"kind": "header"}) + "\nnot json\n")
    for run, message in (
        ("none", "none: no such directory; accepted: a run directory"),
        ("file", "file: not a directory; accepted: a run directory"),
        ("empty", "empty has no metrics.jsonl; accepted: "),
        ("begun", "begun/metrics.jsonl has no record"),
        ("bad", "bad/metrics.jsonl:2: not JSON"),
    ):
        result = call("report", run)
        assert (result.code, result.out) == (2, "")
        assert message in result.err
        assert "Traceback" not in result.err
    assert list(tmp_path.rglob("report.html")) == []


def test_a_place_that_cannot_be_written(trained):
    Path("run/report.html").unlink()
    Path("run/report.html").mkdir()
    result = call("report", "run")
    assert result.code == 2
    assert "report.html cannot be written: " in result.err


def test_a_name_is_needed():
    result = call("report")
    assert result.code == 2
    assert "RUN" in result.err


def test_nothing_else_is_left(trained):
    before = {path.name for path in Path("run").iterdir()}
    finish("report", "run")
    assert {path.name for path in Path("run").iterdir()} - before - {"report.html"} == set()
