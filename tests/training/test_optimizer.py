"""The configured learning rate is the one that is used."""

from pathlib import Path

import mlx.core as mx
import pytest

from gdtrain.config_file import load_config
from gdtrain.errors import UserError
from gdtrain.training.optimizer import build_optimizer


def config(tmp_path: Path, text: str):
    file = tmp_path / "run.yaml"
    file.write_text(f"model: tiny\ndata: python-stdlib\n{text}")
    return load_config(file)


def moved(optimizer) -> float:
    """How far one update with a gradient of one moves a weight of one."""
    parameters = {"w": mx.ones((4, 4))}
    updated = optimizer.apply_gradients({"w": mx.ones((4, 4))}, parameters)
    return mx.abs(updated["w"] - parameters["w"]).max().item()


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "adafactor", "muon"])
def test_a_larger_rate_moves_further(name, tmp_path):
    """MLX's Adafactor ignores the rate unless told otherwise."""
    small, large = (
        moved(build_optimizer(config(tmp_path, f"optimizer: {name}\nlearning_rate: {rate}\n"))) for rate in (1e-3, 1e-2)
    )
    assert large == pytest.approx(10 * small, rel=0.2)  # weight decay of adamw and muon aside


def test_a_relative_step_has_no_rate(tmp_path):
    relative = "optimizer: adafactor\noptimizer_config: {adafactor: {relative_step: true}}\n"
    build_optimizer(config(tmp_path, relative))
    with pytest.raises(UserError, match="learning_rate: would be ignored"):
        config(tmp_path, relative + "learning_rate: 1e-3\n")
