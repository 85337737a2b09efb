"""The head: from hidden states to logits."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from gdtrain.arrays import flat


@dataclass(frozen=True)
class Head:
    """A model's last projection. module: holds its parameters. project: hidden states (..., hidden) to logits
    (..., vocabulary), with the parameters that the module has when it is called."""

    module: nn.Module
    project: Callable[[mx.array], mx.array]

    @property
    def vocabulary(self) -> int:
        """How many logits there are: the rows of the weight, be it dense, quantised or inside an adapter."""
        weights = [x for name, x in flat(self.module.parameters()).items() if name.rsplit(".", 1)[-1] == "weight"]
        return weights[0].shape[0]


def find_head(model: nn.Module) -> Head:
    """The head of its own, or else the tied embedding."""
    language_model = model.language_model if "language_model" in model else model
    if "lm_head" in language_model:
        return Head(language_model.lm_head, language_model.lm_head)
    embedding = language_model.model.embed_tokens
    return Head(embedding, embedding.as_linear)
