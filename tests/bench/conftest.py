"""Without mx.compile, which calls a C++ compiler on the CPU."""

import mlx.core as mx
import pytest


@pytest.fixture(autouse=True)
def _uncompiled():
    mx.disable_compile()
