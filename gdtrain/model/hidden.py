"""The model up to its final norm."""

import mlx.core as mx
import mlx.nn as nn

from gdtrain.model.documents import Documents
from gdtrain.model.layers import Trainable


def hidden_states(model: nn.Module, inputs: mx.array, segments: mx.array | None = None) -> mx.array:
    """Output of the final norm, (B, T, hidden), for inputs (B, T) int32.

    Args:
        segments: (B, T) int32, the number of the document that each position belongs to; it never decreases along a
            row. Nothing of a document reaches another: each has the hidden states that it has in a row of its own.
            None: a row is one document.

    Raises:
        ValueError: segments of another shape or dtype. RuntimeError: segments for a model that is not swapped.
    """
    if segments is None:
        return model.model(inputs)
    if segments.shape != inputs.shape:
        raise ValueError(f"segments have shape {segments.shape}; accepted: that of the inputs, {inputs.shape}")
    documents = Documents.of(segments)
    x = model.model.embed_tokens(inputs)
    for block in model.layers:
        if not isinstance(block.linear_attn if "linear_attn" in block else block.self_attn, Trainable):
            raise RuntimeError("packed documents take a model on the trainable path: call swap_linear_attention first")
        x = block(x, documents)
    return model.model.norm(x)
