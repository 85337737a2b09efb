"""Quantised bases: LoRA trains on them as on the dequantised weights; what cannot work is refused before it starts."""

import mini
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from layouts import write
from mlx_lm.models.switch_layers import QuantizedSwitchLinear
from quantised import MODES, dequantise, quantised, values, write_quantised

from gdtrain.arrays import flat, scalar
from gdtrain.errors import UserError
from gdtrain.model.describe import describe_checkpoint
from gdtrain.model.load import find_model, load_model
from gdtrain.model.lora import adapt
from gdtrain.model.swap import swap_linear_attention
from gdtrain.training.step import build_step

EXPERTS = ["switch_mlp.up_proj", "switch_mlp.down_proj", "q_proj", "out_proj"]
# Relative L2 of the worst gradient. The same float32 sums in two orders. Measured on a CPU over all families and modes:
# 3e-6 to 1.4e-5, but 2.2e-5 (qwen3_5) and 4.6e-5 (qwen3_next) for mxfp8; DoRA at most 7e-6.
BOUND = 1e-4


def gradients_of(family, mode, *, plain, kind="lora", spoil=None):
    """Loss and gradients by name of one step, all lora_b filled."""
    model, config = quantised(family, **MODES[mode])
    if spoil:
        spoil(model)
    if plain:
        dequantise(model)
    swap_linear_attention(model, config)
    mx.random.seed(0)
    adapt(model, rank=4, fine_tune_type=kind, keys=None if family == "qwen3_5" else EXPERTS)
    mini.fill_adapter(model)
    loss, gradients = build_step(model.train(), compiled=False)(mini.batch(mini.samples(20, 40)))
    return scalar(loss), flat(gradients)


def worst(got, want):
    assert got.keys() == want.keys()
    return max(mini.relative_l2(got[name], want[name]) for name in want)


@pytest.mark.parametrize("mode", MODES)
def test_the_oracle_reads_the_formats(mode):
    """Against mx.dequantize; and rounding to this mode is what changed the weights, not something else."""
    model, _ = quantised(**MODES[mode])
    layer, original = model.layers[0].mlp.up_proj, mini.build(hidden_size=128, intermediate_size=128)[0].layers[0].mlp
    options = {key: getattr(layer, key) for key in ("group_size", "bits", "mode")}
    want = mx.dequantize(layer.weight, layer.scales, layer.get("biases"), **options)
    # mx.dequantize gives bfloat16 for the modes of floats; their values have at most 4 significant bits.
    assert mini.relative_l2(mx.array(values(layer)), want.astype(mx.float32)) <= 1e-7
    rounding = mini.relative_l2(mx.array(values(layer)), original.up_proj.weight)
    assert 0 < rounding < {2: 0.5, 3: 0.25, 4: 0.15, 5: 0.06, 6: 0.03, 8: 0.04}[layer.bits]


@pytest.mark.parametrize("mode", MODES)
def test_gradients_equal_those_on_the_dequantised_weights(mode):
    """C54."""
    loss, gradients = gradients_of("qwen3_5", mode, plain=False)
    plain_loss, plain_gradients = gradients_of("qwen3_5", mode, plain=True)
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert worst(gradients, plain_gradients) <= BOUND


