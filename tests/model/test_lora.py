"""Which projections train, and adapters on disk: here and in stock mlx_lm."""

import json
import math
import re

import mini
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear
from mlx_lm.tuner.utils import load_adapters
from rich.console import Console

from gdtrain.arrays import flat
from gdtrain.config_file import load_config
from gdtrain.errors import UserError
from gdtrain.model.adapter import load_adapter, load_adapter_weights, save_adapter
from gdtrain.model.lora import adapt
from gdtrain.reporting.console import RunConsole
from gdtrain.session import adapt_as
from gdtrain.training.step import build_step

GDN = {
    "qwen3_5": ["in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj"],
    "qwen3_5_moe": ["in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj"],
    "qwen3_next": ["in_proj_ba", "in_proj_qkvz", "out_proj"],
}
ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
MLP = ["down_proj", "gate_proj", "up_proj"]
TOKENS = mx.array([[5, 17, 250, 3, 99, 4, 31]])


def default_targets(family, gdn=3, attention=1):
    """Name within a block -> in how many of the blocks."""
    mlp = "mlp" if family == "qwen3_5" else "mlp.shared_expert"
    return (
        {f"linear_attn.{leaf}": gdn for leaf in GDN[family]}
        | {f"self_attn.{leaf}": attention for leaf in ATTENTION}
        | {f"{mlp}.{leaf}": gdn + attention for leaf in MLP}
    )


def adapted_names(model):
    """Names within the model of all adapted projections."""
    return {name for name, m in model.named_modules() if isinstance(m, LoRALinear | LoRASwitchLinear | DoRALinear)}


def randomise(model, seed=0):
    """Trainable parameters moved away from where they start, so that an adapter that is not loaded shows."""
    rng = np.random.default_rng(seed)
    moved = [
        (name, x + mx.array((0.05 * rng.standard_normal(x.shape)).astype(np.float32)).astype(x.dtype))
        for name, x in flat(model.trainable_parameters()).items()
    ]
    model.load_weights(moved, strict=False)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("family", mini.FAMILIES)
def test_default_targets_leaf_by_leaf(family, kind):
    model, _ = mini.build(family)
    adaptation = adapt(model, fine_tune_type=kind, rank=4)
    want = default_targets(family)
    assert {target.name: target.blocks for target in adaptation.targets} == want
    assert adaptation.lora_parameters["keys"] == sorted(want)
    assert len(adapted_names(model)) == sum(want.values())
    by_leaf = {target.name: target.parameters for target in adaptation.targets}
    leaves = ("lora_a", "lora_b", "m") if kind == "dora" else ("lora_a", "lora_b")
    trainable = flat(model.trainable_parameters())
    assert {name.rsplit(".", 1)[1] for name in trainable} == set(leaves)
    assert len(trainable) == len(leaves) * sum(want.values())
    assert sum(by_leaf.values()) == sum(x.size for x in trainable.values())
    # q_proj also makes the gate of the attention output: 64 -> 2 * 4 * 16; out_proj is 4 * 16 -> 64, three times.
    magnitudes = (128, 3 * 64) if kind == "dora" else (0, 0)
    assert by_leaf["self_attn.q_proj"] == 4 * (64 + 128) + magnitudes[0]
    assert by_leaf["linear_attn.out_proj"] == 3 * 4 * (64 + 64) + magnitudes[1]


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_routers_experts_head_and_embedding_are_left_alone(family):
    model, _ = mini.build(family)
    adapt(model)
    touched = adapted_names(model)
    assert touched
    assert not [name for name in touched if re.search(r"mlp\.gate$|shared_expert_gate|switch_mlp|lm_head|embed", name)]
    names = {name for name, _ in model.named_modules()}
    for part in ("mlp.gate", "mlp.shared_expert_gate", "mlp.switch_mlp.up_proj", "lm_head", "embed_tokens"):
        assert any(name.endswith(part) for name in names), part  # they do exist


