"""For every test: no mx.compile, which calls a C++ compiler on the CPU for every small graph (tests of compiled code
switch it on), nothing known of what other tests' self-tests found, and a folder for caches that is not the user's."""

import mlx.core as mx
import pytest
from gdkernels import dispatch, verdicts
from gdkernels.convolution import selftest as convolution_selftest


@pytest.fixture(autouse=True, scope="session")
def _no_cache_of_the_user(tmp_path_factory):
    """Also in the processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _uncompiled():
    mx.disable_compile()


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    monkeypatch.setattr(dispatch, "_warned", set())
    verdicts.forget()
    convolution_selftest._tested.cache_clear()
    yield
    verdicts.forget()
    convolution_selftest._tested.cache_clear()
