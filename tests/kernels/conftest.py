"""Kernel tests run without mx.compile, which calls a C++ compiler on the CPU; tests of compiled code switch it on. No
test knows the results of another's self-tests."""

import inputs
import mlx.core as mx
import pytest
from gdkernels import dispatch, verdicts
from gdkernels.portable.machine import machine

ABOUT_THE_SELFTEST = {"test_selftest", "test_dispatch", "test_verdicts"}


@pytest.fixture(autouse=True)
def _uncompiled():
    mx.disable_compile()


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    monkeypatch.setattr(dispatch, "_warned", set())
    verdicts.forget()
    yield
    verdicts.forget()


@pytest.fixture(autouse=True)
def _no_selftest(request):
    """On a GPU the tests here are the thorough ones; the self-test would compile kernels for every size."""
    with verdicts.left_out(machine() is not None and request.module.__name__ not in ABOUT_THE_SELFTEST):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """On a GPU, sizes that a kernel refuses are skipped, with its reason."""
    try:
        return (yield)
    except ValueError as error:
        of_a_kernel = item.callspec.params.get("backend") in inputs.GPU_BACKENDS if hasattr(item, "callspec") else False
        if of_a_kernel and machine() is not None and "not available here: refused:" in str(error):
            pytest.skip(str(error))
        raise
