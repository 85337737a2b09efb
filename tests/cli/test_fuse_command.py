"""gdtrain fuse: from a run to a model of its own."""

import json
import os
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from command import call, finish, run, write_config
from mini import FAMILIES, build, relative_l2, write_checkpoint

from gdtrain.arrays import flat
from gdtrain.config_file import load_config

TOKENS = mx.array([[5, 17, 250, 3, 99, 4, 31]])


def logits(model):
    return model(TOKENS, cache=model.make_cache())


def by_adapter(folder="run"):
    return mlx_lm.load(load_config(Path(folder, "config.yaml")).model, adapter_path=folder)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_model_is_the_adapted_one_in_stock_mlx_lm(family, family_run, tmp_path, monkeypatch):
    monkeypatch.chdir(family_run(family))
    out = finish("fuse", "run", "--output", tmp_path / "made" / "fused")
    fused, tokenizer = mlx_lm.load(str(tmp_path / "made" / "fused"))  # with its tokenizer
    adapted = by_adapter()
    # A run of two iterations: the adapter does little, so what it does is compared. Float32 sums in another order.
    base = mlx_lm.load("model")[0]
    assert relative_l2(logits(fused) - logits(base), logits(adapted) - logits(base)) <= 1e-3
    assert relative_l2(logits(fused), logits(base)) > 1e-4
    assert tokenizer.has_chat_template
    lines = out.splitlines()
    assert "merged in float32, stored as before" in lines[0]
    assert "copied byte for byte" in lines[0]
    assert lines[1].startswith("the adapter changes these weights by ")
    assert lines[-1] == f"saved: {tmp_path / 'made' / 'fused'}"
    assert {p.name for p in Path("model").iterdir()} == {p.name for p in (tmp_path / "made" / "fused").iterdir()}
    assert (Path("model/config.json")).read_bytes() == (tmp_path / "made" / "fused" / "config.json").read_bytes()


def test_generates_as_the_run_does(trained):
    finish("fuse", "run", "--output", "fused", "--checkpoint", "best")
    texts = [
        call("generate", *target, "--prompt", "v0", "--max-tokens", "6").out
        for target in (["run", "--checkpoint", "best"], ["fused"], ["run", "--no-adapter"])
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.fixture
def quantised(config):
    """A run on a 4-bit base, in `run`."""
    write_checkpoint(Path("model"))
    model, _ = build()
    nn.quantize(model, group_size=32, bits=4)
    mx.save_safetensors("model/model.safetensors", flat(model.parameters()), metadata={"format": "mlx"})
    settings = json.loads(Path("model/config.json").read_text())
    settings["quantization"] = settings["quantization_config"] = {"group_size": 32, "bits": 4}
    Path("model/config.json").write_text(json.dumps(settings))
    config(model="model", iters=4, mask_prompt=True, learning_rate=2e-4)
    finish("finetune", "c.yaml")


def test_quantised_base(quantised):
    out = finish("fuse", "run", "--output", "again")
    assert "quantised again (affine, 4 bits, groups of 32)" in out
    assert "--dequantize keeps it" in out  # the adapter of four iterations is smaller than the steps of 4 bits
    again = mlx_lm.load("again")[0]
    assert [m for _, m in again.named_modules() if isinstance(m, nn.QuantizedLinear)]

    out = finish("fuse", "run", "--output", "dense", "--dequantize")
    assert "merged and stored unquantised" in out
    dense, adapted, base = mlx_lm.load("dense")[0], by_adapter(), mlx_lm.load("model")[0]
    assert not [m for _, m in dense.named_modules() if isinstance(m, nn.QuantizedLinear | nn.QuantizedEmbedding)]
    assert relative_l2(logits(dense), logits(adapted)) <= 1e-5
    assert relative_l2(logits(adapted), logits(base)) > 1e-3


def test_a_moved_base(trained, checkpoint):
    text = Path("run/config.yaml").read_text()
    assert str(checkpoint) in text
    Path("run/config.yaml").write_text(text.replace(str(checkpoint), "/moved/away"))
    result = call("fuse", "run", "--output", "fused")
    assert result.code == 2
    assert "no folder /moved/away" in result.err
    finish("fuse", "run", "--output", "fused", "--model", checkpoint)
    assert Path("fused/model.safetensors").is_file()


def test_an_adapter_alone(trained):
    """A checkpoint's folder, or what export --format mlx-lm writes: they name their base."""
    finish("export", "run", "--format", "mlx-lm", "--output", "alone")
    for folder, output in (("run", "one"), ("alone", "two")):
        finish("fuse", folder, "--output", output)
    assert Path("one/model.safetensors").read_bytes() == Path("two/model.safetensors").read_bytes()


def test_full(config, checkpoint):
    config(fine_tune_type="full", num_layers=1)
    finish("finetune", "c.yaml")
    finish("fuse", "run", "--output", "fused")
    adapted = mlx_lm.load(str(checkpoint), adapter_path="run")[0]
    assert relative_l2(logits(mlx_lm.load("fused")[0]), logits(adapted)) <= 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--output", "data"], "--output: data is not empty; accepted: a new or an empty folder"),
        (["run", "--output", "c.yaml"], "--output: c.yaml is there and is no folder"),
        (["run", "--output", "c.yaml/x"], "--output: c.yaml/x: "),
        (["run", "--output", "fused", "--dequantize"], "--dequantize: the base is not quantised"),
        (["run", "--output", "fused", "--checkpoint", "3"], "--checkpoint: run has no '3'; it has: last, best"),
        (["nowhere", "--output", "fused"], "nowhere does not exist; accepted: a run directory"),
        (["c.yaml", "--output", "fused"], "c.yaml is a file"),
        (["data", "--output", "fused"], "data is no run directory: it has neither config.yaml nor adapter_config.json"),
    ],
)
def test_faults(arguments, message, trained):
    before = sorted(os.listdir())
    result = call("fuse", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert sorted(os.listdir()) == before


def test_an_empty_folder_will_do(trained):
    Path("fused").mkdir()
    finish("fuse", "run", "--output", "fused")
    assert Path("fused/model.safetensors").is_file()
    assert not list(Path().glob(".*partial"))


def test_an_adapter_that_does_not_fit(trained, tmp_path):
    write_checkpoint(Path("other"), hidden_size=32)
    result = call("fuse", "run", "--output", "fused", "--model", "other")
    assert result.code == 2
    assert "does not fit the model" in result.err
    assert not Path("fused").exists()


def test_tiny(work):
    write_config(model="tiny", data="data", adapter_path="run", iters=1, batch_size=1)
    finish("finetune", "c.yaml")
    result = run("fuse", "run", "--output", "fused")
    assert (result.code, result.err) == (0, "")
    assert mlx_lm.load("fused")[1].has_chat_template
