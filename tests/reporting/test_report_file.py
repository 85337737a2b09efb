"""report.html in a run directory: from files as runs leave them, and in place whole or not at all."""

import errno
import os

import pytest
from report_records import CONFIG, header, run, stop, train, write

from gdtrain.errors import UserError
from gdtrain.reporting import report_file
from gdtrain.reporting.metrics import MetricsFile
from gdtrain.reporting.report_file import LiveReport, read_records, write_report


def test_writes_the_page(tmp_path):
    folder = write(tmp_path / "my-run", run())
    file = write_report(folder)
    assert file == folder / "report.html"
    page = file.read_text(encoding="utf-8")
    assert "<h1>my-run</h1>" in page
    assert "finished, 100 iterations" in page
    assert CONFIG in page
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "metrics.jsonl", "report.html"]


def test_takes_the_place_of_the_page_before(tmp_path):
    write_report(write(tmp_path, run(40)))
    write_report(write(tmp_path, run()))
    assert "finished" in (tmp_path / "report.html").read_text()


def test_what_the_metrics_file_writes(tmp_path):
    folder = write(tmp_path, [])
    with MetricsFile(folder / "metrics.jsonl") as metrics:
        metrics.write(**header())
        metrics.write(**train(5, loss=float("inf")))
    assert "1 train loss is not finite" in write_report(folder).read_text()


@pytest.mark.parametrize(
    "rest", [b'{"kind": "tra', b'{"kind": "train", "iteration": 45', b"\x00\x00\x00", b"\xff", b"{"]
)
def test_a_last_line_without_its_end_is_left_out(tmp_path, rest):
    assert len(read_records(write(tmp_path, run(40), rest) / "metrics.jsonl")) == len(run(40))
    assert "running, 40 of 100" in write_report(tmp_path).read_text()


def test_a_last_line_that_lacks_only_its_end_of_line_counts(tmp_path):
    folder = write(tmp_path, run(40), b'{"kind": "stop", "iteration": 40, "reason": "r"}')
    assert "stopped at iteration 40" in write_report(folder).read_text()


@pytest.mark.parametrize("line", [b"{]\n", b"\n", b"[1]\n", b'{"iteration": 1}\n', b"3\n", b"\xff\n"])
def test_a_bad_line_is_named(tmp_path, line):
    folder = write(tmp_path, [header()], line)
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not"):
        write_report(folder)


def test_no_metrics(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read: No such file"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="has no record"):
        write_report(write(tmp_path, []))
    with pytest.raises(UserError, match="has no record"):
        write_report(write(tmp_path, [], b'{"kind'))


def test_no_config(tmp_path):
    folder = write(tmp_path, run())
    (folder / "config.yaml").unlink()
    assert "config.yaml is missing" in write_report(folder).read_text()


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    folder = write(tmp_path, run(40))
    before = write_report(folder).read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write(tmp_path, run())
    monkeypatch.setattr(type(folder), "replace", full)
    with pytest.raises(UserError, match=r"report\.html cannot be written: No space left on device"):
        write_report(folder)
    assert (folder / "report.html").read_bytes() == before
    assert len(list(folder.iterdir())) == 3


def test_two_writers_do_not_meet(tmp_path, monkeypatch):
    """A run and `gdtrain report`: the one finds its page in place though the other wrote in between."""
    folder = write(tmp_path, run())
    replace, process = type(folder).replace, os.getpid()

    def other_first(partial, target):
        monkeypatch.setattr(type(folder), "replace", replace)
        monkeypatch.setattr(os, "getpid", lambda: process + 1)
        write_report(folder)
        return replace(partial, target)

    monkeypatch.setattr(type(folder), "replace", other_first)
    assert "finished" in write_report(folder).read_text()
    assert len(list(folder.iterdir())) == 3


def test_a_folder_in_its_place(tmp_path):
    folder = write(tmp_path, run())
    (folder / "report.html").mkdir()
    with pytest.raises(UserError, match=r"report\.html cannot be written: Is a directory"):
        write_report(folder)


def test_live_report_takes_a_hundredth_of_the_time(tmp_path, monkeypatch):
    """A clock that only writing moves, by 2 s, and the test: the next page is 200 s later."""
    now, written = [0.0], []

    def slow(folder):
        now[0] += 2
        written.append(now[0])

    monkeypatch.setattr(report_file, "write_report", slow)
    monkeypatch.setattr(report_file.time, "monotonic", lambda: now[0])
    live = LiveReport(tmp_path, pytest.fail)
    for _ in range(4000):
        live.log("train", 1, {})
        now[0] += 0.1
    assert written == pytest.approx(
        [
            2,
            204,
        ],
        abs=0.3,
    )
    live.close()
    assert len(written) == 3


def test_live_report_of_a_short_run(tmp_path):
    folder = write(tmp_path, run(40))
    live = LiveReport(folder, pytest.fail)
    live.log("train", 1, {})
    page = (folder / "report.html").read_bytes()
    write(folder, [*run(40), stop(40, "why")])
    live.log("train", 1, {})
    assert (folder / "report.html").read_bytes() == page
    live.close()
    assert b"why" in (folder / "report.html").read_bytes()


def test_a_run_goes_on_without_its_page(tmp_path):
    """Said once."""
    folder = write(tmp_path, run(40))
    (folder / "report.html").mkdir()
    said = []
    live = LiveReport(folder, said.append)
    for _ in range(3):
        live.log("train", 1, {})
    live.close()
    assert len(said) == 1
    assert "report.html cannot be written: " in said[0]
    assert said[0].endswith("; the run goes on without its page")
