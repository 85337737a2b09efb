"""A file or folder is whole, as it was before, or not there."""

import resource
from contextlib import contextmanager, suppress
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from gdtrain import files
from gdtrain.files import digest, recover_folders, remove_folder, write_folder, write_tensors, write_text

TENSORS = {
    "a": mx.array([1.0, float("nan"), -0.0]),
    "b": mx.arange(6, dtype=mx.bfloat16).reshape(2, 3),
    "step": mx.array(7, dtype=mx.uint64),
    "big": mx.zeros((50_000,)),
}


@contextmanager
def full_disk(size):
    """No file grows beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_tensors_come_back(tmp_path):
    write_tensors(tmp_path / "new" / "x.safetensors", TENSORS)
    found = mx.load(str(tmp_path / "new" / "x.safetensors"))
    assert found.keys() == TENSORS.keys()
    for name, x in TENSORS.items():
        assert found[name].dtype == x.dtype
        np.testing.assert_array_equal(np.array(found[name].astype(mx.float32)), np.array(x.astype(mx.float32)))
    assert names(tmp_path / "new") == ["x.safetensors"]


@pytest.mark.parametrize("size", [0, 100, 5_000, 150_000])
def test_full_disk(size, tmp_path):
    file = tmp_path / "x.safetensors"
    write_tensors(file, {"a": mx.array([1.0])})
    before = digest(file)
    with full_disk(size), pytest.raises((OSError, RuntimeError)):
        write_tensors(file, TENSORS)
    assert (digest(file), names(tmp_path)) == (before, ["x.safetensors"])


@pytest.mark.parametrize("change", ["value", "shape", "missing", "more"])
def test_what_is_read_back_is_compared(change, tmp_path, monkeypatch):
    save = mx.save_safetensors

    def faulty(path, tensors, metadata):
        written = dict(tensors)
        if change == "value":
            written["a"] = mx.array([1.0, float("nan"), 0.0])  # -0 became 0
        elif change == "shape":
            written["b"] = written["b"].reshape(3, 2)
        elif change == "missing":
            del written["step"]
        else:
            written["more"] = mx.array(1)
        save(path, written, metadata)

    monkeypatch.setattr(mx, "save_safetensors", faulty)
    with pytest.raises(OSError, match="reads otherwise"):
        write_tensors(tmp_path / "x.safetensors", TENSORS)
    assert names(tmp_path) == []


def test_text(tmp_path):
    write_text(tmp_path / "x", "one\n")
    with full_disk(3), pytest.raises(OSError, match="File too large"):
        write_text(tmp_path / "x", "two two\n")
    assert (tmp_path / "x").read_text() == "one\n"
    assert names(tmp_path) == ["x"]


def make(contents):
    return lambda folder: (folder / "file").write_text(contents)


def test_folder(tmp_path):
    write_folder(tmp_path / "f", make("one"))
    write_folder(tmp_path / "f", make("two"))

    def fail(folder: Path) -> None:
        make("three")(folder)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        write_folder(tmp_path / "f", fail)
    assert ((tmp_path / "f" / "file").read_text(), names(tmp_path)) == ("two", ["f"])


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_folder_whose_process_ended(renames, tmp_path, monkeypatch):
    """After so many of the renames of `write_folder`: the old folder or the new one is there."""
    write_folder(tmp_path / "f", make("one"))
    rename, done = Path.rename, []

    class Killed(BaseException):
        pass

    def killed(self, to):
        if len(done) == renames:
            raise Killed
        done.append(self)
        return rename(self, to)

    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(files, "recover_folders", lambda *args: None)
        patch.setattr(files.shutil, "rmtree", lambda *args, **keys: None)
        patch.setattr(Path, "rename", killed)
        write_folder(tmp_path / "f", make("two"))
    recover_folders(tmp_path)
    assert names(tmp_path) == ["f"]
    assert (tmp_path / "f" / "file").read_text() == ("two" if renames == 2 else "one")


def test_a_folder_is_not_half_removed(tmp_path, monkeypatch):
    write_folder(tmp_path / "f", make("one"))
    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", lambda *args, **keys: None)
        remove_folder(tmp_path / "f")
    assert names(tmp_path) == ["partial-f"]
    recover_folders(tmp_path)
    assert names(tmp_path) == []
