"""Which layers are swapped, what is refused, and that generation and dtypes stay those of mlx-lm."""

import json
from dataclasses import replace

import gdkernels
import mini
import mlx.core as mx
import numpy as np
import pytest
from gdkernels.convolution import selftest as convolution_selftest
from gdkernels.testing import metal
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen3_5, qwen3_next

from gdtrain.arrays import flat
from gdtrain.errors import UserError
from gdtrain.model.layers import Trainable
from gdtrain.model.load import find_model, load_model
from gdtrain.model.lora import adapt
from gdtrain.model.swap import count_linear_layers, swap_linear_attention

PROMPT = mx.array([5, 17, 250, 3, 99, 4, 4, 31])

# Logits with a cache against those without: other shapes, other order of float32 sums; measured 1e-6.
CACHED = 1e-5


def swapped(family, **arguments):
    model, config = mini.build(family, **arguments)
    swap_linear_attention(model, config)
    return model


@pytest.mark.parametrize("family", mini.FAMILIES)
@pytest.mark.parametrize(("blocks", "interval", "linear"), [(4, 4, 3), (6, 3, 4), (5, 2, 3)])
def test_every_linear_layer_is_swapped(family, blocks, interval, linear):
    model, config = mini.build(family, num_hidden_layers=blocks, full_attention_interval=interval)
    result = swap_linear_attention(model, config)
    assert (result.layers, result.expected) == (linear, linear)
    layers = [block.linear_attn for block in model.layers if "linear_attn" in block]
    assert len(layers) == linear
    assert all(isinstance(layer, Trainable) for layer in layers)


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_the_swapped_layers_run_the_backend_that_was_asked_for(family, monkeypatch):
    calls = []
    rule = gdkernels.BACKENDS["replay"].rule
    mini.replace_rule(monkeypatch, "replay", lambda *x: calls.append(x[-1]) or rule(*x))
    model, config = mini.build(family)
    assert swap_linear_attention(model, config, kernel="replay", chunk_size=3).choice.backend == "replay"
    mx.eval(model(PROMPT[None]))
    assert calls == [3, 3, 3]


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_fewer_layers_than_the_config_says(family):
    model, _ = mini.build(family)
    text = mini.make_config(family, num_hidden_layers=8)
    with pytest.raises(UserError, match=r"^3 linear attention layers .* config says 6$"):
        swap_linear_attention(model, text)
    kinds = mini.make_config(family, layer_types=["linear_attention"] * 4)
    with pytest.raises(UserError, match=r"^3 linear attention layers .* config says 4$"):
        swap_linear_attention(mini.build(family)[0], kinds)


def test_count_prefers_layer_types():
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    assert count_linear_layers({"layer_types": kinds, "num_hidden_layers": 4}) == 2
    assert count_linear_layers({"text_config": {"num_hidden_layers": 8, "full_attention_interval": 2}}) == 4
    assert count_linear_layers({"num_hidden_layers": 48}) == 36


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_an_unknown_layer_class_is_refused(family):
    model, config = mini.build(family)
    layer = model.layers[1].linear_attn
    model.layers[1].linear_attn.__class__ = type("FasterDeltaNet", (type(layer),), {})
    with pytest.raises(UserError, match=r"block 1: linear_attn is a FasterDeltaNet.*mlx_lm\.models\.qwen3_5"):
        swap_linear_attention(model, config)


def test_a_layer_is_not_swapped_twice():
    model, config = mini.build()
    swap_linear_attention(model, config)
    with pytest.raises(UserError, match="block 0: linear_attn is a TrainableQwen35"):
        swap_linear_attention(model, config)


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_value_heads_that_key_heads_do_not_divide(family, tmp_path):
    folder = mini.write_checkpoint(tmp_path, family)
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["linear_num_value_heads"] = 5
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"\(5\).*\(2\)"):
        load_model(find_model(str(folder)))


UNAVAILABLE = sorted({*gdkernels.BACKENDS, "quickest"} - set(mini.kernels()))


