"""gdtrain's adapters in peft's form: names, shapes and scale, against files that peft wrote (tests/golden)."""

import json

import bases
import mini
import mlx.core as mx
import numpy as np
import pytest

from gdtrain.errors import UserError
from gdtrain.model.adapter import load_adapter, read_adapter
from gdtrain.model.load import find_model, load_model
from gdtrain.model.peft_export import to_peft, write_peft


def exported(adapter, folder):
    """(tensors, config) of an export, read back."""
    folder.mkdir()
    write_peft(folder, *to_peft(read_adapter(adapter), "some/base"))
    tensors = mx.load(str(folder / "adapter_model.safetensors"))
    return tensors, json.loads((folder / "adapter_config.json").read_text())


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_golden_adapter_comes_back(family, tmp_path):
    """What peft wrote, through mlx-lm's form and out again: the same names and bits. The logits of the form between are
    those of peft."""
    golden = mx.load(str(bases.GOLDEN / family / "golden.safetensors"))
    bases.golden_adapter(family, tmp_path / "mlx")
    model = load_model(find_model(str(bases.GOLDEN / family)))
    load_adapter(model, tmp_path / "mlx")
    got = bases.logits(model, golden["input_ids"].astype(mx.int32))
    assert mini.relative_l2(got, golden["logits_adapter"]) <= 1e-5  # as in test_golden.py

    tensors, config = exported(tmp_path / "mlx", tmp_path / "peft")
    theirs = bases.GOLDEN / family / "peft_adapter"
    want = mx.load(str(theirs / "adapter_model.safetensors"))
    assert tensors.keys() == want.keys()
    assert all(x.dtype == mx.float32 and mx.array_equal(x, want[name]) for name, x in tensors.items())
    theirs_config = json.loads((theirs / "adapter_config.json").read_text())
    same = ("peft_type", "r", "lora_alpha", "use_dora", "use_rslora", "bias", "fan_in_fan_out", "lora_dropout")
    assert {key: config[key] for key in same} == {key: theirs_config[key] for key in same}
    assert config.keys() <= theirs_config.keys()
    assert {target.rsplit(".", 1)[1] for target in config["target_modules"]} == set(theirs_config["target_modules"])
    assert config["base_model_name_or_path"] == "some/base"


def targeted(config, names):
    """Names that peft adapts (peft.tuners.tuners_utils): the ends in target_modules, in blocks of layers_to_transform,
    and those of parameters in target_parameters, in any block. In Qwen3-Next it takes some of the first for others."""
    blocks = config["layers_to_transform"]
    modules = {
        name
        for name in names
        if any(name.endswith(f".{target}") for target in config["target_modules"])
        and (blocks is None or int(name.split(".layers.")[1].split(".")[0]) in blocks)
    }
    if any("in_proj_qkvz" in name for name in names):
        modules = {name for name in modules if not name.endswith(("gate_proj", "up_proj", "down_proj"))}
    parameters = {
        name for name in names for target in config["target_parameters"] if f"{name}.weight".endswith(f".{target}")
    }
    assert not modules & parameters
    return modules | parameters


@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"keys": ["q_proj", "up_proj", "shared_expert_gate"]}])
@pytest.mark.parametrize("family", mini.FAMILIES)
def test_targets_are_the_adapted_projections(family, options, tmp_path):
    """No other module of the model has a name that peft would take for one."""
    if family == "qwen3_5" and "keys" in options:
        options = {"keys": ["q_proj", "up_proj"]}
    base = bases.raw_base(tmp_path / "base", family)
    adapter = bases.make_adapter(base, tmp_path / "adapter", **options)
    tensors, config = exported(adapter, tmp_path / "peft")
    adapted = {name.removeprefix("base_model.model.").rsplit(".", 2)[0] for name in tensors}
    modules = {name.removeprefix("language_model.") for name, _ in load_model(find_model(str(base))).named_modules()}
    blocks = {name for name in modules if ".layers." in name}
    assert targeted(config, blocks) == adapted
    assert len(adapted) * 2 == len(tensors)


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_dora(family, tmp_path):
    base = bases.raw_base(tmp_path / "base", family)
    if family == "qwen3_next":  # with MLPs, peft can do LoRA alone
        adapter = bases.make_adapter(base, tmp_path / "adapter", "dora")
        with pytest.raises(UserError, match="MLPs of Qwen3-Next as bare parameters, and those by LoRA alone"):
            to_peft(read_adapter(adapter), "some/base")
    keys = ["q_proj", "out_proj", "in_proj_qkvz" if family == "qwen3_next" else "up_proj"]
    adapter = bases.make_adapter(base, tmp_path / "adapter", "dora", keys=keys)
    tensors, config = exported(adapter, tmp_path / "peft")
    assert config["use_dora"]
    weights = mx.load(str(adapter / "adapters.safetensors"))
    assert len(tensors) == len(weights)
    magnitudes = [name for name in tensors if name.endswith(".lora_magnitude_vector")]
    assert len(magnitudes) == len(tensors) // 3
    prefix = "" if family == "qwen3_next" else "language_model."
    for name in magnitudes:
        ours = prefix + name.removeprefix("base_model.model.").replace("lora_magnitude_vector", "m")
        assert mx.array_equal(tensors[name], weights[ours])


@pytest.mark.parametrize("scale", [0.3, 2.5, 20.0])
def test_alpha_is_scale_times_rank(scale, tmp_path):
    base = bases.raw_base(tmp_path / "base", "qwen3_5")
    adapter = bases.make_adapter(base, tmp_path / "adapter", scale=scale, rank=5, keys=["q_proj"])
    _, config = exported(adapter, tmp_path / "peft")
    assert config["lora_alpha"] / config["r"] == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("full", {}, "trained in full, and peft adapts by LoRA; use gdtrain fuse"),
        ("lora", {"keys": ["switch_mlp.up_proj"]}, r"switch_mlp\.up_proj\.lora_\w adapts experts, of which"),
        ("lora", {"keys": ["mlp.gate"]}, r"mlp\.gate\.lora_\w adapts a router, of which"),
    ],
)
def test_what_peft_cannot_hold(kind, options, message, tmp_path):
    base = bases.raw_base(tmp_path / "base", "qwen3_5_moe")
    adapter = bases.make_adapter(base, tmp_path / "adapter", kind, **options)
    with pytest.raises(UserError, match=f"--format peft: .*{message}"):
        to_peft(read_adapter(adapter), "some/base")


def test_bfloat16_tensors_are_exported_in_float32(tmp_path):
    base = bases.raw_base(tmp_path / "base", "qwen3_5")
    adapter = bases.make_adapter(base, tmp_path / "adapter", keys=["q_proj"])
    file = str(adapter / "adapters.safetensors")
    narrow = {name: x.astype(mx.bfloat16) for name, x in mx.load(file).items()}
    mx.save_safetensors(file, narrow)
    tensors, _ = exported(adapter, tmp_path / "peft")
    (got,) = (x for name, x in tensors.items() if "lora_A" in name)
    (want,) = (x for name, x in narrow.items() if "lora_a" in name)
    assert got.dtype == mx.float32
    assert np.array_equal(np.array(got), np.array(want.astype(mx.float32)).T)


def test_the_base_is_not_read(tmp_path):
    base = bases.raw_base(tmp_path / "base", "qwen3_5")
    adapter = bases.make_adapter(base, tmp_path / "adapter")
    for file in base.iterdir():
        file.unlink()
    tensors, _ = exported(adapter, tmp_path / "peft")
    assert tensors
