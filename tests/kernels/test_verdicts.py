"""Results of self-tests on disk: found again, under the right key, and never in the way."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import mlx.core as mx
import pytest
from gdkernels import verdicts
from gdkernels.portable.machine import force
from gdkernels.sizes import Sizes
from gdkernels.testing import metal
from stubs import counted, raising, scaled, stub

pytestmark = pytest.mark.usefixtures("on_a_cpu")

SIZES = Sizes(1, 64, 2, 4, 16, 16, mx.float32, 8)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The cache, with a device that counts as real."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(verdicts, "_is_real", lambda: True)
    return tmp_path / "gdkernels"


def files(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_found_again(folder):
    rule, lengths = counted()
    backend = stub(rule=rule)
    first = verdicts.verdict(backend, SIZES)
    count = len(lengths)
    assert first.passed
    assert len(files(folder)) == 1
    assert verdicts.verdict(backend, SIZES) is first  # in the process
    verdicts.forget()
    assert verdicts.verdict(backend, SIZES) == first  # on disk
    assert len(lengths) == count
    assert verdicts.verdict(backend, SIZES, fresh=True).errors == first.errors
    assert len(lengths) == 2 * count


KEYS = {
    "machine": ("machine", lambda: "cuda"),
    "device": ("mx.device_info", lambda: {"device_name": "another"}),
    "architecture": ("architecture", lambda: "applegpu_g18"),
    "system": ("platform.platform", lambda: "macOS-27"),
    "MLX": ("MLX", "0.32.5"),
    "package": ("_package_digest", lambda: "another"),
    "TF32": ("rounds_to_tf32", lambda: True),
}


@pytest.mark.parametrize("name", KEYS)
def test_key(name, folder, monkeypatch):
    rule, lengths = counted()
    backend = stub(rule=rule)
    verdicts.verdict(backend, SIZES)
    count = len(lengths)
    where, value = KEYS[name]
    monkeypatch.setattr(f"gdkernels.verdicts.{where}", value)
    verdicts.forget()
    verdicts.verdict(backend, SIZES)
    assert len(lengths) == 2 * count
    assert len(files(folder)) == 2


def test_key_of_kernel_and_sizes(folder):
    backends = [stub(), stub(text="another kernel"), stub("recurrent")]
    for backend in backends:
        for sizes in (SIZES, SIZES._replace(Dk=32), SIZES._replace(C=4), SIZES._replace(dtype=mx.bfloat16)):
            verdicts.verdict(backend, sizes)
        verdicts.verdict(backend, SIZES._replace(B=5, T=7))
    assert len(files(folder)) == 3 * 4


@pytest.mark.parametrize("rule", [scaled("dv", 1.01), raising])
def test_failure_is_not_kept(rule, folder):
    bad = stub(rule=rule)
    assert not verdicts.verdict(bad, SIZES).passed
    assert files(folder) == []
    verdicts.forget()
    assert verdicts.verdict(replace(bad, rule=stub().rule), SIZES).passed


def spoil_key(file):
    found = json.loads(file.read_text())
    found["key"]["device"] = "another"
    file.write_text(json.dumps(found))


def spoil_result(file):
    found = json.loads(file.read_text())
    found["result"]["errors"][0]["error"] = 1.0
    file.write_text(json.dumps(found))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_text(""),
        lambda file: file.write_text("[]"),
        lambda file: file.write_text('{"key": 3}'),
        lambda file: file.write_bytes(b"\xff\x00"),
        lambda file: file.write_text(file.read_text()[:-20]),
        lambda file: (file.unlink(), file.mkdir()),
        spoil_key,
        spoil_result,
    ],
)
def test_unreadable_file_is_ignored(spoil, folder):
    rule, lengths = counted()
    backend = stub(rule=rule)
    verdicts.verdict(backend, SIZES)
    count = len(lengths)
    spoil(next(folder.iterdir()))
    verdicts.forget()
    assert verdicts.verdict(backend, SIZES).passed
    assert len(lengths) == 2 * count


def test_unwritable_folder_is_ignored(folder):
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file")
    assert verdicts.verdict(stub(), SIZES).passed


@pytest.mark.parametrize(("system", "place"), [("darwin", "Library/Caches/gdkernels"), ("linux", ".cache/gdkernels")])
def test_folder(system, place, monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", system)
    assert verdicts.cache_folder() == tmp_path / place


def test_nothing_on_disk_for_a_played_machine(folder, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    with metal(selftest=True):
        assert verdicts.verdict(stub(), SIZES).passed
    assert files(folder) == []


def test_a_played_machine_is_not_real_on_a_gpu(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert verdicts._is_real()
    for played in (metal(), metal(selftest=True), force("cuda")):
        with played:
            assert not verdicts._is_real()
    assert verdicts._is_real()


# A self-test that takes the process with it

PROGRAM = """
import os, sys
import mlx.core as mx
from gdkernels import verdicts
from gdkernels.backends import Backend
from gdkernels.chunked import chunked
from gdkernels.sizes import Sizes

def rule(*arrays):
    if sys.argv[1] == "dies":
        os._exit(134)
    return chunked(*arrays)

verdicts._is_real = lambda: True
backend = Backend("fused", rule, lambda sizes: None, lambda: "a kernel")
result = verdicts.verdict(backend, Sizes(1, 64, 2, 4, 16, 16, mx.float32, 8), fresh=sys.argv[1] == "fresh")
print(result.passed, result.summary())
"""


def child(what):
    done = subprocess.run([sys.executable, "-c", PROGRAM, what], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_process_that_died(folder):
    assert child("dies") == (134, "")
    assert [name.rsplit(".")[-1] for name in files(folder)] == ["running"]
    code, out = child("lives")
    assert code == 0
    assert out.startswith("False process ")
    assert "ended while it ran the self-test" in out
    assert str(next(folder.iterdir())) in out
    assert "gdtrain doctor" in out
    assert child("fresh")[1].startswith("True")
    assert [name.rsplit(".")[-1] for name in files(folder)] == ["json"]
    assert child("lives")[1].startswith("True")


def test_marks_are_cleared(folder):
    """Of all sizes, but not of what may be running."""
    child("dies")
    (mark,) = folder.iterdir()
    others = {"a": [os.uname().nodename, os.getpid()], "b": ["another host", 99999999], "c": "no mark"}
    for name, content in others.items():
        (folder / f"selftest-{name}.running").write_text(json.dumps(content))
    kept = [name for name in files(folder) if name != mark.name]
    assert verdicts.clear_marks() == [mark]
    assert files(folder) == kept
    assert verdicts.clear_marks() == []
    assert child("lives")[1].startswith("True")


def test_no_marks_are_cleared_for_a_played_machine(folder, monkeypatch):
    child("dies")
    monkeypatch.setattr(verdicts, "_is_real", lambda: False)
    assert verdicts.clear_marks() == []
    assert len(files(folder)) == 1


@pytest.mark.parametrize("mark", [[os.uname().nodename, os.getpid()], ["another host", 99999999], "no mark", None])
def test_marks_that_mean_nothing(mark, folder):
    """A process that lives, one of another machine that shares the folder, and what is no mark."""
    backend = stub()
    verdicts.verdict(backend, SIZES)
    file = next(folder.iterdir())
    file.with_suffix(".running").write_text(json.dumps(mark))
    file.unlink()
    verdicts.forget()
    assert verdicts.verdict(backend, SIZES).passed


def test_interruption_leaves_no_mark(folder):
    def rule(*arrays):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verdicts.verdict(stub(rule=rule), SIZES)
    assert files(folder) == []