@pytest.mark.parametrize("kernel", UNAVAILABLE)
def test_a_kernel_that_is_not_here(kernel):
    model, config = mini.build()
    with pytest.raises(UserError) as error:
        swap_linear_attention(model, config, kernel=kernel)
    assert f"{kernel!r} is not available" in str(error.value)
    assert all(name in str(error.value) for name in ("auto", *mini.kernels()))
    assert type(model.layers[0].linear_attn) is qwen3_5.GatedDeltaNet  # nothing was touched


def test_a_kernel_that_refuses_the_model(monkeypatch):
    """What only the model's sizes tell: refused before any layer is changed."""
    refusal = lambda sizes: f"no kernel for Dk = {sizes.Dk}, C = {sizes.C}, {sizes.dtype}"  # noqa: E731
    monkeypatch.setitem(gdkernels.BACKENDS, "fused", replace(gdkernels.BACKENDS["fused"], refusal=refusal))
    model, config = mini.build()
    with metal(), pytest.raises(UserError) as error:
        swap_linear_attention(model, config, kernel="fused", chunk_size=9)
    assert str(error.value).startswith("kernel: 'fused' is not available here: refused: no kernel for Dk = 32, C = 9")
    assert type(model.layers[0].linear_attn) is qwen3_5.GatedDeltaNet


