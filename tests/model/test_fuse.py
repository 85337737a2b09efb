"""C63: fused logits are those of the adapter, what it does not touch is carried over, config and tensors agree."""

import json
import os
import shutil

import bases
import mini
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map_with_path, tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear
from safetensors import safe_open

from gdtrain.errors import UserError
from gdtrain.model import merge
from gdtrain.model.adapter import load_adapter
from gdtrain.model.fuse import plan_fusion
from gdtrain.model.load import find_model, load_model
from gdtrain.output_folder import new_folder

# Relative L2 of logits. GOLDEN: as in test_golden.py. EXACT: the same float32 sums in another order, measured 2e-6 to
# 2e-5. ROUNDED: where those are rounded afterwards, and a weight in 30,000 falls onto the next step, which is not the
# same in every run; measured 1e-6 to 4.3e-3. A wrong merge is at 5e-2 and more.
GOLDEN, EXACT, ROUNDED = 1e-5, 5e-5, 1e-2
EXPERTS = ["switch_mlp.gate_proj", "switch_mlp.up_proj", "switch_mlp.down_proj"]


def fuse(base, adapter, output, *, dtype=None, dequantize=False):
    files = find_model(str(base))
    model = load_model(files, dtype=dtype)
    fusion = plan_fusion(files, model, load_adapter(model, adapter), dequantize=dequantize)
    with new_folder("--output", output, fusion.size) as folder:
        fusion.write(folder, lambda size: None)
    return fusion


def stored(folder):
    """Every tensor of a checkpoint: (dtype, shape, bytes), read by the library that defines the format."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        with safe_open(file, "np") as reader:  # refuses overlaps, gaps and wrong sizes
            assert set(reader.keys()) == header.keys() - {"__metadata__"}
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                found[name] = (file.name, entry["dtype"], tuple(entry["shape"]), raw[begin:end])
    return found


def metadata(folder):
    return [safe_open(file, "np").metadata() for file in sorted(folder.glob("*.safetensors"))]


def assert_carried_over(base, output, fusion):
    """The same tensors in the same files, and only as many changed as the fusion says; returns their names."""
    before, after = stored(base), stored(output)
    assert {n: x[:3] for n, x in before.items()} == {n: x[:3] for n, x in after.items()}
    changed = {name for name in before if before[name] != after[name]}
    assert len(before) - len(changed) >= fusion.kept > 0
    assert metadata(base) == metadata(output)
    for file in base.iterdir():
        if file.suffix == ".json":
            assert (output / file.name).read_bytes() == file.read_bytes()
    return changed


def fused_by_layers(base, adapter, dtype=None):
    """The oracle: the model as loaded, float32, with every layer replaced by one that has the merged weight: that of
    mlx-lm's own fuse() where the layer is dense, else packed again by MLX (fuse() rounds to bfloat16 before it)."""
    model = bases.adapted(base, adapter, dtype)

    def fused(layer):
        inner = layer.linear
        if "scales" not in inner:
            return layer.fuse()
        weight = mx.dequantize(
            inner.weight, inner.scales, inner.get("biases"), inner.group_size, inner.bits, inner.mode, dtype=mx.float32
        )
        if isinstance(layer, LoRASwitchLinear):
            dense = SwitchLinear(weight.shape[2], weight.shape[1], weight.shape[0], bias=False)
            dense.weight = weight + layer.scale * (layer.lora_b @ layer.lora_a)
        else:
            dense = nn.Linear(*weight.shape[::-1], bias=False)
            dense.weight = weight + layer.scale * (layer.lora_b.T @ layer.lora_a.T)
        return dense.to_quantized(inner.group_size, inner.bits, inner.mode)

    layers = [(name, fused(m)) for name, m in model.named_modules() if hasattr(m, "fuse")]
    assert layers
    model.update_modules(tree_unflatten(layers))
    return model


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
@pytest.mark.parametrize("family", mini.FAMILIES)
def test_raw_base(family, kind, tmp_path):
    base = bases.raw_base(tmp_path / "base", family)
    adapter = bases.make_adapter(base, tmp_path / "adapter", kind)
    fusion = fuse(base, adapter, tmp_path / "fused")
    changed = assert_carried_over(base, tmp_path / "fused", fusion)
    assert len(changed) == fusion.merged
    assert not [name for name in changed if "visual" in name or "mtp" in name or "embed_tokens" in name]
    if kind != "full":
        assert not [name for name in changed if "norm" in name or "conv1d" in name or "A_log" in name]
    want = bases.logits(bases.adapted(base, adapter))
    assert mini.relative_l2(bases.logits(bases.stock(base)), want) > 0.05  # the adapter does something
    assert mini.relative_l2(bases.logits(bases.stock(tmp_path / "fused")), want) <= EXACT


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_golden_adapter(family, tmp_path):
    """The logits that transformers and peft give, through a fused model in stock mlx-lm."""
    golden = mx.load(str(bases.GOLDEN / family / "golden.safetensors"))
    base, adapter = bases.raw_base(tmp_path / "base", family), tmp_path / "adapter"
    bases.golden_adapter(family, adapter)
    fuse(base, adapter, tmp_path / "fused")
    got = bases.logits(bases.stock(tmp_path / "fused"), golden["input_ids"].astype(mx.int32))
    assert mini.relative_l2(got, golden["logits_adapter"]) <= GOLDEN


