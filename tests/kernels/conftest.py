"""Kernel tests run without mx.compile, which calls a C++ compiler on the CPU; tests of compiled code switch it on."""

import mlx.core as mx
import pytest


@pytest.fixture(autouse=True)
def _uncompiled():
    mx.disable_compile()
