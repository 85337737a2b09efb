"""Against Hugging Face transformers and peft: logits, loss and every LoRA gradient (see tests/golden/README.md)."""

import json
from functools import lru_cache
from pathlib import Path

import mini
import mlx.core as mx
import pytest
from gdkernels.chunked import chunked

from gdtrain.arrays import flat, scalar
from gdtrain.data.batches import Batch
from gdtrain.model.load import find_model, load_model
from gdtrain.model.lora import adapt
from gdtrain.model.swap import swap_linear_attention
from gdtrain.training.recompute import recomputed_blocks
from gdtrain.training.step import build_step

GOLDEN = Path(__file__).parents[1] / "golden"

# Relative L2 per tensor. Both sides are float32 and sum in other orders. Measured: logits 5e-6 to 9e-6, loss 4e-7,
# gradients 5e-5 and, for qwen3_5_moe, 2.4e-4, which is also what mlx-lm's own step loop differs by.
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
@pytest.mark.parametrize("kernel", mini.kernels())
def test_logits(family, kernel):
    model = open_model(family, kernel)
    ids = golden(family)["input_ids"].astype(mx.int32)
    model.eval()
    assert mini.relative_l2(model(ids), golden(family)["logits"]) <= LOGITS
    load_peft(model, family)
    model.train()
    assert mini.relative_l2(model(ids), golden(family)["logits_adapter"]) <= LOGITS
    changed = mini.relative_l2(golden(family)["logits"], golden(family)["logits_adapter"])
    assert changed > 1000 * LOGITS  # the adapter does something


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", mini.FAMILIES)
@pytest.mark.parametrize("kernel", mini.kernels())
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


def without_delta(q, k, v, log_decay, beta, state, chunk_size):
    """Linear attention: the rule without what it reads back before it writes."""
    ratio = v.shape[2] // k.shape[2]
    q, k, g = mx.repeat(q, ratio, axis=2), mx.repeat(k, ratio, axis=2), mx.exp(log_decay)
    ys = []
    for t in range(q.shape[1]):
        write = (beta[:, t, :, None] * v[:, t])[..., None] * k[:, t, :, None]
        state = g[:, t, :, None, None] * state + write
        ys.append((state @ q[:, t, ..., None])[..., 0])
    return mx.stack(ys, axis=1), state


def without_delta_in_the_gradient(*inputs_and_chunk):
    *inputs, C = inputs_and_chunk

    @mx.custom_function
    def rule(*inputs):
        return chunked(*inputs, C)

    @rule.vjp
    def gradient(inputs, cotangents, _):
        return mx.vjp(lambda *xs: without_delta(*xs, C), inputs, cotangents)[1]

    return rule(*inputs)


def no_gradient_across_chunks(q, k, v, log_decay, beta, state, C):
    ys = []
    for at in range(0, q.shape[1], C):
        y, state = chunked(*(x[:, at : at + C] for x in (q, k, v, log_decay, beta)), mx.stop_gradient(state), C)
        ys.append(y)
    return mx.concatenate(ys, axis=1), state


def row_0_for_every_row(q, k, v, log_decay, beta, state, C):
    @mx.custom_function
    def same(*xs):
        return xs

    @same.vjp
    def gradient(xs, cotangents, _):
        return tuple(mx.broadcast_to(c[:1], c.shape) for c in cotangents)

    return chunked(*same(q, k, v, log_decay, beta), state, C)


GRADIENT_FAULTS = (without_delta_in_the_gradient, no_gradient_across_chunks, row_0_for_every_row)


@pytest.mark.parametrize("fault", GRADIENT_FAULTS)
def test_a_wrong_gradient_is_seen(fault, monkeypatch):
    """The loss is right each time: only the gradients tell."""
    mini.replace_rule(monkeypatch, "chunked", fault)
    model = open_model("qwen3_5", "chunked")
    load_peft(model, "qwen3_5")
    batch = golden_batch("qwen3_5")
    loss, gradients = build_step(model.train(), compiled=False)(batch)
    assert scalar(loss) / batch.supervised_tokens == pytest.approx(scalar(golden("qwen3_5")["loss"]), rel=LOSS)
    errors = gradient_errors(model, gradients, "qwen3_5")
    # The last block is attention: its gradients do not pass through the rule. All others must be off.
    blocks = {name for name, error in errors.items() if error > 10 * GRADIENT}
    assert {name for name in errors if ".layers.0." in name or ".layers.1." in name} <= blocks


def test_a_wrong_forward_is_seen(monkeypatch):
    mini.replace_rule(monkeypatch, "chunked", without_delta)
    model = open_model("qwen3_5", "chunked")
    got = model(golden("qwen3_5")["input_ids"].astype(mx.int32))
    assert mini.relative_l2(got, golden("qwen3_5")["logits"]) > 1000 * LOGITS