def rounded(path, x):
    return x if path.endswith("A_log") else x.astype(mx.bfloat16).astype(mx.float32)


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
@pytest.mark.parametrize("family", mini.FAMILIES)
def test_bfloat16_base_in_shards(family, kind, tmp_path):
    base = bases.raw_base(tmp_path / "base", family, dtype="bfloat16", shards=3)
    adapter = bases.make_adapter(base, tmp_path / "adapter", kind)
    fusion = fuse(base, adapter, tmp_path / "fused")
    assert_carried_over(base, tmp_path / "fused", fusion)
    assert sum(file.stat().st_size for file in base.iterdir()) == pytest.approx(
        sum(file.stat().st_size for file in (tmp_path / "fused").iterdir()), rel=1e-2
    )
    got = load_model(find_model(str(tmp_path / "fused")), dtype="float32")
    if kind == "full":
        want = bases.adapted(base, adapter, "float32")
    else:
        want = fused_by_layers(base, adapter, "float32")
        want.update(tree_map_with_path(rounded, want.parameters()))
    assert mini.relative_l2(bases.logits(got), bases.logits(want)) <= ROUNDED
    rounding, change = fusion.losses.total()
    assert 0 <= rounding <= 2e-3 < change


def test_full_keeps_what_was_not_trained(tmp_path):
    """1 + w has fewer digits than w: a norm that was not moved must not be rounded."""
    base = bases.raw_base(tmp_path / "base", "qwen3_5", dtype="bfloat16")
    adapter = bases.make_adapter(base, tmp_path / "adapter", "full", num_layers=1)
    tensors = mx.load(str(adapter / "adapters.safetensors"))
    untouched = [name for name in tensors if "norm" in name]
    model = load_model(find_model(str(base)))
    tensors |= {n: x for n, x in bases.flat(model.parameters()).items() if n in untouched}
    mx.save_safetensors(str(adapter / "adapters.safetensors"), tensors)
    fuse(base, adapter, tmp_path / "fused")
    before, after = stored(base), stored(tmp_path / "fused")
    changed = {name for name in before if before[name] != after[name]}
    assert len(changed) == len(tensors) - len(untouched)
    assert all(".layers.3." in name and "norm" not in name for name in changed)


@pytest.mark.parametrize("name", ["input_layernorm.weight", "conv1d.weight", "self_attn.q_norm.weight"])
def test_full_stores_norms_and_kernels_as_the_source_does(name, tmp_path):
    """Public faults: norms stored with 1 or 2 added, kernels with swapped axes."""
    base = bases.raw_base(tmp_path / "base", "qwen3_5")
    adapter = bases.make_adapter(base, tmp_path / "adapter", "full")
    fuse(base, adapter, tmp_path / "fused")
    fused = mx.load(str(tmp_path / "fused" / "model.safetensors"))
    trained = mx.load(str(adapter / "adapters.safetensors"))
    seen = 0
    for full_name, x in trained.items():
        if full_name.endswith(name):
            want = np.array(x).transpose(0, 2, 1) if "conv1d" in name else np.array(x) - 1
            got = np.array(fused[full_name.replace("language_model.model.", "model.language_model.")])
            np.testing.assert_allclose(got, want, atol=1e-6)
            seen += 1
    assert seen


