"""Parameters and bytes from a config.json against instantiated models."""

import json

import mini
import mlx.nn as nn
import pytest

from gdtrain.arrays import flat
from gdtrain.errors import UserError
from gdtrain.plan.model_config import ModelConfig, find_model_config
from gdtrain.plan.quantisation import Storage
from gdtrain.plan.sizes import read_sizes, weight_bytes

SHAPES = {
    "mini": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "interval": {"num_hidden_layers": 5, "full_attention_interval": 2},
}


def read(file, config, dtype="float32"):
    """(ModelConfig, Storage) of a config.json written into `file`."""
    file.write_text(json.dumps(config))
    found = find_model_config(str(file))
    return found, Storage(found, dtype)


def real_count(model):
    return sum(x.size for x in flat(model.parameters()).values())


def real_bytes(model):
    return sum(x.nbytes for x in flat(model.parameters()).values())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", mini.FAMILIES)
def test_parameters_and_bytes(family, shape, tmp_path):
    model, config = mini.build(family, dtype="bfloat16", **SHAPES[shape])
    found, storage = read(tmp_path / "c.json", config, "bfloat16")
    sizes = read_sizes(found, storage)
    assert sizes.parameters == real_count(model)
    assert sum(weight_bytes(sizes, storage).values()) == real_bytes(model)


def test_some_blocks_without_experts(tmp_path):
    model, config = mini.build("qwen3_next", mlp_only_layers=[1], decoder_sparse_step=2, num_hidden_layers=6)
    found, storage = read(tmp_path / "c.json", config)
    assert read_sizes(found, storage).parameters == real_count(model)
    assert sum(weight_bytes(read_sizes(found, storage), storage).values()) == real_bytes(model)


MODES = {
    "affine 4": {"group_size": 32, "bits": 4, "mode": "affine"},
    "affine 8": {"group_size": 64, "bits": 8, "mode": "affine"},
    "affine 6": {"group_size": 64, "bits": 6, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}


@pytest.mark.parametrize("family", mini.FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_quantised(mode, family, tmp_path):
    """As mlx-lm's converter does it: what divides into groups, routers by their own entry, one layer left out."""
    model, config = mini.build(family, dtype="bfloat16", hidden_size=128, intermediate_size=96)
    router = {"group_size": 64, "bits": 8}
    written = dict(MODES[mode])

    def how(path, module):
        if not hasattr(module, "to_quantized"):
            return False
        if path.endswith("layers.0.linear_attn.out_proj"):
            written[path] = False
            return False
        if path.endswith(("mlp.gate", "shared_expert_gate")):
            written[path] = router
            return dict(router)
        return module.weight.shape[-1] % MODES[mode]["group_size"] == 0

    nn.quantize(model, **MODES[mode], class_predicate=how)
    found, storage = read(tmp_path / "c.json", config | {"quantization": written}, "bfloat16")
    sizes = read_sizes(found, storage)
    assert sum(weight_bytes(sizes, storage).values()) == real_bytes(model)
    assert f"{MODES[mode]['bits']}-bit {MODES[mode]['mode']}" in weight_bytes(sizes, storage)


def test_negative_control(tmp_path):
    """A block more, or weights that are not quantised, and the numbers are others."""
    model, _ = mini.build()
    found, storage = read(tmp_path / "c.json", mini.make_config(num_hidden_layers=5))
    assert read_sizes(found, storage).parameters > real_count(model)
    assert sum(weight_bytes(read_sizes(found, storage), storage).values()) > real_bytes(model)


def test_dtype(tmp_path):
    config = mini.make_config()
    assert Storage(read(tmp_path / "c.json", config)[0], None).assumed
    config["text_config"]["dtype"] = "bfloat16"
    storage = Storage(read(tmp_path / "c.json", config)[0], None)
    assert (storage.dtype, storage.assumed) == ("bfloat16", False)
    assert Storage(read(tmp_path / "c.json", config | {"torch_dtype": "float16"})[0], "float32").dtype == "float32"
    config["text_config"]["dtype"] = "float8_e4m3fn"
    with pytest.raises(UserError, match="dtype is 'float8_e4m3fn'; a forecast can be made for float32, bfloat16"):
        read(tmp_path / "c.json", config, None)


FAULTS = {
    "no size": ({"hidden_size": None}, "has no hidden_size, without which there is no forecast"),
    "no number": ({"vocab_size": "many"}, "vocab_size is 'many'; accepted: a whole number"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_config_that_lacks_a_size(fault, tmp_path):
    change, message = FAULTS[fault]
    config = mini.make_config()
    config["text_config"].update(change)
    with pytest.raises(UserError, match=message):
        read_sizes(*read(tmp_path / "c.json", config))


QUANTISATIONS = {
    "foreign": ({"quantization_config": {"quant_method": "fp8"}}, "is quantised by 'fp8', and does not say"),
    "mode": ({"quantization": {"mode": "int3"}}, "quantization has mode 'int3'; accepted: affine, mxfp4"),
    "bits": ({"quantization": {"bits": "four"}}, "has bits 'four'"),
}


@pytest.mark.parametrize("fault", QUANTISATIONS)
def test_quantisation_that_is_not_known(fault, tmp_path):
    change, message = QUANTISATIONS[fault]
    with pytest.raises(UserError, match=message):
        read(tmp_path / "c.json", mini.make_config() | change)


def test_found(tmp_path, monkeypatch):
    """tiny, a folder with a config.json alone, and the file itself."""
    (tmp_path / "config.json").write_text(json.dumps(mini.make_config()))
    for name in (tmp_path, tmp_path / "config.json"):
        assert find_model_config(str(name)).file == tmp_path / "config.json"
    assert isinstance(find_model_config("tiny"), ModelConfig)
    import huggingface_hub

    cached = {("owner/model", "config.json"): str(tmp_path / "config.json")}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *key: cached.get(key))
    assert find_model_config("owner/model").family == "qwen3_5"
    with pytest.raises(UserError, match=r"owner/other is no folder here, and its config.json is not in the cache"):
        find_model_config("owner/other")


def test_checkpoint_of_another_name(tmp_path):
    """As finetune reads it: the text model alone, or a later name with the same keys."""
    config = mini.make_config()
    for changed in (config["text_config"], config | {"model_type": "qwen9"}):
        assert read(tmp_path / "c.json", changed)[0].family == "qwen3_5"


def test_not_found(tmp_path):
    with pytest.raises(UserError, match=r"there is no \./none; accepted: a folder with a config.json"):
        find_model_config("./none")
    with pytest.raises(UserError, match=r"has no config\.json"):
        find_model_config(str(tmp_path))
    file = tmp_path / "config.json"
    for text, message in (("{", "not valid JSON"), ("[]", "not the config.json of a model")):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            find_model_config(str(tmp_path))
    file.write_text('{"model_type": "llama"}')
    with pytest.raises(
        UserError, match="is of type 'llama'; a forecast can be made for qwen3_5, qwen3_5_moe, qwen3_next"
    ):
        find_model_config(str(tmp_path))
