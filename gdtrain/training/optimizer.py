"""The optimizer and the learning rate over its updates."""

import mlx.optimizers as optim
from mlx_lm.tuner.utils import build_schedule

from gdtrain.config import RunConfig

_OPTIMIZERS = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "sgd": optim.SGD,
    "adafactor": optim.Adafactor,
    "muon": optim.Muon,
}


def build_optimizer(config: RunConfig) -> optim.Optimizer:
    """The configured optimizer; schedules and warm-up are those of mlx-lm and count optimizer updates.

    Adafactor takes the configured learning rate, unless its relative_step is set: MLX's own default ignores the rate.
    """
    rate = config.learning_rate
    if config.lr_schedule is not None:
        rate = build_schedule(config.lr_schedule.model_dump())
    arguments = config.optimizer_arguments
    if config.optimizer == "adafactor":
        arguments = {"relative_step": False, **arguments}
    return _OPTIMIZERS[config.optimizer](learning_rate=rate, **arguments)
