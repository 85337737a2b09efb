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
    """The configured optimizer; schedules and warm-up are those of mlx-lm and count optimizer updates."""
    rate = config.learning_rate
    if config.lr_schedule is not None:
        rate = build_schedule(config.lr_schedule.model_dump())
    return _OPTIMIZERS[config.optimizer](learning_rate=rate, **config.optimizer_arguments)