def test_a_router_is_adapted_where_it_is_named():
    model, _ = mini.build("qwen3_5_moe")
    adaptation = adapt(model, keys=["mlp.gate", "shared_expert_gate"])
    assert {t.name: t.blocks for t in adaptation.targets} == {"mlp.gate": 4, "mlp.shared_expert_gate": 4}
    (note,) = adaptation.notes
    assert note.startswith("mlp.gate and mlp.shared_expert_gate are routers: ")
    assert adapt(mini.build("qwen3_5_moe")[0]).notes == ()


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
@pytest.mark.parametrize("family", mini.FAMILIES)
def test_shapes_of_targets(family, kind):
    """Of the weights, by the config: hidden 64, Hk 2, Hv 4, Dk 32, Dv 16, 4 heads of 16 with 2 for keys."""
    model, _ = mini.build(family)
    keys = None if family == "qwen3_5" or kind == "dora" else ["q_proj", "out_proj", "switch_mlp.down_proj", "mlp.gate"]
    adaptation = adapt(model, fine_tune_type=kind, rank=4, keys=keys)
    shapes = {target.name: target.shape for target in adaptation.targets}
    want = {"self_attn.q_proj": (128, 64), "linear_attn.out_proj": (64, 64)}
    if kind == "full":
        want |= {"linear_attn.A_log": (4,), "linear_attn.conv1d": (192, 4, 1), "input_layernorm": (64,)}
    if keys:
        want |= {"mlp.switch_mlp.down_proj": (4, 64, 32), "mlp.gate": (4, 64)}
    assert shapes.items() >= want.items()
    experts = {"mlp.switch_mlp.down_proj": 4}
    for target in adaptation.targets:
        *_, rows, columns = target.shape if len(target.shape) > 1 else (1, *target.shape)
        if kind == "full":
            assert target.parameters == target.blocks * math.prod(target.shape)
        else:
            each = 4 * (rows + columns) * experts.get(target.name, 1) + (rows if kind == "dora" else 0)
            assert target.parameters == target.blocks * each, target.name


def test_table_of_targets():
    """Leaf by leaf, in a console of its own."""
    console = Console(record=True, width=100, highlight=False)
    targets = adapt(mini.build("qwen3_5_moe")[0], rank=4, keys=["q_proj", "switch_mlp.down_proj"]).targets
    RunConsole(console).targets(targets)
    head, *rows = [line.split() for line in console.export_text().splitlines()]
    assert head == ["trained", "in", "each", "block", "blocks", "shape", "parameters"]
    assert rows == [["mlp.switch_mlp.down_proj", "4", "4x64x32", "6,144"], ["self_attn.q_proj", "1", "128x64", "768"]]


@pytest.mark.parametrize(
    ("lora", "scale"),
    [({"rank": 16, "alpha": 32}, 2), ({"rank": 16, "alpha": 32, "rslora": True}, 8), ({"rank": 4, "scale": 3}, 3)],
)
def test_scale_alpha_and_rslora_reach_the_layers(lora, scale, tmp_path):
    """LoRA: alpha / rank (arXiv 2106.09685); rsLoRA: alpha / sqrt(rank) (arXiv 2312.03732)."""
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"model": "tiny", "data": str(tmp_path), "lora_parameters": lora}))
    config = load_config(file, [])
    model, _ = mini.build()
    adaptation = adapt_as(config, model)
    assert adaptation.lora_parameters["scale"] == scale
    assert {m.scale for m in model.modules() if isinstance(m, LoRALinear)} == {scale}


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_keys_by_name_or_its_end(family):
    short, _ = mini.build(family)
    full, _ = mini.build(family)
    leaf = GDN[family][2]
    one = adapt(short, keys=["q_proj", leaf], rank=2)
    two = adapt(full, keys=["self_attn.q_proj", f"linear_attn.{leaf}"], rank=2)
    assert one == two
    assert {t.name: t.blocks for t in one.targets} == {"self_attn.q_proj": 1, f"linear_attn.{leaf}": 3}
    assert adapted_names(short) == adapted_names(full)


def test_a_key_is_not_matched_within_a_word():
    model, _ = mini.build()
    assert [t.name for t in adapt(model, keys=["in_proj_b"]).targets] == ["linear_attn.in_proj_b"]
    with pytest.raises(UserError, match="'proj' names no projection"):
        adapt(mini.build()[0], keys=["proj"])


