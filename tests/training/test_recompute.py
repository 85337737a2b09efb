"""Recomputed blocks keep their inputs only, however many there are and whatever trains in them."""

import mini
import mlx.core as mx
import pytest

from gdtrain.model.lora import adapt
from gdtrain.model.swap import swap_linear_attention
from gdtrain.training import recompute
from gdtrain.training.recompute import recomputed_blocks
from gdtrain.training.step import build_step

T = 512
# The input of a block of the mini model, float32.
INPUT_BYTES = 4 * T * 64


def peak(blocks, mode=None):
    """Bytes above what is there before, of loss and gradients of a LoRA that weighs next to nothing."""
    model, config = mini.build(num_hidden_layers=blocks)
    swap_linear_attention(model, config)
    adapt(model, rank=1, keys=["in_proj_qkv", "out_proj", "q_proj", "v_proj"])
    model.train()
    mx.eval(model.parameters())
    step, batch = build_step(model, compiled=False), mini.batch(mini.samples(T + 1))
    peaks = []
    with recomputed_blocks(model.layers, mode != "kept"):
        mx.eval(step(batch))
        for _ in range(4):
            mx.clear_cache()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            mx.eval(step(batch))
            peaks.append(mx.get_peak_memory() - before)
    return min(peaks)  # MLX allocates ahead of the computation, now more and now less


def growth(mode=None):
    """Of the peak with every further block, in inputs of a block."""
    return (peak(12, mode) - peak(4, mode)) / 8 / INPUT_BYTES


def test_peak_grows_by_the_inputs_alone():
    assert growth() < 2


@pytest.mark.parametrize("control", ["kept", "mx.checkpoint"])
def test_negative_controls(control, monkeypatch):
    """Without recomputation, and with MLX's own, which leaves the gradients of parameters to the end."""
    if control == "mx.checkpoint":
        monkeypatch.setattr(recompute, "_recompute", mx.checkpoint)
    assert growth(control) > 2.5
