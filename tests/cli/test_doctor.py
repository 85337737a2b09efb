"""gdtrain doctor: what it shows, and that it says so when a kernel is wrong."""

import json
import platform
import socket
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from pathlib import Path

import mlx.core as mx
import pytest
from command import call, finish, run
from gdkernels import verdicts
from gdkernels.backends import BACKENDS
from gdkernels.chunked import chunked
from gdkernels.selftest import TENSORS
from gdkernels.testing import metal

from gdtrain.doctor import SHAPES


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def small(monkeypatch):
    """The models' shapes with other head dimensions: the whole ones take seconds for each backend on a CPU."""
    for name, (Hk, Hv, _, _) in SHAPES.items():
        monkeypatch.setitem(SHAPES, name, (Hk // 8, Hv // 8, 16, 16))


@pytest.fixture
def play(small, monkeypatch):
    """play(fused=rule, ...): doctor on what counts as Metal, with those kernels; the others refuse."""

    def examine(*arguments, **rules):
        for name in ("fused", "recurrent", "native"):
            played = {"rule": rules.get(name), "refusal": lambda sizes: None}
            refused = {"refusal": lambda sizes: f"not for Hv = {sizes.Hv}"}
            monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], **(played if name in rules else refused)))
        with metal(selftest=True):
            return call("doctor", *arguments)

    return examine


@mx.custom_function
def _one_percent(k):
    return k * 1


@_one_percent.vjp
def _one_percent_vjp(primals, cotangents, outputs):
    return cotangents * 1.01


def wrong_dk(q, k, *rest):
    return chunked(q, _one_percent(k), *rest)


def raising(*arrays):
    raise RuntimeError("Unable to build metal library from source")


def line(out, name):
    """What stands behind a name in the first column, in the first such line."""
    return next(text.split(None, 1)[1] for text in out.splitlines() if text.split()[:1] == [name] and ": " in text)


def table(out):
    """{(dtype, tensor): cells} of the first table."""
    rows = [row.split() for row in out[out.index("self-test for") :].split("\n\n")[0].splitlines()[2:]]
    return {(dtype, tensor): cells for dtype, tensor, *cells in rows}


def test_cpu(monkeypatch):
    """The whole shapes, in a process of its own."""
    result = run("doctor", "--json", "doctor.json")
    assert (result.code, result.err) == (0, "")
    for text in (platform.python_version(), f"mlx {version('mlx')}", f"mlx-lm {version('mlx-lm')}", "MLX_ENABLE_TF32"):
        assert text in result.out
    assert "chosen: self-test" in line(result.out, "chunked")
    assert "available: self-test" in line(result.out, "replay")
    assert line(result.out, "auto").startswith("chunked: CPU device; exact gradients")
    for name in ("fused", "recurrent", "native"):
        assert line(result.out, name).startswith("refused: ")
    assert table(result.out).keys() == set(product(("float32", "bfloat16"), TENSORS))
    assert all(float(cell) < 1e-2 for cells in table(result.out).values() for cell in cells)

    report = json.loads(Path("doctor.json").read_text())
    assert report["fault"] is None
    assert {(s["model"], s["backend"]) for s in report["backends"]} == {(m, b) for m in SHAPES for b in BACKENDS}
    assert {s["state"] for s in report["backends"] if s["backend"] == "chunked"} == {"chosen"}
    assert report["reasons"].keys() == SHAPES.keys()
    errors = [e for test in report["self_tests"] for e in test["errors"]]
    assert all(e["passed"] and 0 <= e["error"] <= e["bound"] < 1e-2 for e in errors)
    assert {e["tensor"] for e in errors} == set(TENSORS)
    assert {e["dtype"] for e in errors} == {"float32", "bfloat16"}


