"""The programs run on a CPU at tiny sizes; what they lack there, torch and a GPU, is a row that says so."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import fla_side_by_side
import fla_worker
import mlx.core as mx
import numpy as np
import pytest
from fla_side_by_side import Worker, relative_l2
from float64_rule import INPUTS

from gdtrain.bench import measure

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(program, *args):
    command = [sys.executable, str(BENCHMARKS / program), *args, "--json", "out.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(Path("out.json").read_text(encoding="utf-8"))


def test_rule(tmp_path, monkeypatch):
    """The keys of the committed results, and what they are results of."""
    monkeypatch.chdir(tmp_path)
    report = run("rule.py", "--shape", "1,2,16,8", "--tokens", "8", "--rounds", "1", "--repeats", "1")
    committed = json.loads((BENCHMARKS / "rule-cpu.json").read_text(encoding="utf-8"))
    assert list(report) == list(committed)
    assert [row["variant"] for row in report["rows"]] == [row["variant"] for row in committed["rows"]]
    assert list(report["rows"][0]) == list(committed["rows"][0])
    readme = (BENCHMARKS.parent / "README.md").read_text(encoding="utf-8")
    for file in BENCHMARKS.glob("rule-*.json"):
        if json.loads(file.read_text(encoding="utf-8"))["what"] != report["what"]:
            assert f"(benchmarks/{file.name}), made by an earlier version" in " ".join(readme.split()), file


def test_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = run("step.py", "--shape", "mini", "--tokens", "16,40", "--dtype", "float32", "--steps", "1")
    assert [row["tokens"] for row in report["rows"]] == [16, 40]
    for row in report["rows"]:
        assert list(row["parts"]) == ["GDN", "attention", "MLP", "norm", "loss", "rest"]
        parts = [part for name, part in row["parts"].items() if name != "rest"]
        assert all(part["in_step_ms"] > 0 for part in parts)
        assert row["parts"]["rest"]["in_step_ms"] == pytest.approx(row["ms"] - sum(p["in_step_ms"] for p in parts))
        assert 0 < row["host_ms"] < row["ms"]


def test_stock(tmp_path, monkeypatch):
    """Both train the same thing: the loss of the first step is the same."""
    monkeypatch.chdir(tmp_path)
    report = run("stock.py", "--tokens", "24", "--rounds", "1", "--steps", "1")
    stock, ours = report["rows"]
    assert stock["loss"] == pytest.approx(ours["loss"], rel=1e-5)
    assert (stock["variant"], ours["variant"]) == ("mlx-lm", "gdtrain")


def test_packing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ("--documents", "8", "--median", "10", "--max-seq-length", "32", "--dtype", "float32")
    report = run("packing.py", "--shape", "mini", *sizes, "--rounds", "1")
    assert [row["variant"] for row in report["rows"]] == ["packed", "padded", "padded, wide"]
    assert report["rows"][0]["shapes"] <= 2


def test_same_inputs_for_everyone(tmp_path):
    """Who is timed gets a file, drawn by MLX's worker once for a shape and T, and tells so where that fails."""
    asked = []

    class Recorder:
        def __init__(self, name):
            self.name = name

        def ask(self, request):
            asked.append((self.name, request))
            if request["do"] == "draw" and request["T"] == 32:
                return {"failed": "no memory"}
            return {"forward_ms": [1.0], "both_ms": [2.0], "pipelined_ms": [1.5], "peak": 10**9}

    workers = {name: Recorder(name) for name in ("mlx", "torch")}
    contenders = [("mlx", "fused"), fla_side_by_side.FLA]
    cases = [([1, 2, 32, 16], T) for T in (16, 24, 32)]
    args = SimpleNamespace(rounds=2, repeats=1)
    drawn = fla_side_by_side.Drawn(workers["mlx"], tmp_path)
    rows = fla_side_by_side.measure_times(workers, contenders, cases, drawn, args)
    draws = [(name, request["T"]) for name, request in asked if request["do"] == "draw"]
    assert draws == [("mlx", 16), ("mlx", 24), ("mlx", 32)]
    for T in (16, 24):
        file = drawn.file([1, 2, 32, 16], T)[0]
        times = [name for name, request in asked if (request["do"], request["inputs"]) == ("time", file)]
        assert times == ["mlx", "torch"] * 2
    assert [row.get("failed") for row in rows[4:]] == 2 * ["no inputs: no memory"]


