"""gdtrain bench-shapes: a row for everything asked for, as text and as JSON, and options refused at once."""

import importlib.util
import io
import json
from pathlib import Path

import pytest
from command import call, finish, run
from gdkernels import BACKENDS
from rich.console import Console

from gdtrain.bench.shapes import LOOP
from gdtrain.bench.table import Table
from gdtrain.commands import bench_shapes
from gdtrain.commands.bench_shapes import _print
from gdtrain.errors import UserError

TINY = ("--shape", "1,2,16,8", "--repeats", "1")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def measured(*args: object) -> dict:
    finish("bench-shapes", *args, "--json", "rows.json")
    return json.loads(Path("rows.json").read_text(encoding="utf-8"))


def test_piped():
    """In a process of its own, without the network."""
    arguments = (*TINY, "--tokens", "8,20", "--batch", "1,2", "--json", "rows.json")
    result = run("bench-shapes", *arguments, HF_HUB_OFFLINE="1")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].startswith("mlx 0.")
    assert "budget" in lines[0]
    assert "\x1b" not in result.out
    heads = next(line for line in lines if "fwd+bwd ms" in line)
    for column in ("T", "B", "backend", "path", "fwd ms", "peak GB", "kB/token", "error", "vs loop", "note"):
        assert column in heads
    assert sum(LOOP in line for line in lines) == 4
    report = json.loads(Path("rows.json").read_text(encoding="utf-8"))
    assert {"device", "system", "mlx", "mlx_lm", "date", "dtype", "budget_gb", "rows"} <= set(report)
    asked = {(row["batch"], row["tokens"], row["backend"]) for row in report["rows"]}
    assert asked == {(B, T, name) for B in (1, 2) for T in (8, 20) for name in (LOOP, *BACKENDS)}
    for row in report["rows"]:
        assert row["status"] in ("ok", "refused")
        if row["status"] == "ok":
            assert row["path"] == row["backend"]
            assert row["forward_ms"] > 0
            assert row["forward_backward_ms"] > 0
            assert row["bytes_per_token"] > 0
            assert row["error"] < 2e-2
        else:
            assert row["note"]


def test_backends_by_name():
    report = measured(*TINY, "--tokens", "8", "--backend", "auto,loop", "--dtype", "float16")
    assert [row["backend"] for row in report["rows"]] == [LOOP, "auto"]
    assert report["rows"][1]["path"] in BACKENDS
    assert report["rows"][1]["reason"]
    assert report["rows"][1]["speedup"] > 0
    assert {row["dtype"] for row in report["rows"]} == {"float16"}


def test_over_budget():
    """C67: the loop at T = 8192 with 1 GB is a row, not a crash."""
    arguments = ("--shape", "16,32,128,128", "--tokens", "8192", "--backend", "loop", "--budget-gb", "1")
    (row,) = measured(*arguments)["rows"]
    assert row["status"] == "skipped"
    assert row["note"] == "needs 73.4 GB, the budget is 1.0 GB"
    assert "skipped: needs 73.4 GB" in finish("bench-shapes", *arguments)


@pytest.mark.parametrize(("name", "title"), [("seed-9b", "Metal VJP kernel"), ("batch-rows", "batch rows past")])
def test_published_tables(name, title):
    out = finish("bench-shapes", "--shape", name, "--tokens", "2", "--batch", "1", "--repeats", "1")
    assert title in out
    assert out.count("T  B  backend") == 1


BAD = {
    "shape": (["--shape", "qwen3.5-9"], ("--shape", "qwen3.5-9b")),
    "heads": (["--shape", "3,4,64,64"], ("--shape", "Hv = 4", "Hk = 3")),
    "numbers": (["--shape", "3,4,64"], ("--shape", "Hk,Hv,Dk,Dv")),
    "dtype": (["--dtype", "int8"], ("--dtype", "bfloat16")),
    "backend": (["--backend", "chunked,chunky"], ("--backend", "chunky", "chunked", "loop")),
    "tokens": (["--tokens", "8,x"], ("--tokens", "8,x")),
    "batch": (["--batch", "0"], ("--batch", "'0'")),
    "repeats": (["--repeats", "0"], ("--repeats", "1 and more")),
    "budget": (["--budget-gb", "0"], ("--budget-gb", "above 0")),
    "json": (["--json", "no/such/x.json"], ("--json", "no/such/x.json", "directory")),
    "json folder": (["--json", "."], ("--json", "directory")),
    "plot": (["--plot", "x.pdf"], ("--plot", ".svg", ".png")),
}


