"""Checkpoints to fuse into, in the layouts that bases come in, and adapters for them."""

import json
import shutil
from pathlib import Path

import mini
import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import numpy as np
from mlx_lm.models.switch_layers import SwitchLinear

from gdtrain.arrays import flat
from gdtrain.model.adapter import load_adapter, save_adapter
from gdtrain.model.load import find_model, load_model
from gdtrain.model.lora import adapt

GOLDEN = Path(__file__).parents[1] / "golden"
TOKENS = mx.array([[5, 17, 250, 3, 99, 4, 31, 8, 8, 120]])

QUANTISED = {
    "affine 2": {"group_size": 32, "bits": 2, "mode": "affine"},
    "affine 4": {"group_size": 64, "bits": 4, "mode": "affine"},
    "affine 6": {"group_size": 32, "bits": 6, "mode": "affine"},
    "affine 8": {"group_size": 64, "bits": 8, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}


def raw_base(folder, family, *, dtype="float32", shards=1):
    """The golden checkpoint of a family: Hub layout, zero-centred norms, with vision and mtp tensors."""
    folder.mkdir(parents=True)
    shutil.copyfile(GOLDEN / family / "config.json", folder / "config.json")
    tensors = mx.load(str(GOLDEN / family / "model.safetensors"))
    tensors = {n: x if n.endswith("A_log") else x.astype(getattr(mx, dtype)) for n, x in sorted(tensors.items())}
    write_shards(folder, tensors, shards, {"format": "pt"})
    return folder


def write_shards(folder, tensors, shards, metadata):
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata=metadata)
        return
    weight_map = {}
    for i in range(shards):  # neighbours go to different files: so do a packed weight and its scales
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[i::shards])
        mx.save_safetensors(str(folder / name), part, metadata=metadata)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": sum(x.nbytes for x in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def mlx_base(folder, family="qwen3_5", *, quantisation=None, shards=1, dtype="float32", **config_overrides):
    """A mini checkpoint in MLX's layout, with vision and mtp tensors; quantised as mlx-lm saves it, embedding, head and
    experts too, with a layer of other bits."""
    experts = {} if family == "qwen3_5" else {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    sizes = {"hidden_size": 128, "intermediate_size": 128, **experts, **config_overrides}
    model, config = mini.build(family, dtype=dtype, **sizes)
    if quantisation is not None:
        odd = {"group_size": 32, "bits": 8, "mode": "affine"}
        config["quantization"] = dict(quantisation)

        def how(path, module):
            if not isinstance(module, nn.Linear | nn.Embedding | SwitchLinear) or path.endswith("in_proj_a"):
                return False
            if path.endswith("2.linear_attn.out_proj"):
                config["quantization"][path] = odd
                return odd
            return True

        nn.quantize(model, **quantisation, class_predicate=how)
        config["quantization_config"] = config["quantization"]
    tensors = flat(model.parameters())
    tensors |= {"vision_tower.patch_embed.weight": mx.ones((4, 4)), "mtp.norm.weight": mx.full((64,), 0.25)}
    folder.mkdir(parents=True)
    write_shards(folder, dict(sorted(tensors.items())), shards, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_adapter(base, folder, kind="lora", **options):
    """A moved adapter on disk."""
    model = load_model(find_model(str(base)), dtype=options.pop("dtype", None))
    options = (
        options if kind == "full" else {"rank": 4, "scale": 2.3, **options}
    )  # no power of two: sums in another order show
    adaptation = adapt(model, fine_tune_type=kind, **options)
    rng = np.random.default_rng(0)
    moved = [
        (name, x + mx.array(0.05 * rng.standard_normal(x.shape), mx.float32).astype(x.dtype))
        for name, x in flat(model.trainable_parameters()).items()
    ]
    save_adapter(folder, dict(moved), adaptation, str(base))
    return folder


def adapted(base, adapter, dtype=None):
    """The base with the adapter beside it."""
    model = load_model(find_model(str(base)), dtype=dtype)
    load_adapter(model, adapter)
    return model.eval()


def stock(folder):
    """What stock mlx-lm makes of a folder."""
    return mlx_lm.utils.load_model(folder)[0]


def logits(model, tokens=TOKENS):
    """In float32, as generation has them: with a cache, where stock mlx-lm and the model of a run do the same."""
    return model.eval()(tokens, cache=model.make_cache()).astype(mx.float32)


def golden_adapter(family, folder, **config_changes):
    """The golden peft adapter of a family in mlx-lm's form."""
    source = GOLDEN / family / "peft_adapter"
    config = json.loads((source / "adapter_config.json").read_text())
    lora = {"rank": config["r"], "scale": config["lora_alpha"] / config["r"], "keys": config["target_modules"]}
    model = load_model(find_model(str(GOLDEN / family)))
    adaptation = adapt(model, **lora, **config_changes)
    prefix = "language_model." if "language_model" in model else ""
    weights = {}
    for name, x in mx.load(str(source / "adapter_model.safetensors")).items():
        name = name.removeprefix("base_model.model.").replace("lora_A.weight", "lora_a")
        weights[prefix + name.replace("lora_B.weight", "lora_b")] = x.T
    assert weights.keys() == flat(model.trainable_parameters()).keys()
    save_adapter(folder, weights, adaptation, str(GOLDEN / family))
    return folder
