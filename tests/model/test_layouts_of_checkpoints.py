"""Checkpoints in every layout: the same logits, what was dropped said once, and what cannot be right refused or warned
of."""

import json
import re

import mini
import mlx.core as mx
import pytest
from layouts import LAYOUTS, MTP, VISION, exact, hub, is_norm, prefixed, write, write_layout
from mlx_lm.utils import load_model as load_stock

from gdtrain.arrays import flat
from gdtrain.errors import UserError
from gdtrain.model.describe import describe_checkpoint
from gdtrain.model.load import find_model, load_model
from gdtrain.model.lora import adapt
from gdtrain.model.swap import swap_linear_attention

TOKENS = mx.array([[5, 17, 250, 3, 99, 4, 31]])


def opened(folder, **options):
    """The model of a folder, and the lines about it."""
    files = find_model(str(folder))
    model = load_model(files, **options)
    return model, describe_checkpoint(files, model)


def rewrite(folder, change):
    """change(weights) -> weights of model.safetensors."""
    file = folder / "model.safetensors"
    weights = change(dict(mx.load(str(file))))
    mx.eval(weights)
    mx.save_safetensors(str(file), weights)
    return folder


def reconfigure(folder, change):
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    return folder


# C52: one set of weights


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", mini.FAMILIES)
def test_the_four_layouts_give_the_same_logits(family, dtype, layout, tmp_path):
    model, _ = mini.build(family, dtype=dtype)
    model.load_weights([(name, exact(name, x)) for name, x in flat(model.parameters()).items()])
    loaded, _ = opened(write_layout(tmp_path, family, layout, dtype=dtype))
    want, got = flat(model.parameters()), flat(loaded.parameters())
    assert got.keys() == want.keys()
    assert [name for name in want if not mx.array_equal(got[name], want[name])] == []
    if dtype == "float32" or family == "qwen3_5":  # MLX's experts are float32 alone on a CPU
        assert mx.array_equal(loaded(TOKENS), model(TOKENS))


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_a_shift_too_many_or_too_few_shows(family, tmp_path):
    """The control of the test above, and what the logits of public faults were."""
    want = opened(write_layout(tmp_path / "right", family, "mlx"))[0](TOKENS)
    for by in (1.0, -1.0):
        folder = write_layout(tmp_path / str(by), family, "mlx")
        rewrite(folder, lambda weights: {n: x + by if is_norm(n) else x for n, x in weights.items()})  # noqa: B023
        assert mini.relative_l2(opened(folder)[0](TOKENS), want) > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", mini.FAMILIES)
def test_what_is_dropped_is_said_once(family, layout, tmp_path):
    _, lines = opened(write_layout(tmp_path, family, layout))
    vision = f"dropped: {len(VISION)} vision tensors (1.02 kB): gdtrain trains the language model alone"
    mtp = f"dropped: {len(MTP)} mtp tensors (0.256 kB): multi-token prediction is not trained"
    hub_line = "Hub layout: 11 norms stored around 0 get 1 added, 3 conv1d kernels change axes"
    mlx_line = "MLX layout: norms and conv1d kernels are read as they are stored"
    assert (
        lines
        == {
            "hub": [hub_line, vision, mtp],
            "mlx with vision": [mlx_line, vision],
            "mlx with mtp": [mlx_line, mtp],
            "mlx": [mlx_line],
        }[layout]
    )


@pytest.mark.parametrize(
    "prefix", ["vision_tower.", "language_model.vision_tower.", "model.vision_tower.", "visual.", "model.visual."]
)
def test_vision_tensors_under_any_prefix(prefix, tmp_path):
    """333 tensors "not in model" were language_model.vision_tower.*."""
    folder = write_layout(tmp_path, "qwen3_5", "mlx")
    rewrite(folder, lambda weights: weights | {f"{prefix}blocks.{i}.norm.weight": mx.ones(4) for i in range(333)})
    assert any(line.startswith("dropped: 333 vision tensors") for line in opened(folder)[1])


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp.", "language_model.mtp."])
@pytest.mark.parametrize("family", mini.FAMILIES)
def test_mtp_tensors_under_any_prefix(family, prefix, tmp_path):
    folder = write_layout(tmp_path, family, "mlx")
    rewrite(folder, lambda weights: weights | {f"{prefix}fc.weight": mx.ones((4, 4)), f"{prefix}fc.scales": mx.ones(4)})
    assert any(line.startswith("dropped: 2 mtp tensors") for line in opened(folder)[1])


