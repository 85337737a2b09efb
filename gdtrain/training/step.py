"""One training step: loss and gradients of a batch, gradients summed over an accumulation window, one update."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from gdtrain.data.batches import Batch
from gdtrain.loss import Supervised, supervised_positions, token_loss
from gdtrain.model.dropout import draw_keys

LossAndGradients = Callable[[Batch], tuple[mx.array, Any]]


@dataclass(frozen=True)
class CompilePolicy:
    """Whether mx.compile is applied to the step, and why."""

    compiled: bool
    reason: str


def compile_policy(asked: bool | None) -> CompilePolicy:
    """Resolve the config's `compile` for this device."""
    if asked is not None:
        return CompilePolicy(asked, "asked for")
    if mx.default_device() == mx.cpu:
        # Tiny model, 4 x 96 positions, two cores of a Xeon 2.8 GHz, MLX 0.32.4, 2026-11-30: first step 59 s, later ones
        # 0.72 s compiled and 0.84 s not.
        return CompilePolicy(False, "on a CPU every new batch shape would take up to a minute to compile")
    if mx.metal.is_available():
        return CompilePolicy(False, "not measured on Metal by this project; compile: true turns it on")
    # 4 blocks of the 9B shape on an H200, MLX 0.32.4, 2026-11.
    return CompilePolicy(False, "on CUDA the first compiled step of 4 blocks took 100 s")


def build_step(model: nn.Module, *, compiled: bool) -> LossAndGradients:
    """A function from a batch to the sum of its token losses and the gradients of that sum, as the trainable tree."""

    def loss(parameters: dict, inputs: mx.array, supervised: Supervised) -> mx.array:
        model.update(parameters)
        draw_keys(model)
        return token_loss(model, inputs, supervised)

    loss_and_gradients = mx.value_and_grad(loss)
    if compiled:
        loss_and_gradients = mx.compile(loss_and_gradients, inputs=mx.random.state, outputs=mx.random.state)

    def step(batch: Batch) -> tuple[mx.array, Any]:
        parameters = model.trainable_parameters()
        try:
            return loss_and_gradients(parameters, batch.inputs, supervised_positions(batch))
        finally:
            model.update(parameters)  # tracing left its placeholders there

    return step


@dataclass
class Window:
    """The batches of one optimizer update: every supervised token weighs the same, in whichever batch it stands."""

    gradients: Any = None
    tokens: int = 0
    rows: list[int] = field(default_factory=list)

    def add(self, gradients: Any, batch: Batch) -> None:
        """Add the gradients of a batch's summed loss."""
        self.gradients = (
            gradients if self.gradients is None else tree_map(lambda x, y: x + y, self.gradients, gradients)
        )
        self.tokens += batch.supervised_tokens
        self.rows.extend(batch.rows)

    def mean(self, max_grad_norm: float | None) -> tuple[Any, mx.array]:
        """The mean gradient per supervised token, clipped if asked, and its global L2 norm before clipping, float32.

        The window gives its gradients up: in full fine-tuning they are as large as the model.
        """
        mean = tree_map(lambda g: g / self.tokens, self.gradients)
        self.gradients = None
        clipped, norm = optim.clip_grad_norm(mean, math.inf if max_grad_norm is None else max_grad_norm)
        return (mean if max_grad_norm is None else clipped), norm