@pytest.mark.parametrize("layout", ["raw", "mlx"])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_experts(family, layout, tmp_path):
    """Fused in halves, one tensor each, or stacked; gate without up too."""
    base = getattr(bases, f"{layout}_base")(tmp_path / "base", family)
    for keys in (EXPERTS, EXPERTS[:1], ["switch_mlp.up_proj", "q_proj"]):
        adapter = bases.make_adapter(base, tmp_path / "adapter", keys=keys)
        fusion = fuse(base, adapter, tmp_path / "fused")
        assert len(assert_carried_over(base, tmp_path / "fused", fusion)) == fusion.merged
        want = bases.logits(bases.adapted(base, adapter))
        assert mini.relative_l2(bases.logits(load_model(find_model(str(base)))), want) > 1e-3
        # Stock mlx-lm does not read Qwen3-Next with mtp tensors in its own layout.
        open_fused = (
            load_model if (family, layout) == ("qwen3_next", "mlx") else lambda files: bases.stock(files.folder)
        )
        assert mini.relative_l2(bases.logits(open_fused(find_model(str(tmp_path / "fused")))), want) <= EXACT
        shutil.rmtree(tmp_path / "fused")


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_tied_mlx_base_and_the_last_blocks(kind, tmp_path):
    base = bases.mlx_base(tmp_path / "base", tie_word_embeddings=True)
    assert not [name for name in stored(base) if "lm_head" in name]
    adapter = bases.make_adapter(base, tmp_path / "adapter", kind, num_layers=2)
    changed = assert_carried_over(base, tmp_path / "fused", fuse(base, adapter, tmp_path / "fused"))
    assert {name.split("layers.")[1][0] for name in changed} == {"2", "3"}
    want = bases.logits(bases.adapted(base, adapter))
    assert mini.relative_l2(bases.logits(load_model(find_model(str(tmp_path / "fused")))), want) <= EXACT


@pytest.mark.parametrize("how", bases.QUANTISED)
def test_quantised_base(how, tmp_path):
    """Packed again as mlx-lm would pack it; a packed weight and its scales lie in different files."""
    base = bases.mlx_base(tmp_path / "base", quantisation=bases.QUANTISED[how], shards=2)
    adapter = bases.make_adapter(base, tmp_path / "adapter")
    fusion = fuse(base, adapter, tmp_path / "fused")
    changed = assert_carried_over(base, tmp_path / "fused", fusion)
    assert {name.rsplit(".", 1)[0] for name in changed} <= {name.rsplit(".", 1)[0] for name in fusion.losses.change}
    got, want = load_model(find_model(str(tmp_path / "fused"))), fused_by_layers(base, adapter)
    kinds = [{type(m).__name__ for _, m in model.named_modules()} for model in (got, want)]
    assert kinds[0] == kinds[1]
    assert mini.relative_l2(bases.logits(got), bases.logits(want)) <= ROUNDED
    exact = bases.logits(bases.adapted(base, adapter))
    cost = mini.relative_l2(bases.logits(got), exact)
    rounding, change = fusion.losses.total()
    assert rounding < change or bases.QUANTISED[how]["bits"] < 8
    assert rounding / 10 < cost  # what is said is no less than the truth by much
    assert str(bases.QUANTISED[how]["group_size"]) in " ".join(fusion.packings)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("how", ["affine 4", "affine 8", "mxfp4", "nvfp4"])