@pytest.mark.parametrize("family", mini.FAMILIES)
@pytest.mark.parametrize("layout", ["hub", "mlx"])
def test_a_stored_head_of_tied_embeddings_is_dropped(family, layout, tmp_path):
    folder = write_layout(tmp_path, family, layout, tie_word_embeddings=True)
    want = opened(folder)[0](TOKENS)
    mx.eval(want)  # before the file changes
    rewrite(folder, lambda weights: weights | {"lm_head.weight": mx.ones((300, 64))})
    model, lines = opened(folder)
    assert mx.array_equal(model(TOKENS), want)
    assert "dropped: 1 head tensor (76.8 kB): the embedding is the head too" in lines


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("other", ["qwen3_5_moe", "qwen3_next"])
def test_experts_fused_or_one_by_one(family, other, tmp_path):
    """transformers 5 writes Qwen3-Next's experts fused too."""
    want = opened(write_layout(tmp_path / "mlx", family, "mlx"))[0](TOKENS)
    model, config = mini.build(family)
    text = {n.removeprefix("language_model."): exact(n, x) for n, x in flat(model.parameters()).items()}
    assert mx.array_equal(opened(write(tmp_path / "hub", config, hub(text, other)))[0](TOKENS), want)


STOCK_FAULTS = {
    "Qwen3-Next with mtp kept": ("qwen3_next", {}, {"mtp.fc.weight": (4, 4)}),
    "vision under the language model": ("qwen3_5", {}, {"language_model.vision_tower.norm.weight": (4,)}),
    "tied with a stored head": ("qwen3_5", {"tie_word_embeddings": True}, {"lm_head.weight": (300, 64)}),
}


@pytest.mark.parametrize("case", STOCK_FAULTS)
def test_what_stock_mlx_lm_does_not_read(case, tmp_path):
    """Why the layout is settled here; when this fails, mlx-lm has become better and layout.py may become shorter."""
    family, options, extra = STOCK_FAULTS[case]
    folder = write_layout(tmp_path, family, "mlx", **options)
    rewrite(folder, lambda weights: weights | {name: mx.ones(shape) for name, shape in extra.items()})
    opened(folder)
    with pytest.raises(ValueError, match="not in model"):
        load_stock(folder)


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_what_stock_mlx_lm_reads_it_reads_alike(family, tmp_path):
    for layout in ("hub", "mlx"):
        folder = write_layout(tmp_path / layout, family, layout)
        if family == "qwen3_next" and layout == "hub":  # vision tensors, which no Qwen3-Next has
            rewrite(folder, lambda weights: {n: x for n, x in weights.items() if "visual" not in n})
        assert mx.array_equal(opened(folder)[0](TOKENS), load_stock(folder)[0](TOKENS))


# What cannot be right


@pytest.mark.parametrize("layout", ["hub", "mlx"])
@pytest.mark.parametrize(
    ("by", "warning"),
    [(1.0, "shifted twice"), (-1.0, "stored around 0"), (0.0, None), (0.3, None), (-0.3, None)],
)
def test_norms_shifted_twice_or_never_are_a_warning(layout, by, warning, tmp_path):
    folder = write_layout(tmp_path, "qwen3_5", layout)
    rewrite(folder, lambda weights: {n: x + by if is_norm(n) else x for n, x in weights.items()})
    found = [line for line in opened(folder)[1] if line.startswith("warning")]
    assert [warning in line and "4 blocks" in line for line in found] == ([True] if warning else [])


def test_one_odd_block_is_no_warning(tmp_path):
    folder = write_layout(tmp_path, "qwen3_5", "mlx")
    rewrite(folder, lambda weights: {n: x + 1.5 if is_norm(n) and "layers.0" in n else x for n, x in weights.items()})
    assert not [line for line in opened(folder)[1] if line.startswith("warning")]


def half_converted(weights):
    name = "model.language_model.layers.1.linear_attn.conv1d.weight"
    return weights | {name: weights[name].swapaxes(1, 2)}


def without_an_expert(weights):
    return {n: x for n, x in weights.items() if ".layers.2.mlp.experts.1.up_proj" not in n}


def twice(weights):
    name = "model.language_model.embed_tokens.weight"
    return weights | {name.replace("model.language_model", "language_model.model"): weights[name]}