def test_right_kernels(play):
    result = play(fused=chunked)
    assert (result.code, result.err) == (0, "")
    assert line(result.out, "fused").startswith("chosen: self-test")
    assert "auto" in result.out
    assert line(result.out, "auto").startswith("fused: Metal device; self-test")
    assert all(len(cells) == 4 and "!" not in cells for cells in table(result.out).values())
    assert "not for Hv = 8" in result.out  # a line for each shape where they differ
    assert result.out.count("self-test for") == 1


@pytest.mark.parametrize("rule", [wrong_dk, raising])
def test_a_wrong_kernel_is_shown(rule, play):
    """The next backend is right, so the machine can train: exit code 0."""
    result = play("--json", "doctor.json", fused=rule)
    assert (result.code, result.err) == (0, "")
    report = json.loads(Path("doctor.json").read_text())
    assert {s["state"] for s in report["backends"] if s["backend"] == "fused"} == {"failed"}
    assert line(result.out, "chunked").startswith("chosen")
    auto = line(result.out, "auto")
    assert auto.startswith("chunked: Metal device; fused failed its self-test: ")
    assert result.out.count("self-test for") == len(SHAPES)
    if rule is raising:
        assert "failed: self-test: RuntimeError: Unable to build metal library" in result.out
        assert any("Unable to build" in (test["exception"] or "") for test in report["self_tests"])
    else:
        assert "failed: self-test: 1 of 8 tensors wrong, worst dk" in line(result.out, "fused")
        for (_, tensor), cells in table(result.out).items():
            assert ("!" in cells) == (cells[1] == "!") == (tensor == "dk")


def test_the_chosen_backend_is_wrong(small, monkeypatch):
    """Nothing is left to choose: exit code 2, after the report."""
    monkeypatch.setitem(BACKENDS, "chunked", replace(BACKENDS["chunked"], rule=wrong_dk))
    result = call("doctor", "--json", "doctor.json")
    assert result.code == 2
    assert result.err.startswith(
        "gdtrain: chunked is chosen for qwen3.5-0.8b, qwen3.5-2b, but its self-test says: 1 of 8 tensors"
    )
    assert "dk" in result.err
    assert "chosen: self-test 1 of 8 tensors wrong" in line(result.out, "chunked")
    assert json.loads(Path("doctor.json").read_text())["fault"] in result.err


def test_marks_of_any_shape_are_removed(small, monkeypatch, tmp_path):
    """Left by a process that is no more: beyond the largest number of one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(verdicts, "_is_real", lambda: True)
    mark = tmp_path / "gdkernels" / "selftest-fused-0123456789abcdef.running"
    mark.parent.mkdir()
    mark.write_text(json.dumps([socket.gethostname(), 2**30]))
    result = call("doctor", "--json", "doctor.json")
    assert (result.code, result.err) == (0, "")
    assert f"removed  {mark}, left by a process that ended in a self-test" in result.out
    assert json.loads(Path("doctor.json").read_text())["cleared"] == [str(mark)]
    assert not mark.exists()
    assert "removed" not in finish("doctor")


def test_not_a_number_is_null_in_json(play):
    play("--json", "doctor.json", fused=lambda *x: (chunked(*x)[0] * mx.nan, chunked(*x)[1]))
    tests = json.loads(Path("doctor.json").read_text())["self_tests"]
    errors = [e for test in tests if test["backend"] == "fused" for e in test["errors"] if e["tensor"] == "y"]
    assert errors
    assert all(e["error"] is None and e["passed"] is False for e in errors)


def test_tf32(small, monkeypatch):
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    assert "exact to float32 rounding (MLX_ENABLE_TF32=0)" in finish("doctor")
    monkeypatch.setattr("gdkernels.portable.machine.rounds_to_tf32", lambda: True)
    monkeypatch.delenv("MLX_ENABLE_TF32")
    assert "rounded to TF32" in finish("doctor")


def test_file_that_cannot_be_written(small):
    result = call("doctor", "--json", "none/doctor.json")
    assert result.code == 2
    assert "--json" in result.err
    assert result.out == ""