@pytest.mark.parametrize("mode", ["affine 4", "affine 8", "mxfp4", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_gradients_of_quantised_experts(family, mode):
    loss, gradients = gradients_of(family, mode, plain=False)
    plain_loss, plain_gradients = gradients_of(family, mode, plain=True)
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert sum("switch_mlp" in name for name in gradients) == 16
    assert worst(gradients, plain_gradients) <= BOUND


@pytest.mark.parametrize("mode", [mode for mode in MODES if 32 % MODES[mode]["bits"] == 0])
def test_gradients_of_dora(mode):
    _, gradients = gradients_of("qwen3_5", mode, plain=False, kind="dora")
    assert worst(gradients, gradients_of("qwen3_5", mode, plain=True, kind="dora")[1]) <= BOUND


def other_scales(model):
    """The scales of one matrix a little off, as a wrong kernel for a mode would have it."""
    layer = model.layers[3].mlp.up_proj
    layer.scales = layer.scales * 1.01


def test_a_wrong_scale_is_seen():
    _, gradients = gradients_of("qwen3_5", "affine 4", plain=False, spoil=other_scales)
    assert worst(gradients, gradients_of("qwen3_5", "affine 4", plain=True)[1]) > 10 * BOUND


@pytest.mark.parametrize("mode", MODES)
def test_training_leaves_the_base_as_it_is(mode, tmp_path):
    """No byte of it changes in memory or on disk, and none is dequantised for good."""
    folder = write_quantised(tmp_path, **MODES[mode])
    file = folder / "model.safetensors"
    before = file.read_bytes()
    files = find_model(str(folder))
    model = load_model(files)
    swap_linear_attention(model, files.config)
    adapt(model, rank=4, scale=2.0)
    stored = mx.load(str(file))
    step, optimizer = build_step(model.train(), compiled=False), optim.Adam(learning_rate=1e-3)
    losses = []
    for _ in range(3):
        loss, gradients = step(mini.batch(mini.samples(20, 40)))
        optimizer.update(model, gradients)
        mx.eval(loss, model.parameters(), optimizer.state)
        losses.append(scalar(loss))
    assert losses[2] < losses[0]
    assert file.read_bytes() == before
    kept = {n.replace(".linear.", "."): x for n, x in flat(model.parameters()).items() if "lora_" not in n}
    assert kept.keys() == stored.keys()
    assert [n for n in kept if kept[n].dtype != stored[n].dtype or not mx.array_equal(kept[n], stored[n])] == []


@pytest.mark.parametrize("mode", MODES)
def test_bits_mode_and_bytes_are_said(mode, tmp_path):
    options = MODES[mode]
    folder = write_quantised(tmp_path, **options)
    files = find_model(str(folder))
    model = load_model(files)
    stored = mx.load(str(folder / "model.safetensors"))
    matrices = {n.removesuffix(".scales") for n in stored if n.endswith(".scales")}
    inside = sum(x.nbytes for n, x in stored.items() if n.rsplit(".", 1)[0] in matrices)
    total = sum(x.nbytes for x in stored.values())
    text = f"quantised: {len(matrices)} matrices in {options['bits']}-bit {options['mode']}, groups of"
    (line,) = [line for line in describe_checkpoint(files, model) if line.startswith("quantised")]
    sizes = [f"{size / 1e6:.3g} MB" if size >= 1e5 else f"{size / 1e3:.3g} kB" for size in (inside, total)]
    assert line == f"{text} {options['group_size']}; {sizes[0]} of the model's {sizes[1]}"
    assert len(matrices) == 3 * 4 + 4 + 4 * 3  # without in_proj_a


def test_two_quantisations_in_a_checkpoint(tmp_path):
    """mlx-lm's converter keeps routers in 8 bits, and names them in config.json."""
    model, config = quantised("qwen3_5_moe", **MODES["affine 4"])
    gate = mini.build("qwen3_5_moe", hidden_size=128)[0].layers[0].mlp.gate
    for i, block in enumerate(model.layers):
        block.mlp.gate = nn.QuantizedLinear.from_linear(gate, 64, 8)
        config["quantization"][f"language_model.model.layers.{i}.mlp.gate"] = {"group_size": 64, "bits": 8}
    files = find_model(str(write(tmp_path, config, flat(model.parameters()))))
    loaded = load_model(files)
    (line,) = [line for line in describe_checkpoint(files, loaded) if line.startswith("quantised")]
    assert " matrices in 4-bit affine, groups of 32, 4 matrices in 8-bit affine, groups of 64; " in line
    assert isinstance(loaded.layers[0].mlp.switch_mlp.up_proj, QuantizedSwitchLinear)


def test_full_fine_tuning_is_refused():
    model, _ = quantised(**MODES["affine 4"])
    with pytest.raises(UserError, match="full needs unquantised weights"):
        adapt(model, fine_tune_type="full")


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_dora_is_refused_where_mlx_lm_miscounts_the_inputs(bits):
    model, _ = quantised(**MODES[f"affine {bits}"])
    with pytest.raises(UserError, match=f"{bits} bits"):
        adapt(model, fine_tune_type="dora")