def test_dequantised(how, kind, tmp_path):
    """Public faults: a config that still says quantised, a NameError on the way."""
    base = bases.mlx_base(tmp_path / "base", quantisation=bases.QUANTISED[how], shards=2)
    adapter = bases.make_adapter(base, tmp_path / "adapter", kind)
    fusion = fuse(base, adapter, tmp_path / "fused", dequantize=True)
    config = json.loads((tmp_path / "fused" / "config.json").read_text())
    assert "quantization" not in config
    assert "quantization_config" not in config
    tensors = stored(tmp_path / "fused")
    assert not [name for name in tensors if name.endswith(("scales", "biases"))]
    assert {x[1] for x in tensors.values()} == {"F32"}
    assert tensors["mtp.norm.weight"] == stored(base)["mtp.norm.weight"]
    index = json.loads((tmp_path / "fused" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: x[0] for name, x in tensors.items()}
    assert index["metadata"]["total_size"] == fusion.size == sum(len(x[3]) for x in tensors.values())
    model = load_model(find_model(str(tmp_path / "fused")))
    assert not [m for _, m in model.named_modules() if isinstance(m, nn.QuantizedLinear | nn.QuantizedEmbedding)]
    # A product with a packed matrix sums in another order than one with a dense one.
    want = bases.logits(bases.adapted(base, adapter))
    assert mini.relative_l2(bases.logits(model), want) <= EXACT
    assert mini.relative_l2(bases.logits(load_model(find_model(str(base)))), want) > 0.05


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("how", ["affine 4", "mxfp4"])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_quantised_experts(family, how, dequantize, tmp_path):
    base = bases.mlx_base(tmp_path / "base", family, quantisation=bases.QUANTISED[how])
    adapter = bases.make_adapter(base, tmp_path / "adapter", keys=[*EXPERTS, "q_proj"])
    fuse(base, adapter, tmp_path / "fused", dequantize=dequantize)
    got = load_model(find_model(str(tmp_path / "fused")))
    assert any(isinstance(m, SwitchLinear) for _, m in got.named_modules()) is dequantize
    want = bases.adapted(base, adapter) if dequantize else fused_by_layers(base, adapter)
    assert mini.relative_l2(bases.logits(got), bases.logits(want)) <= (EXACT if dequantize else ROUNDED)


def test_dequantised_bfloat16(tmp_path):
    """Scales of 8 bits do not say how wide the weights were; the norms do."""
    for how in ("affine 4", "mxfp4"):
        base = bases.mlx_base(tmp_path / how, quantisation=bases.QUANTISED[how], dtype="bfloat16")
        adapter = bases.make_adapter(base, tmp_path / f"{how}-adapter")
        fuse(base, adapter, tmp_path / f"{how}-fused", dequantize=True)
        after = {name: x[1] for name, x in stored(tmp_path / f"{how}-fused").items()}
        assert {dtype for name, dtype in after.items() if "language_model" in name and "A_log" not in name} == {"BF16"}


def test_dequantize_of_a_dense_base(tmp_path):
    base = bases.raw_base(tmp_path / "base", "qwen3_5")
    adapter = bases.make_adapter(base, tmp_path / "adapter")
    with pytest.raises(UserError, match="--dequantize: the base is not quantised"):
        fuse(base, adapter, tmp_path / "fused", dequantize=True)
    assert not (tmp_path / "fused").exists()


def wrong_scale(layer):
    right = merge_low_rank(layer)
    return merge.Merge(right.experts, lambda w, e: w + (right.apply(w, e) - w) / layer.scale)


def wrong_side(layer):
    right = merge_low_rank(layer)
    return merge.Merge(right.experts, lambda w, e: 2 * w - right.apply(w, e))


merge_low_rank = merge._low_rank


@pytest.mark.parametrize("fault", [wrong_scale, wrong_side])
def test_a_wrong_merge_is_seen(fault, tmp_path, monkeypatch):
    monkeypatch.setattr(merge, "_low_rank", fault)
    base = bases.raw_base(tmp_path / "base", "qwen3_5")
    adapter = bases.make_adapter(base, tmp_path / "adapter")
    fuse(base, adapter, tmp_path / "fused")
    want = bases.logits(bases.adapted(base, adapter))
    assert mini.relative_l2(bases.logits(bases.stock(tmp_path / "fused")), want) > 1000 * EXACT


def plan(tmp_path):
    base = bases.raw_base(tmp_path / "base", "qwen3_5")
    adapter = bases.make_adapter(base, tmp_path / "adapter")
    files = find_model(str(base))
    model = load_model(files)
    return plan_fusion(files, model, load_adapter(model, adapter))


@pytest.mark.parametrize("end", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_end_on_the_way_leaves_nothing(end, tmp_path):
    fusion, written = plan(tmp_path), []

    def progress(size):
        written.append(size)
        if len(written) == 9:
            raise end

    before = sorted(os.listdir(tmp_path))
    expected = KeyboardInterrupt if end is KeyboardInterrupt else UserError
    with pytest.raises(expected, match=None if end is KeyboardInterrupt else "cannot be written: No space left"):  # noqa: SIM117
        with new_folder("--output", tmp_path / "fused", fusion.size) as folder:
            fusion.write(folder, progress)
    assert sorted(os.listdir(tmp_path)) == before


def test_too_little_room(tmp_path, monkeypatch):
    fusion = plan(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=fusion.size - 1))
    with pytest.raises(UserError, match=r"fused needs \S+ GB and the disk has"):  # noqa: SIM117
        with new_folder("--output", tmp_path / "fused", fusion.size):
            pass
    assert not (tmp_path / "fused").exists()


def test_a_base_quantised_by_others_is_refused(tmp_path):
    fusion = plan(tmp_path)
    file = fusion.files.folder / "config.json"
    config = json.loads(file.read_text())
    files = find_model(str(fusion.files.folder))
    files.config["quantization_config"] = {"quant_method": "awq"}
    assert config != files.config
    model = load_model(find_model(str(fusion.files.folder)))
    with pytest.raises(UserError, match="quantised by awq; accepted: unquantised"):
        plan_fusion(files, model, load_adapter(model, tmp_path / "adapter"))