@pytest.mark.parametrize(
    ("family", "key", "near"),
    [
        ("qwen3_next", "in_proj_qkv", "in_proj_qkvz"),
        ("qwen3_next", "in_proj_z", "in_proj_qkvz"),
        ("qwen3_next", "linear_attn.in_proj_b", "linear_attn.in_proj_ba"),
        ("qwen3_next", "in_proj_a", "in_proj_ba"),
        ("qwen3_5", "in_proj_qkvz", "in_proj_qkv"),
        ("qwen3_5", "linear_attn.in_proj_ba", "linear_attn.in_proj_b"),
        ("qwen3_5_moe", "in_proj_qkvz", "in_proj_qkv"),
        ("qwen3_5", "q_prj", "q_proj"),
        ("qwen3_5", "layers.0.mlp.up_proj", "mlp.up_proj"),
    ],
)
def test_an_unknown_key_has_a_near_name(family, key, near):
    """C49 among them."""
    model, _ = mini.build(family)
    with pytest.raises(UserError) as error:
        adapt(model, keys=["q_proj", key])
    message = str(error.value)
    assert message.startswith(f"lora_parameters.keys: {key!r} names no projection; did you mean {near!r}?")
    other = "Qwen3.5" if family == "qwen3_next" else "Qwen3-Next"
    assert (f" It is {other}'s name for " in message) == ("in_proj" in key)
    listed = message.lower().split("this model has: ")[1].split(", ")
    assert set(default_targets(family)) <= set(listed)
    assert not adapted_names(model)


REASONS = {
    "conv1d": "it is a convolution along the tokens, for which there is no LoRA; fine_tune_type: full trains it",
    "linear_attn.conv1d": "it is a convolution along the tokens",
    "input_layernorm": "it is a norm, whose weight is a vector, and LoRA adapts matrices; fine_tune_type: full trains",
    "self_attn.q_norm": "it is a norm",
    "linear_attn.norm": "it is a norm",
    "A_log": "it is a number for each head",
    "linear_attn.dt_bias": "it is a number for each head",
    "visual.blocks.0.attn.qkv": "the vision tower is not loaded",
    "vision_tower.blocks.0.mlp.linear_fc1": "the vision tower is not loaded",
    "mtp.fc": "multi-token prediction is not loaded",
    "embed_tokens": "the embedding lies before the blocks",
    "lm_head": "the head lies behind the blocks",
    "mlp.gate": "it is a router, and this model has none",
    "shared_expert_gate": "it is a router, and this model has none",
    "switch_mlp.up_proj": "this model has no experts, its MLPs are dense",
    "mlp.experts.0.up_proj": "this model has no experts, its MLPs are dense",
}


@pytest.mark.parametrize("key", REASONS)
def test_a_name_that_is_no_projection_has_its_reason(key):
    model, _ = mini.build()
    with pytest.raises(UserError) as error:
        adapt(model, keys=[key])
    assert str(error.value).startswith(f"lora_parameters.keys: {key!r} names no projection: {REASONS[key]}")
    assert "\n  this model has: linear_attn.in_proj_a, linear_attn.in_proj_b, " in str(error.value)
    assert not adapted_names(model)


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_the_head_of_a_tied_model_is_its_embedding(family):
    model, _ = mini.build(family, tie_word_embeddings=True)
    with pytest.raises(UserError, match="'lm_head' names no projection: the head is the embedding in this model"):
        adapt(model, keys=["lm_head"])


def test_a_projection_of_other_blocks():
    """The last block of four is attention."""
    with pytest.raises(UserError, match=r"'in_proj_qkv' names no projection of the blocks that num_layers leaves"):
        adapt(mini.build()[0], num_layers=1, keys=["in_proj_qkv"])
    assert adapt(mini.build()[0], num_layers=2, keys=["in_proj_qkv"]).targets[0].blocks == 1


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_one_expert_by_number_is_an_error_with_the_names_that_exist(family):
    with pytest.raises(
        UserError, match=r"(?s)'mlp\.experts\.0\.up_proj' names no.*model has.*mlp\.switch_mlp\.up_proj"
    ):
        adapt(mini.build(family)[0], keys=["mlp.experts.0.up_proj"])


def test_every_unknown_key_is_named():
    with pytest.raises(UserError, match=r"'zzz' names no projection; 'lm_head' names no projection: the head lies"):
        adapt(mini.build()[0], keys=["zzz", "lm_head"])


def test_experts_have_no_dora():
    with pytest.raises(UserError, match=r"'switch_mlp\.up_proj' names experts, for which there is LoRA but no DoRA"):
        adapt(mini.build("qwen3_5_moe")[0], fine_tune_type="dora", keys=["switch_mlp.up_proj"])


def test_a_short_key_means_the_shared_expert():
    adaptation = adapt(mini.build("qwen3_5_moe")[0], keys=["up_proj"])
    assert adaptation.lora_parameters["keys"] == ["mlp.shared_expert.up_proj"]


