"""gdtrain init: a config that is right as it is written, and fits."""

import json
import shutil
from pathlib import Path

import pytest
from command import call, finish, metrics

from gdtrain.config_file import load_config
from gdtrain.model.tiny_path import tiny_model_path


def test_what_it_writes_can_be_run(work, checkpoint):
    out = finish("init", str(checkpoint), "--output", "my.yaml", "--data", "data")
    assert out.splitlines()[-1] == "next: put your rows into data, then gdtrain check my.yaml"
    config = load_config(Path("my.yaml"))
    assert (config.model, config.data, config.adapter_path) == (str(checkpoint), "data", "runs/mini")
    text = Path("my.yaml").read_text(encoding="utf-8")
    assert text.startswith("# gdtrain finetune my.yaml\n")
    commented = [line.index(" # ") for line in text.splitlines() if " # " in line]
    assert len(commented) >= 10
    assert len(set(commented)) == 1
    finish("check", "my.yaml")
    finish("plan", "my.yaml")
    finish("finetune", "my.yaml", "--set", "epochs=null", "--set", "iters=2")
    assert metrics("runs/mini", "val")


def test_less_memory_gives_shorter_rows(work):
    """Down to a refusal that says what would do."""
    sizes = []
    for budget in ("64", "0.3", "0.1"):
        finish("init", "tiny", "--output", f"{budget}.yaml", "--budget-gb", budget)
        config = load_config(Path(f"{budget}.yaml"))
        sizes.append((config.max_seq_length, config.batch_size))
        assert config.batch_size * config.grad_accumulation_steps == 8
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 1
    result = call("init", "tiny", "--output", "none.yaml", "--budget-gb", "0.001")
    assert result.code == 2
    assert "no config fits 0.001 GB: one row of 256 tokens is forecast to take" in result.err
    assert not Path("none.yaml").exists()


def test_a_config_json_alone_will_do(work):
    Path("model").mkdir()
    shutil.copy(tiny_model_path() / "config.json", "model/config.json")
    finish("init", "model", "--data", "my rows: all")
    assert load_config(Path("config.yaml")).data == "my rows: all"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["tiny", "--output", "there.yaml"], "--output: there.yaml is there already"),
        (["tiny", "--output", "no/folder/c.yaml"], "--output: no/folder/c.yaml cannot be written"),
        (["./none"], "model: no folder ./none"),
        (["tiny", "--budget-gb", "0"], "--budget-gb: 0; accepted: a number above 0"),
    ],
)
def test_faults(arguments, named, work):
    Path("there.yaml").write_text("mine")
    result = call("init", *arguments)
    assert (result.code, result.out) == (2, "")
    assert named in result.err
    assert Path("there.yaml").read_text() == "mine"


def test_a_model_of_another_kind(work):
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "llama" in call("init", "model").err