@pytest.fixture
def nothing_runs(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("something was measured")

    monkeypatch.setattr("gdtrain.commands.bench_shapes.run_case", forbidden)


@pytest.mark.parametrize("case", BAD)
def test_bad_option(case, nothing_runs):
    arguments, named = BAD[case]
    result = call("bench-shapes", *arguments)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("gdtrain: ")
    assert len(result.err.splitlines()) == 1
    assert [part for part in named if part not in result.err] == [], result.err
    assert list(Path().iterdir()) == []


def test_plot_without_matplotlib(nothing_runs, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else find(name))
    result = call("bench-shapes", *TINY, "--plot", "x.svg")
    assert result.code == 2
    assert "gdtrain[plot]" in result.err


def test_plot():
    pytest.importorskip("matplotlib")
    finish("bench-shapes", *TINY, "--tokens", "4,8", "--backend", "loop,chunked", "--plot", "x.svg")
    assert LOOP in Path("x.svg").read_text(encoding="utf-8") or Path("x.svg").stat().st_size > 10_000


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C after the first row."""
    whole = bench_shapes.run_case

    def interrupted(case, backends, limits):
        yield next(whole(case, backends, limits))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_shapes, "run_case", interrupted)


def full_disk(option, file, figures):
    raise UserError(f"{option}: {file} cannot be written: No space left on device")


def test_interrupt_shows_what_was_measured(interrupted):
    pytest.importorskip("matplotlib")
    result = call("bench-shapes", *TINY, "--tokens", "8", "--json", "rows.json", "--plot", "x.svg")
    assert (result.code, result.err) == (130, "gdtrain: interrupted\n")
    assert LOOP in result.out
    assert len(json.loads(Path("rows.json").read_text(encoding="utf-8"))["rows"]) == 1
    assert "<?xml" in Path("x.svg").read_text(encoding="utf-8")[:100]


def test_interrupt_with_a_full_disk(interrupted, monkeypatch):
    """Still an interrupt; the file that is missing is told, and the other one written."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench_shapes, "write_json", full_disk)
    result = call("bench-shapes", *TINY, "--tokens", "8", "--json", "rows.json", "--plot", "x.svg")
    assert result.code == 130
    assert result.err == "gdtrain: --json: rows.json cannot be written: No space left on device\ngdtrain: interrupted\n"
    assert Path("x.svg").exists()


def test_full_disk(monkeypatch):
    monkeypatch.setattr(bench_shapes, "write_json", full_disk)
    result = call("bench-shapes", *TINY, "--tokens", "8", "--backend", "chunked", "--json", "rows.json")
    assert (result.code, result.err) == (2, "gdtrain: --json: rows.json cannot be written: No space left on device\n")
    assert "chunked" in result.out


def test_interrupt_before_the_first_row(monkeypatch):
    pytest.importorskip("matplotlib")

    def interrupted(case, backends, limits):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_shapes, "run_case", interrupted)
    result = call("bench-shapes", *TINY, "--tokens", "8", "--plot", "x.svg")
    assert (result.code, result.err) == (130, "gdtrain: interrupted\n")
    assert not Path("x.svg").exists()


def test_terminal():
    """A rich table, which folds long notes; brackets in a note are no markup."""
    out = io.StringIO()
    note = "failed: [malloc] " + "long " * 30
    _print(Table("title", ["T", "note"], [["8", note]]), Console(file=out, force_terminal=True, width=60))
    assert "[malloc]" in out.getvalue()
    assert out.getvalue().count("long") == 30
