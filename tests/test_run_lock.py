"""One run at a time in a directory; a disk that knows no locks is said."""

import errno
import fcntl

import pytest

from gdtrain.errors import UserError
from gdtrain.run_lock import check_unlocked, run_lock


def test_a_second_lock_is_refused_and_the_first_is_given_back(tmp_path):
    run = tmp_path / "new" / "run"
    check_unlocked(run)
    assert not run.exists()
    with run_lock(run, pytest.fail):
        with pytest.raises(UserError, match=r"run is in use by a run, process \d+ on "), run_lock(run, pytest.fail):
            pass
        with pytest.raises(UserError, match="in use"):
            check_unlocked(run)
    check_unlocked(run)
    with run_lock(run, pytest.fail):
        pass


def test_a_disk_without_locks(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    said = []
    with run_lock(tmp_path, said.append):
        pass
    assert said == [f"note: {tmp_path} cannot be locked (Operation not supported): a second run would not be noticed"]
    check_unlocked(tmp_path)