def test_the_selftest_comes_with_the_swap(monkeypatch):
    """Not within the first step."""
    tested = []
    fused = replace(gdkernels.BACKENDS["fused"], refusal=lambda sizes: None, rule=lambda *x: tested.append(x) or 1 / 0)
    recurrent = replace(gdkernels.BACKENDS["recurrent"], refusal=lambda sizes: "not played")
    monkeypatch.setitem(gdkernels.BACKENDS, "fused", fused)
    monkeypatch.setitem(gdkernels.BACKENDS, "recurrent", recurrent)
    monkeypatch.setattr(convolution_selftest, "kernel", lambda *x: 1 / 0)
    model, config = mini.build()
    with metal(selftest=True):
        with pytest.warns(RuntimeWarning) as caught:
            choice = swap_linear_attention(model, config).choice
        told = " ".join(str(warning.message) for warning in caught)
        assert "fused failed its self-test: ZeroDivisionError" in told
        assert "the convolution's kernels failed their self-test: ZeroDivisionError" in told
        assert len(tested) == 1
        mx.eval(model(PROMPT[None]))
    assert len(tested) == 1
    assert choice.backend == "chunked"
    assert "fused failed its self-test: ZeroDivisionError" in choice.reason


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_parameters_keep_their_names_and_arrays(family):
    model, config = mini.build(family)
    model.freeze()
    model.layers[0].linear_attn.out_proj.unfreeze()
    before, trainable = flat(model.parameters()), flat(model.trainable_parameters())
    swap_linear_attention(model, config)
    after = flat(model.parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert list(flat(model.trainable_parameters())) == list(trainable) != []


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_generation_with_a_cache_is_that_of_mlx_lm(family):
    stock = mini.build(family)[0].eval()
    model = swapped(family).eval()
    ours = list(generate_step(PROMPT, model, max_tokens=12, prefill_step_size=4))
    theirs = list(generate_step(PROMPT, stock, max_tokens=12, prefill_step_size=4))
    assert len(ours) == 12
    for (token, logprobs), (stock_token, stock_logprobs) in zip(ours, theirs, strict=True):
        assert int(token) == int(stock_token)
        assert mx.array_equal(logprobs, stock_logprobs)  # the same operations: bit for bit


@pytest.mark.parametrize("kernel", mini.kernels(chunk_size=5))
@pytest.mark.parametrize("family", mini.FAMILIES)
def test_logits_with_and_without_a_cache_agree(family, kernel):
    model, config = mini.build(family)
    swap_linear_attention(model, config, kernel=kernel, chunk_size=5)
    model.eval()
    tokens = mx.array(np.random.default_rng(1).integers(0, 300, (2, 13)))
    whole, cache = model(tokens), model.make_cache()
    pieces = [model(tokens[:, :6], cache=cache)]
    pieces += [model(tokens[:, t : t + 1], cache=cache) for t in range(6, 13)]
    for t, piece in zip(range(6, 13), pieces[1:], strict=True):
        assert mini.relative_l2(piece[:, 0], whole[:, t]) <= CACHED
    assert mini.relative_l2(pieces[0], whole[:, :6]) <= CACHED


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_training_and_evaluation_mode_run_the_same_rule(family):
    model = swapped(family)
    assert mx.array_equal(model.train()(PROMPT[None]), model.eval()(PROMPT[None]))


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_a_cache_is_refused_in_training(family):
    model = swapped(family).train()
    with pytest.raises(RuntimeError, match=r"a cache is for generation.*eval\(\)"):
        model(PROMPT[None], cache=model.make_cache())


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_padding_by_mask_is_that_of_mlx_lm(family):
    """A masked token neither writes nor decays nor reaches the convolution; what mlx-lm gives there is not defined."""
    stock, config = mini.build(family)
    layer = stock.layers[0].linear_attn
    x = mx.array(np.random.default_rng(2).standard_normal((2, 11, 64)).astype(np.float32))
    mask = mx.arange(11)[None] >= mx.array([[0], [4]])
    want = layer(x, mask)
    swap_linear_attention(stock, config)
    got = stock.layers[0].linear_attn(x, mask)
    assert mini.relative_l2(got[0], want[0]) <= CACHED
    assert mini.relative_l2(got[1, 4:], want[1, 4:]) <= CACHED


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_dtypes_of_a_bfloat16_model(family, tmp_path, monkeypatch):
    seen = {"blocks": [], "rule": []}
    block = {"qwen3_next": qwen3_next.Qwen3NextDecoderLayer}.get(family, qwen3_5.DecoderLayer)
    forward, rule = block.__call__, gdkernels.BACKENDS["chunked"].rule

    def watched_block(self, *args, **kwargs):
        y = forward(self, *args, **kwargs)
        seen["blocks"].append(y.dtype)
        return y

    def watched_rule(*inputs):
        outputs = rule(*inputs)
        seen["rule"].append([x.dtype for x in (*inputs[:-1], *outputs)])
        return outputs

    monkeypatch.setattr(block, "__call__", watched_block)
    mini.replace_rule(monkeypatch, "chunked", watched_rule)
    files = find_model(str(mini.write_checkpoint(tmp_path, family, dtype="bfloat16")))
    model = load_model(files)
    swap_linear_attention(model, files.config, kernel="chunked")
    adapt(model, rank=2)
    assert {x.dtype for n, x in flat(model.parameters()).items() if n.endswith("A_log")} == {mx.float32}
    assert {x.dtype for x in flat(model.trainable_parameters()).values()} == {mx.float32}

    def loss(parameters):
        model.update(parameters)
        return model(PROMPT[None]).astype(mx.float32).sum()

    gradients = mx.grad(loss)(model.trainable_parameters())
    assert {g.dtype for g in flat(gradients).values()} == {mx.float32}
    assert seen["blocks"] == [mx.bfloat16] * 4
    q, k, v, log_decay, beta, state, y, final = zip(*seen["rule"], strict=True)
    assert set(q + k + v + y) == {mx.bfloat16}
    assert set(log_decay + beta + state + final) == {mx.float32}


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_log_is_float32_whatever_the_checkpoint_holds(stored, tmp_path):
    folder = mini.write_checkpoint(tmp_path, dtype="bfloat16")
    weights = mx.load(str(folder / "model.safetensors"))
    dtype = getattr(mx, stored)
    weights = {n: x.astype(dtype) if n.endswith("A_log") else x for n, x in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    for asked in (None, "bfloat16", "float32"):
        model = load_model(find_model(str(folder)), dtype=asked)
        dtypes = {n: x.dtype for n, x in flat(model.parameters()).items()}
        logs = {n for n in dtypes if n.endswith("A_log")}
        assert len(logs) == 3
        assert {dtypes[n] for n in logs} == {mx.float32}
        assert {dtypes[n] for n in dtypes.keys() - logs} == {getattr(mx, asked or "bfloat16")}


def test_submodules_are_shared_not_copied():
    model, config = mini.build()
    before = [dict(block.linear_attn) for block in model.layers[:3]]
    swap_linear_attention(model, config)
    for block, parts in zip(model.layers, before, strict=False):
        assert all(block.linear_attn[name] is part for name, part in parts.items())
