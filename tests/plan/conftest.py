"""benchmarks/plan.py as a module, and planners of mini models."""

import json
import sys
from pathlib import Path

import mini
import mlx.core as mx
import pytest

from gdtrain.config import RunConfig
from gdtrain.plan.forecast import Planner

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(autouse=True)
def _uncompiled():
    mx.disable_compile()


@pytest.fixture
def planner(tmp_path):
    """planner(family, model={...}, key=value, ...): of a mini model whose config.json is all there is of it."""

    def make(family="qwen3_5", model=None, **keys):
        config = mini.make_config(family, **(model or {}))
        (tmp_path / "config.json").write_text(json.dumps(config))
        values = {"model": str(tmp_path), "data": "none", "dtype": "float32", "batch_size": 1, "max_seq_length": 257}
        return Planner(RunConfig.model_validate(values | keys))

    return make
