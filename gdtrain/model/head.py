"""A model's two halves: hidden states of all positions, and logits of those that matter."""

import mlx.core as mx
import mlx.nn as nn


def hidden_states(model: nn.Module, inputs: mx.array) -> mx.array:
    """Output of the final norm, (B, T, hidden), for inputs (B, T) int32."""
    return model.model(inputs)


def project_to_vocabulary(model: nn.Module, hidden: mx.array) -> mx.array:
    """Logits (..., vocabulary) of hidden states (..., hidden), by the head or the tied embedding."""
    language_model = model.language_model if "language_model" in model else model
    if "lm_head" in language_model:
        return language_model.lm_head(hidden)
    return language_model.model.embed_tokens.as_linear(hidden)
