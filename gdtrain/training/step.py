"""One training step: loss and gradients of a batch, gradients summed over an accumulation window, one update.

Loss and gradients are one graph, evaluated at once. Metal allows 499,000 buffers, so their number is a limit of its
own. With the heads of 27B, 64 blocks and T = 4096 about 16,000 arrays exist when the evaluation begins, with the GPU
kernels and with `chunked`; its peak was at most 60 above that, since an array is freed after its last use (allocations
counted on a CPU, 4 to 16 blocks, T = 64 to 1024, MLX 0.32.4, 2026-12-01); on a GPU, what is in flight comes on top. The
graph's operations, which bound it whatever the order, are fewer than 240,000 with the GPU kernels.
tests/training/test_step_memory.py holds the counts to that.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from gdtrain.arrays import scalar
from gdtrain.data.batches import Batch
from gdtrain.loss import Supervised, supervised_positions, token_loss
from gdtrain.model.dropout import draw_keys
from gdtrain.model.head import find_head

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
        # Tiny model, 4 x 96 positions, two cores of a Xeon 2.8 GHz, MLX 0.32.4, 2026-11-30.
        return CompilePolicy(
            False, "measured on two CPU cores: 59 s for the first step of a shape, then 0.72 s instead of 0.84 s"
        )
    if mx.metal.is_available():
        return CompilePolicy(False, "not measured on Metal by this project; compile: true turns it on")
    # The 9B shape on an H200, MLX 0.32.4, 2026-11.
    return CompilePolicy(
        False, "measured on an H200: 100 s for the first step of 4 blocks, 9 s for that of 8 blocks uncompiled"
    )


def build_step(model: nn.Module, *, compiled: bool) -> LossAndGradients:
    """A function from a batch to the sum of its token losses and the gradients of that sum, as the trainable tree."""

    vocabulary = find_head(model).vocabulary

    def loss(parameters: dict, inputs: mx.array, supervised: Supervised, segments: mx.array | None) -> mx.array:
        model.update(parameters)
        draw_keys(model)
        return token_loss(model, inputs, supervised, segments)

    loss_and_gradients = mx.value_and_grad(loss)
    if compiled:
        loss_and_gradients = mx.compile(loss_and_gradients, inputs=mx.random.state, outputs=mx.random.state)

    def step(batch: Batch) -> tuple[mx.array, Any]:
        supervised = supervised_positions(batch, vocabulary)
        parameters = model.trainable_parameters()
        try:
            return loss_and_gradients(parameters, batch.inputs, supervised, batch.segments)
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


def accumulate(step: LossAndGradients, batch: Batch, window: Window) -> float:
    """Add a batch to the window; returns its summed loss, and leaves no other reference to its gradients."""
    loss, gradients = step(batch)
    window.add(gradients, batch)
    mx.eval(loss, window.gradients)
    return scalar(loss)
