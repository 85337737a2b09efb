"""Runs on quantised bases, from config to adapter: C54."""

import math
from pathlib import Path

import pytest
from command import call, evaluated, metrics, write_config
from mini import FAMILIES, toy_tokenizer
from quantised import MODES, write_quantised

COMMON = ("affine 4", "affine 8", "mxfp4", "nvfp4", "mxfp8")
CASES = [(family, mode) for family in FAMILIES for mode in (MODES if family == "qwen3_5" else COMMON)]


@pytest.mark.parametrize(("family", "mode"), CASES)
def test_train_and_evaluate(family, mode, work):
    model = write_quantised(Path("model"), family, **MODES[mode])
    toy_tokenizer("plain").save_pretrained(str(model))
    before = {file: file.read_bytes() for file in model.iterdir()}
    write_config(model="model", data="data", adapter_path="run", iters=4, batch_size=2, learning_rate=5e-3)
    result = call("finetune", "c.yaml", "--set", "lora_parameters.scale=2")
    assert (result.code, result.err) == (0, "")
    losses = [record["loss"] for record in metrics("run", "val")]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
    assert evaluated("run")["loss"] == pytest.approx(losses[-1], abs=1e-12)
    assert {file: file.read_bytes() for file in model.iterdir()} == before
