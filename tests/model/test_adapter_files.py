"""C57 beyond tests/model/test_lora.py: adapters of experts, on quantised bases and with alpha, here and in stock
mlx_lm; ranks that do not agree."""

import json

import bases
import mini
import mlx.core as mx
import mlx_lm.utils
import pytest

from gdtrain.config_file import load_config
from gdtrain.errors import UserError
from gdtrain.model.adapter import load_adapter, load_adapter_weights, read_adapter
from gdtrain.model.load import find_model, load_model

EXPERTS = ["switch_mlp.gate_proj", "switch_mlp.up_proj", "switch_mlp.down_proj"]


def assert_stock_agrees(base, adapter):
    """Both run mlx-lm's classes on the same weights, in the same order: the same bits."""
    ours = bases.logits(bases.adapted(base, adapter))
    stock = mlx_lm.utils.load_adapters(load_model(find_model(str(base))), str(adapter))
    assert mx.array_equal(bases.logits(stock), ours)
    assert mini.relative_l2(bases.logits(load_model(find_model(str(base)))), ours) > 1e-3


@pytest.mark.parametrize("layout", ["raw", "mlx"])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_experts(family, layout, tmp_path):
    base = getattr(bases, f"{layout}_base")(tmp_path / "base", family)
    assert_stock_agrees(base, bases.make_adapter(base, tmp_path / "adapter", keys=[*EXPERTS, "q_proj"], num_layers=2))


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("how", ["affine 4", "affine 8", "mxfp4", "nvfp4", "mxfp8"])
def test_quantised_base(how, kind, tmp_path):
    base = bases.mlx_base(tmp_path / "base", quantisation=bases.QUANTISED[how])
    assert_stock_agrees(base, bases.make_adapter(base, tmp_path / "adapter", kind))


def test_quantised_experts(tmp_path):
    base = bases.mlx_base(tmp_path / "base", "qwen3_5_moe", quantisation=bases.QUANTISED["affine 4"])
    assert_stock_agrees(base, bases.make_adapter(base, tmp_path / "adapter", keys=EXPERTS))


@pytest.mark.parametrize(
    ("keys", "scale"),
    [({"alpha": 16}, 4.0), ({"alpha": 16, "rslora": True}, 8.0)],
)
def test_alpha_and_rslora_are_saved_as_a_scale(keys, scale, tmp_path):
    """Stock mlx_lm knows neither: what is on disk is the number that multiplies the product."""
    file = tmp_path / "c.yaml"
    file.write_text(f"model: tiny\ndata: {tmp_path}\nlora_parameters: {json.dumps({'rank': 4, **keys})}\n")
    resolved = load_config(file).lora_parameters.resolved_scale
    assert resolved == pytest.approx(scale)
    base = bases.raw_base(tmp_path / "base", "qwen3_5")
    adapter = bases.make_adapter(base, tmp_path / "adapter", scale=resolved)
    assert json.loads((adapter / "adapter_config.json").read_text())["lora_parameters"]["scale"] == pytest.approx(scale)
    assert_stock_agrees(base, adapter)


@pytest.mark.parametrize("keys", [["q_proj"], EXPERTS])
def test_a_config_of_another_rank_than_the_tensors(keys, tmp_path):
    base = bases.raw_base(tmp_path / "base", "qwen3_5_moe")
    adapter = bases.make_adapter(base, tmp_path / "adapter", keys=keys)
    count = len(read_adapter(adapter).weights)
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text())
    config["lora_parameters"]["rank"] = 8
    file.write_text(json.dumps(config))
    says = rf"adapter_config\.json says rank 8; that of adapters\.safetensors is 4 \({count} tensors\)"
    for use in (read_adapter, lambda folder: load_adapter(load_model(find_model(str(base))), folder)):
        with pytest.raises(UserError, match=says):
            use(adapter)


def test_one_tensor_of_another_rank(tmp_path):
    base = bases.raw_base(tmp_path / "base", "qwen3_5")
    adapter = bases.make_adapter(base, tmp_path / "adapter", keys=["q_proj"])
    file = adapter / "adapters.safetensors"
    weights = mx.load(str(file))
    odd = next(name for name in weights if name.endswith("lora_b"))
    weights[odd] = weights[odd][:3]
    mx.save_safetensors(str(file), weights)
    with pytest.raises(
        UserError, match=r"says rank 4; that of adapters\.safetensors is 3 \(1 tensors\), 4 \(1 tensors\)"
    ):
        read_adapter(adapter)
    model = bases.load_model(find_model(str(base)))
    bases.adapt(model, rank=4, keys=["q_proj"])
    with pytest.raises(UserError, match=r"has shape \(3, 128\); accepted here: \(4, 128\) \(rank 3, not 4\)"):
        load_adapter_weights(model, file)
