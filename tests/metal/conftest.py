"""Tests of the Metal harness itself. They fail, not skip, where a compiler is missing: a harness that does not run is
no reason to call kernels right, neither in CI nor on a Mac, where they would be launched next."""

import mlx.core as mx
import pytest


@pytest.fixture(autouse=True)
def _on_the_cpu():
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)