def test_mlx_is_timed_on_the_inputs_of_the_file(tmp_path, monkeypatch):
    file = str(tmp_path / "inputs.npz")
    worker = fla_worker.Mlx()
    worker.draw([1, 2, 32, 16], 24, file)
    seen = []

    def timed(rule, primals, cotangents, repeats):
        seen.extend([*primals, *cotangents])
        return measure.Timing([1.0], [2.0], 3)

    monkeypatch.setattr(measure, "measure", timed)
    assert worker.time("chunked", file, 1)["peak"] == 3
    with np.load(file) as drawn:
        assert list(drawn) == [*INPUTS, "dy", "dstate_out"]
        for x, want in zip(seen, drawn.values(), strict=True):
            np.testing.assert_array_equal(np.array(x.astype(mx.float32)), want)
    bfloat16 = [x.dtype == mx.bfloat16 for x in seen]
    assert bfloat16 == [True, True, True, False, False, False, True, False]


def test_side_by_side(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ("--shape", "1,2,32,16", "--tokens", "16,24", "--error-tokens", "8")
    report = run("fla_side_by_side.py", *sizes, "--backends", "chunked,nonsense", "--rounds", "2", "--repeats", "1")
    errors = {row["backend"]: row for row in report["errors"]}
    found = errors["chunked"]["relative_l2"]
    assert list(found) == ["y", "state", "dq", "dk", "dv", "dlog_decay", "dbeta", "dstate"]
    assert max(found.values()) < 1e-2  # bfloat16 results
    assert found["dstate"] < 2e-6  # float32 result: the inputs were the same
    assert "nonsense" in errors["nonsense"]["failed"]
    rows = [row for row in report["rows"] if row["backend"] == "chunked"]
    assert [row["tokens"] for row in rows] == [16, 24]
    for row in rows:
        assert row["measurements"] == 2
        assert row["forward_backward_ms"] > 0
        assert row["peak_gb"] > 0
    assert {"mlx", "torch", "triton", "fla-core", "device", "date"} <= set(report)
    if report["torch"] is None:
        assert "torch" in errors["chunk_gated_delta_rule"]["failed"]
        assert all("torch" in row["failed"] for row in report["rows"] if row["framework"] == "torch")


PROGRAMS = {
    "crash": ("import os; input(); os._exit(9)", "the process ended with code 9"),
    "hang": ("import time; input(); time.sleep(60)", "took too long"),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_worker_that_dies(case, tmp_path, monkeypatch):
    """It is a reply, and the next question goes to a new process."""
    program, why = PROGRAMS[case]
    monkeypatch.setattr(fla_side_by_side, "WORKER", tmp_path / "worker.py")
    monkeypatch.setattr(fla_side_by_side, "GRACE_SECONDS", 0)
    (tmp_path / "worker.py").write_text(program)
    worker = Worker("mlx", time.monotonic() + 2)
    assert worker.ask({"do": "hello"}) == {"failed": why}
    (tmp_path / "worker.py").write_text("input(); print('{\"fine\": 1}', flush=True); input()")
    worker = Worker("mlx", time.monotonic() + 20)
    assert worker.ask({"do": "hello"}) == {"fine": 1}
    worker.stop()


def test_time_is_up():
    assert Worker("mlx", time.monotonic() - 1).ask({"do": "hello"}) == {"failed": "not run: the time was up"}


def test_relative_l2(tmp_path):
    np.savez(tmp_path / "a.npz", y=np.array([3.0, 4.5]), dq=np.array([np.nan, 1]))
    np.savez(tmp_path / "b.npz", y=np.array([3.0, 4.0]), dq=np.array([1.0, 1]))
    errors = relative_l2(str(tmp_path / "a.npz"), str(tmp_path / "b.npz"))
    assert errors == {"y": pytest.approx(0.1), "dq": None}
