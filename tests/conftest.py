"""For every test: no mx.compile, which calls a C++ compiler on the CPU for every small graph (tests of compiled code
switch it on), and nothing known of what other tests' self-tests found."""

import mlx.core as mx
import pytest
from gdkernels import dispatch, verdicts
from gdkernels.convolution import selftest as convolution_selftest


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