@pytest.mark.parametrize(
    ("options", "named"), [({"fine_tune_type": "ia3"}, "ia3"), ({"num_layers": 0}, "num_layers: 0")]
)
def test_options_out_of_range(options, named):
    with pytest.raises(UserError, match=named):
        adapt(mini.build()[0], **options)


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
@pytest.mark.parametrize(("num_layers", "adapted"), [(1, {3}), (2, {2, 3}), (4, {0, 1, 2, 3}), (-1, {0, 1, 2, 3})])
def test_num_layers_counts_from_the_last(num_layers, adapted, kind):
    model, _ = mini.build()
    adaptation = adapt(model, fine_tune_type=kind, num_layers=num_layers)
    trainable = flat(model.trainable_parameters())
    assert {int(re.search(r"layers\.(\d+)\.", name)[1]) for name in trainable} == adapted
    assert adaptation.num_layers == num_layers
    said = (f"num_layers: the last {num_layers} of 4 blocks train",) if len(adapted) < 4 else ()
    assert adaptation.notes == said
    if kind != "full":
        linear = len(adapted - {3})
        want = {name: n for name, n in default_targets("qwen3_5", linear, 1).items() if n}
        assert {t.name: t.blocks for t in adaptation.targets} == want


def test_more_layers_than_blocks():
    model, _ = mini.build()
    with pytest.raises(UserError, match=r"num_layers: 99; accepted: -1 \(all\) or 1 to 4"):
        adapt(model, num_layers=99)
    assert not adapted_names(model)


def test_no_layers_are_refused_by_the_config(tmp_path):
    file = tmp_path / "run.yaml"
    for value in (0, -2):
        file.write_text(f"model: tiny\ndata: {tmp_path}\nnum_layers: {value}\n")
        with pytest.raises(UserError, match=rf"num_layers.*-1 \(all\) or at least 1, not {value}"):
            load_config(file, [])


def test_full_trains_every_parameter_of_the_blocks_and_nothing_else():
    model, _ = mini.build()
    adaptation = adapt(model, fine_tune_type="full", num_layers=2)
    names = flat(model.parameters()).keys()
    assert flat(model.trainable_parameters()).keys() == {n for n in names if ".layers.2." in n or ".layers.3." in n}
    assert adaptation.lora_parameters is None
    assert sum(t.parameters for t in adaptation.targets) == sum(
        x.size for x in flat(model.trainable_parameters()).values()
    )


def test_adapting_leaves_the_logits_alone():
    """lora_b starts at zero; the magnitude of DoRA at the norm of the weight, to float32 noise."""
    model, _ = mini.build()
    before = model(TOKENS)
    adapt(model)
    assert mx.array_equal(model(TOKENS), before)
    model, _ = mini.build()
    adapt(model, fine_tune_type="dora")
    assert mini.relative_l2(model(TOKENS), before) <= 1e-5


EXPERTS = ["switch_mlp.gate_proj", "switch_mlp.up_proj", "switch_mlp.down_proj"]


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_only_experts_that_tokens_went_to_have_gradients(family, monkeypatch):
    routed = []
    forward = SwitchGLU.__call__
    monkeypatch.setattr(SwitchGLU, "__call__", lambda self, x, i: routed.append(i) or forward(self, x, i))
    model = mini.trainable(family, lora={"keys": EXPERTS}, num_experts=8)
    batch = mini.batch(mini.samples(4), [0])
    mx.eval(model(batch.inputs))
    chosen = [set(np.array(i).flatten().tolist()) for i in routed]
    assert all(2 <= len(experts) < 8 for experts in chosen)
    routed.clear()
    _, gradients = build_step(model, compiled=False)(batch)
    seen = 0
    for name, gradient in flat(gradients).items():
        block = int(re.search(r"layers\.(\d+)\.", name)[1])
        reached = {expert for expert in range(8) if mx.any(gradient[expert] != 0).item()}
        assert reached == chosen[block], name
        seen += 1
    assert seen == 4 * 3 * 2


KINDS = {"lora": {}, "dora": {}, "full": {}, "two blocks": {"num_layers": 2}, "one key": {"keys": ["q_proj"]}}


