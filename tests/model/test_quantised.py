"""Quantised bases: LoRA trains on them as on the dequantised weights; what cannot work is refused before it starts."""

import mini
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_unflatten

from gdtrain.arrays import flat, scalar
from gdtrain.errors import UserError
from gdtrain.model.lora import adapt
from gdtrain.model.swap import swap_linear_attention
from gdtrain.training.step import build_step

MODES = {
    "affine 4": {"group_size": 32, "bits": 4, "mode": "affine"},
    "affine 8": {"group_size": 32, "bits": 8, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}


def quantised(family="qwen3_5", **options):
    # Widths of 128, so that every group size divides them.
    model, config = mini.build(family, hidden_size=128, intermediate_size=128)
    nn.quantize(model, **options, class_predicate=lambda path, m: isinstance(m, nn.Linear) and "in_proj_a" not in path)
    return model, config


def dequantise(model):
    def plain(module):
        if not isinstance(module, nn.QuantizedLinear):
            return module
        weight = mx.dequantize(
            module.weight,
            module.scales,
            module.get("biases"),
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
        )
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = weight.astype(mx.float32)
        return linear

    leaves = [(name, plain(m)) for name, m in model.named_modules() if isinstance(m, nn.QuantizedLinear)]
    model.update_modules(tree_unflatten(leaves))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_equal_those_on_the_dequantised_weights(mode):
    batch = mini.batch(mini.samples(20, 40))
    results = []
    for plain in (False, True):
        model, config = quantised(**MODES[mode])
        if plain:
            dequantise(model)
        swap_linear_attention(model, config)
        mx.random.seed(0)
        adapt(model, rank=4)
        model.train()
        loss, gradients = build_step(model, compiled=False)(batch)
        results.append((scalar(loss), flat(gradients)))
    (loss, gradients), (plain_loss, plain_gradients) = results
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert gradients.keys() == plain_gradients.keys()
    # Two orders of the same float32 sums.
    worst = {name: mini.relative_l2(gradients[name], plain_gradients[name]) for name in gradients}
    assert max(worst.values()) <= 1e-4, worst


def test_full_fine_tuning_is_refused():
    model, _ = quantised(**MODES["affine 4"])
    with pytest.raises(UserError, match="full needs unquantised weights"):
        adapt(model, fine_tune_type="full")


def test_dora_is_refused_where_mlx_lm_miscounts_the_inputs():
    model, _ = quantised(group_size=32, bits=6, mode="affine")
    with pytest.raises(UserError, match="6 bits"):
        adapt(model, fine_tune_type="dora")
    model, _ = quantised(**MODES["affine 4"])
    adapt(model, fine_tune_type="dora")
