"""The programs of benchmarks/ as modules."""

import sys
from pathlib import Path

import mlx.core as mx
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(autouse=True)
def _uncompiled():
    mx.disable_compile()
