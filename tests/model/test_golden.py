"""Against Hugging Face transformers and peft: logits, loss and every LoRA gradient (see tests/golden/README.md)."""

import json
from functools import lru_cache
from pathlib import Path

import gdkernels
import mlx.core as mx
import mlx.nn as nn
import mini
import pytest
from gdkernels.chunked import chunked

from gdtrain.arrays import flat, scalar
from gdtrain.data.batches import Batch
from gdtrain.model.load import find_model, load_model
from gdtrain.model.lora import adapt
from gdtrain.model.swap import swap_linear_attention
from gdtrain.training.loss import supervised_positions, token_loss
from gdtrain.training.recompute import recomputed_blocks
from gdtrain.training.step import build_step

GOLDEN = Path(__file__).parents[1] / "golden"

# Relative L2 per tensor. Both sides are float32 and sum in other orders: logits differ by 5e-7 to 3e-6. Gradients pass
# the rule's 150 steps, whose decays here go down to e^-8 a token: 2.4e-4 is the worst of mlx-lm's own step loop.
LOGITS, LOSS, GRADIENT = 1e-5, 1e-6, 3e-4


@lru_cache
def golden(family):
    return mx.load(str(GOLDEN / family / "golden.safetensors"))


def open_model(family, kernel):
    files = find_model(str(GOLDEN / family))
    model = load_model(files)
    assert swap_linear_attention(model, files.config, kernel=kernel).layers == 3
    return model


def load_peft(model, family):
    """Adapt as the peft folder says and put its weights in place."""
    folder = GOLDEN / family / "peft_adapter"
    config = json.loads((folder / "adapter_config.json").read_text())
    adapt(model, rank=config["r"], scale=config["lora_alpha"] / config["r"], keys=config["target_modules"])
    weights = mx.load(str(folder / "adapter_model.safetensors"))
    renamed = {mlx_name(model, name.removeprefix("base_model.model.")): x.T for name, x in weights.items()}
    assert renamed.keys() == flat(model.trainable_parameters()).keys()
    model.load_weights(list(renamed.items()), strict=False)


def mlx_name(model, name):
    """peft's name of an adapter tensor in the tree of the mlx-lm model."""
    name = name.replace("lora_A.weight", "lora_a").replace("lora_B.weight", "lora_b")
    return f"language_model.{name}" if "language_model" in model else name


def golden_batch(family):
    ids = golden(family)["input_ids"].astype(mx.int32)
    mask = golden(family)["label_mask"].astype(mx.bool_)
    return Batch(ids[:, :-1], ids[:, 1:], mask, int(mask.sum().item()), (0, 1), 0.0)


def gradient_errors(model, gradients, family):
    """Relative L2 of every gradient of the mean loss; both sides must have the same names."""
    count = golden_batch(family).supervised_tokens
    got = {name: g / count for name, g in flat(gradients).items()}
    want = {
        mlx_name(model, name.removeprefix("grad.")): g.T for name, g in golden(family).items() if name[:5] == "grad."
    }
    assert got.keys() == want.keys()
    return {name: mini.relative_l2(got[name], want[name]) for name in want}


@pytest.mark.parametrize("family", mini.FAMILIES)
@pytest.mark.parametrize("kernel", gdkernels.BACKENDS)
def test_logits(family, kernel):
    model = open_model(family, kernel)
    ids = golden(family)["input_ids"].astype(mx.int32)
    for mode in (True, False):
        model.train(mode)
        assert mini.relative_l2(model(ids), golden(family)["logits"]) <= LOGITS
    load_peft(model, family)
    for mode in (True, False):
        model.train(mode)
        assert mini.relative_l2(model(ids), golden(family)["logits_adapter"]) <= LOGITS
    changed = mini.relative_l2(golden(family)["logits"], golden(family)["logits_adapter"])
    assert changed > 1000 * LOGITS  # the adapter does something


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", mini.FAMILIES)
@pytest.mark.parametrize("kernel", gdkernels.BACKENDS)
def test_loss_and_gradients(family, kernel, recompute):
    model = open_model(family, kernel)
    load_peft(model, family)
    batch = golden_batch(family)
    model.train()
    with recomputed_blocks(model.layers, recompute):
        loss, gradients = build_step(model, compiled=False)(batch)
        mx.eval(loss, gradients)
    want = scalar(golden(family)["loss"])
    assert scalar(loss) / batch.supervised_tokens == pytest.approx(want, rel=LOSS)
    errors = gradient_errors(model, gradients, family)
    assert max(errors.values()) <= GRADIENT, errors
    model.eval()
    alone = token_loss(model, batch.inputs, supervised_positions(batch))
    assert scalar(alone) / batch.supervised_tokens == pytest.approx(want, rel=LOSS)
