"""Where kernel tests run, and with which plans."""

import re

import mlx.core as mx
import pytest
from fused_plans import M4
from gdkernels import verdicts
from gdkernels.fused import plan
from gdkernels.portable.machine import machine

ABOUT_THE_SELFTEST = {"test_selftest", "test_dispatch", "test_verdicts"}


@pytest.fixture(autouse=True)
def _no_selftest(request):
    """On a GPU the tests here are the thorough ones; the self-test would compile kernels for every size."""
    with verdicts.left_out(machine() is not None and request.module.__name__ not in ABOUT_THE_SELFTEST):
        yield


@pytest.fixture
def on_a_cpu():
    """For tests that play a GPU on a CPU, or speak of a CPU: the same on a machine that has one."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture
def on(monkeypatch):
    """A function that chooses the Apple generation and whether there are heads enough to fill a GPU."""

    def choose(generation, busy=False):
        monkeypatch.setattr(plan, "apple_generation", lambda: generation)
        monkeypatch.setattr(plan, "_SWEEP_GROUPS", dict.fromkeys(("metal", "cuda"), 1 if busy else 128))
        plan.plan.cache_clear()

    choose(M4)
    yield choose
    plan.plan.cache_clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """On a GPU, head dimensions that `recurrent` cannot take are skipped; any other refusal is a failure."""
    try:
        return (yield)
    except ValueError as error:
        refused = re.search(r"'recurrent' is not available here: refused: (Dk|Dv) = (\d+) is not accepted", str(error))
        if refused and int(refused[2]) % {"Dk": 32, "Dv": 4}[refused[1]]:
            pytest.skip(str(error))
        raise