def saved(folder, family, kind):
    """A model with a moved adapter, saved."""
    model, config = mini.build(family)
    mini.swap_linear_attention(model, config)
    options = KINDS[kind]
    adaptation = adapt(model, fine_tune_type=kind if kind in ("dora", "full") else "lora", rank=4, scale=3.0, **options)
    randomise(model)
    save_adapter(folder, flat(model.trainable_parameters()), adaptation, "the/base")
    return model.eval(), adaptation


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", mini.FAMILIES)
def test_an_adapter_comes_back_here_and_in_stock_mlx_lm(family, kind, tmp_path):
    model, adaptation = saved(tmp_path / "deep" / "run", family, kind)
    want = model(TOKENS)
    again, config = mini.build(family)
    mini.swap_linear_attention(again, config)
    without = again(TOKENS)
    assert mini.relative_l2(without, want) > 1e-2  # the adapter does something
    assert load_adapter(again, tmp_path / "deep" / "run") == adaptation
    again.eval()
    assert mx.array_equal(again(TOKENS), want)
    one, two = flat(model.trainable_parameters()), flat(again.trainable_parameters())
    assert one.keys() == two.keys()

    stock = load_adapters(mini.build(family)[0], str(tmp_path / "deep" / "run")).eval()
    # Stock mlx-lm without a cache runs its own step loop: float32 noise. With one, both run the same operations.
    assert mini.relative_l2(stock(TOKENS), want) <= 1e-5
    assert mx.array_equal(stock(TOKENS, cache=stock.make_cache()), model(TOKENS, cache=model.make_cache()))


def test_files_of_an_adapter(tmp_path):
    model, _ = saved(tmp_path, "qwen3_5", "lora")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter_config.json", "adapters.safetensors"]
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config == {
        "model": "the/base",
        "fine_tune_type": "lora",
        "num_layers": -1,
        "lora_parameters": {"rank": 4, "scale": 3.0, "dropout": 0.0, "keys": sorted(default_targets("qwen3_5"))},
    }
    weights = mx.load(str(tmp_path / "adapters.safetensors"))
    assert weights.keys() == flat(model.trainable_parameters()).keys()


def test_an_adapter_that_does_not_fit_names_every_fault(tmp_path):
    model, _ = saved(tmp_path, "qwen3_5", "lora")
    file = tmp_path / "adapters.safetensors"
    weights = mx.load(str(file))
    missing, misshapen = sorted(weights)[0], sorted(weights)[-1]
    shape = weights[misshapen].shape
    del weights[missing]
    weights[misshapen] = weights[misshapen][:1]
    weights["language_model.model.layers.9.mlp.up_proj.lora_a"] = mx.zeros((64, 4))
    mx.save_safetensors(str(tmp_path / "bad.safetensors"), weights)
    before = flat(model.trainable_parameters())
    with pytest.raises(UserError) as error:
        load_adapter_weights(model, tmp_path / "bad.safetensors")
    message = str(error.value)
    assert "bad.safetensors does not fit the model (3 faults)" in message
    assert f"\n  {missing} is missing" in message
    assert "\n  language_model.model.layers.9.mlp.up_proj.lora_a is not a trainable parameter" in message
    assert f"\n  {misshapen} has shape {(1, *shape[1:])}; accepted here: {shape}" in message
    after = flat(model.trainable_parameters())
    assert all(after[name] is before[name] for name in before)  # all or nothing
    load_adapter_weights(model, file)  # the good one still loads


@pytest.mark.parametrize("broken", ["missing", "not safetensors", "cut off"])
def test_an_unreadable_adapter_file(broken, tmp_path):
    model, _ = saved(tmp_path, "qwen3_5", "one key")
    file = tmp_path / "adapters.safetensors"
    if broken == "missing":
        file.unlink()
    else:
        file.write_bytes(b"hello" if broken == "not safetensors" else file.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"adapter: .*adapters\.safetensors (does not exist|cannot be read)"):
        load_adapter_weights(model, file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("{", "is not an adapter config"),
        ('{"fine_tune_type": "lora"}', "is not an adapter config.*num_layers"),
        (
            '{"fine_tune_type": "lora", "num_layers": 9, "lora_parameters": {"rank": 4, "scale": 2}}',
            "num_layers: 9; accepted: -1",
        ),
        ('{"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": {"r": 4}}', "is not an adapter config.*'r'"),
    ],
)
def test_an_unusable_adapter_config(text, message, tmp_path):
    saved(tmp_path, "qwen3_5", "lora")
    file = tmp_path / "adapter_config.json"
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(UserError, match=message):
        load_adapter(mini.build()[0], tmp_path)


def test_an_adapter_of_another_rank_does_not_fit(tmp_path):
    saved(tmp_path, "qwen3_5", "lora")
    model, _ = mini.build()
    adapt(model, rank=8)
    with pytest.raises(UserError, match=r"has shape \(64, 4\); accepted here: \(64, 8\)"):
        load_adapter_weights(model, tmp_path / "adapters.safetensors")