REFUSED = {
    "converted in part": ("qwen3_5", half_converted, r"2 of 3 conv1d kernels .*layers\.0.*layers\.1.*Convert it again"),
    "an expert is missing": (
        "qwen3_next",
        without_an_expert,
        r"lacks expert 1 of .*layers\.2\.mlp\.switch_mlp\.up_proj",
    ),
    "a tensor twice": ("qwen3_5", twice, r"language_model\.model\.embed_tokens\.weight twice"),
    "an unknown tensor": (
        "qwen3_5",
        lambda weights: weights | {"model.language_model.layers.0.mlp.up_proj.bias": mx.ones(96)},
        r"Received 1 tensors .* no place for: language_model\.model\.layers\.0\.mlp\.up_proj\.bias$",
    ),
    "tensors missing": (
        "qwen3_5_moe",
        lambda weights: {n: x for n, x in weights.items() if "layers.3" not in n},
        r"Missing 16 parameters: language_model\.model\.layers\.3\..* and 8 more$",
    ),
    "quantised without saying so": (
        "qwen3_5",
        lambda weights: weights | {"lm_head.scales": mx.ones((300, 1))},
        r"(?s)language_model\.lm_head\.scales.*config\.json has no `quantization`",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, tmp_path):
    family, change, message = REFUSED[case]
    folder = rewrite(write_layout(tmp_path, family, "hub"), change)
    with pytest.raises(UserError, match=message):
        load_model(find_model(str(folder)))


def test_a_file_of_the_index_is_missing(tmp_path):
    folder = write_layout(tmp_path, "qwen3_5", "mlx")
    names = mx.load(str(folder / "model.safetensors"))
    files = dict.fromkeys(names, "model.safetensors") | {
        "lm_head.weight": "model-2.safetensors",
        "mtp.fc": "mtp.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(UserError, match=r"lacks 1 of the 2 files of weights .*: model-2\.safetensors$"):
        find_model(str(folder))


def test_eight_bit_floats_are_refused(tmp_path):
    """As in the FP8 checkpoints of the Hub. MLX cannot write the dtype: the head of the file is changed."""
    folder = write_layout(tmp_path, "qwen3_5", "hub")
    rewrite(folder, lambda weights: weights | {"lm_head.weight": mx.zeros((300, 64), mx.uint8)})
    file = folder / "model.safetensors"
    before = file.read_bytes()
    size, rest = int.from_bytes(before[:8], "little"), before[8:].replace(b'"U8"', b'"F8_E4M3"')
    file.write_bytes((size + len(rest) + 8 - len(before)).to_bytes(8, "little") + rest)
    with pytest.raises(UserError, match=r"1 tensors of .* are 8-bit floats \(lm_head\.weight\)"):
        load_model(find_model(str(folder)))


def test_the_same_tensor_in_two_files(tmp_path):
    folder = write_layout(tmp_path, "qwen3_5", "mlx")
    mx.save_safetensors(str(folder / "model-2.safetensors"), {"language_model.lm_head.weight": mx.ones((300, 64))})
    with pytest.raises(UserError, match=r"language_model\.lm_head\.weight, which another file"):
        find_model(str(folder))


# Mixed dtypes


def mixed(weights):
    """bfloat16 but for float32 norms of GDN outputs, a float16 projection and A_log in bfloat16."""
    dtypes = {"linear_attn.norm.weight": mx.float32, "q_proj.weight": mx.float16, "A_log": mx.bfloat16}
    return {n: x.astype(next((d for end, d in dtypes.items() if n.endswith(end)), x.dtype)) for n, x in weights.items()}


@pytest.mark.parametrize("layout", ["hub", "mlx"])
@pytest.mark.parametrize("family", mini.FAMILIES)
def test_activations_keep_the_dtype_of_most_weights(family, layout, tmp_path):
    folder = rewrite(write_layout(tmp_path, family, layout, dtype="bfloat16"), mixed)
    files = find_model(str(folder))
    model = load_model(files)
    lines = describe_checkpoint(files, model)
    assert "3 tensors stored in float32 are read in bfloat16: linear_attn.norm.weight" in lines
    assert "1 tensors stored in float16 are read in bfloat16: self_attn.q_proj.weight" in lines
    assert "3 tensors stored in bfloat16 are read in float32: linear_attn.A_log" in lines
    dtypes = {name: x.dtype for name, x in flat(model.parameters()).items()}
    assert {dtype for name, dtype in dtypes.items() if not name.endswith("A_log")} == {mx.bfloat16}
    assert {dtype for name, dtype in dtypes.items() if name.endswith("A_log")} == {mx.float32}
    swap_linear_attention(model, files.config)
    adapt(model, rank=2)
    for training in (True, False):
        model.train(training)
        assert block_outputs(model) == [mx.bfloat16] * 4


def block_outputs(model):
    x = model.model.embed_tokens(TOKENS)
    dtypes = []
    for block in model.layers:
        x = block(x, "causal" if "self_attn" in block else None)
        dtypes.append(x.dtype)
    return dtypes


def test_a_float32_norm_would_reach_the_activations(tmp_path):
    """The control of the test above: stock mlx-lm leaves the norms in float32."""
    folder = write_layout(tmp_path, "qwen3_5", "mlx", dtype="bfloat16")
    rewrite(
        folder, lambda ws: {n: x.astype(mx.float32) if n.endswith("layernorm.weight") else x for n, x in ws.items()}
    )
    assert set(block_outputs(load_stock(folder)[0])) == {mx.float32}
    assert set(block_outputs(opened(folder)[0])) == {mx.bfloat16}


@pytest.mark.parametrize("layout", ["hub", "mlx"])
def test_float16_is_refused_unless_asked_for(layout, tmp_path):
    folder = write_layout(tmp_path, "qwen3_5", layout, dtype="float16")
    with pytest.raises(
        UserError, match=r"float16, whose range gradients overflow; set dtype: bfloat16, or dtype: float16"
    ):
        load_model(find_model(str(folder)))
    for dtype in ("float16", "bfloat16", "float32"):
        model, _ = opened(folder, dtype=dtype)
        assert set(block_outputs(model)) == {getattr(mx, dtype)}


# By config, not by name


def flat_text(config):
    return config["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"]}


def named(kind):
    return lambda config: config | {"model_type": kind}


def rope_nested(config):
    rope = {key: config.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
    return config | {"rope_parameters": rope | {"rope_type": "default"}}


def tied_beside_the_text(config):
    del config["text_config"]["tie_word_embeddings"]
    return config


CONFIGS = {
    "the text part alone": ("qwen3_5", flat_text, "model_type 'qwen3_5_text' is read as qwen3_5"),
    "the text part of a mixture": ("qwen3_5_moe", flat_text, "model_type 'qwen3_5_moe_text' is read as qwen3_5_moe"),
    "a later dense one": ("qwen3_5", named("qwen3_7"), "model_type 'qwen3_7' is read as qwen3_5,"),
    "a later mixture": ("qwen3_5_moe", named("qwen4_moe"), "model_type 'qwen4_moe' is read as qwen3_5_moe,"),
    "a later one of text alone": (
        "qwen3_5",
        lambda c: flat_text(c) | {"model_type": "x"},
        "model_type 'x' is read as qwen3_5,",
    ),
    "a later Qwen3-Next": ("qwen3_next", named("qwen4_next"), "model_type 'qwen4_next' is read as qwen3_next,"),
    "rope as in transformers 5": ("qwen3_next", rope_nested, None),
    "tied beside the text": ("qwen3_5", tied_beside_the_text, None),
}


@pytest.mark.parametrize("layout", ["hub", "mlx"])
@pytest.mark.parametrize("case", CONFIGS)
def test_by_config_not_by_name(case, layout, tmp_path):
    family, change, line = CONFIGS[case]
    folder = write_layout(tmp_path, family, layout, tie_word_embeddings="tied" in case)
    want = opened(folder)[0](TOKENS)
    model, lines = opened(reconfigure(folder, change))
    assert mx.array_equal(model(TOKENS), want)
    assert [x for x in lines if "is read as" in x] == [x for x in lines if line and x.startswith(line)]
    assert bool(line) == any("is read as" in x for x in lines)
    assert swap_linear_attention(model, find_model(str(folder)).config).layers == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda c: {"model_type": "llama", "hidden_size": 64},
        lambda c: {**c, "model_type": None},
        lambda c: {
            "model_type": "qwen4",
            "text_config": {k: v for k, v in c["text_config"].items() if "linear" not in k},
        },
    ],
)
def test_another_architecture_is_refused(change, tmp_path):
    folder = reconfigure(write_layout(tmp_path, "qwen3_5", "mlx"), change)
    with pytest.raises(UserError, match=r"is of type .*accepted: qwen3_5, qwen3_5_moe, qwen3_next"):
        find_model(str(folder))


def test_every_prefix_is_cut_once():
    """prefixed() of this module's writer and text_name of the product are not the same table."""
    from gdtrain.model.layout import text_name

    names = prefixed("model.language_model.", {"layers.0.mlp.up_proj.weight": mx.ones(1)})
    assert [text_name(name) for name in names] == ["model.layers.0.mlp.up_proj.weight"]
    for name in ("model.layers.0.x", "language_model.model.layers.0.x", "model.language_model.layers.0.x"):
        assert text_name(name) == "model.layers.0.x"
    for name in ("lm_head.weight", "language_model.lm_head.weight", "model.language_model.lm_head.weight"):
        assert text_name(name) == "lm_head.weight"
    assert re.fullmatch(r"model\.norm\.weight", text_name("model.language_model.norm.weight"))
