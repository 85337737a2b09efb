"""gdtrain finetune: how a run stops early, and what is left of it."""

import math
import shutil
import signal
import subprocess
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from command import SCRIPT, adapter, call, environ, evaluated, metrics, write_rows
from mini import toy_tokenizer

from gdtrain.training.dry_step import DryStep


def start(*args: object) -> subprocess.Popen:
    """A run in a new process that has said its first train loss."""
    child = subprocess.Popen(
        [SCRIPT, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ()
    )
    assert child.stdout is not None
    assert any("train loss" in line for line in child.stdout)
    return child


def test_interrupt_saves(config):
    config(iters=100_000, steps_per_report=1, steps_per_eval=100_000)
    child = start("finetune", "c.yaml")
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Traceback" not in out + err
    (stop,) = metrics("run", "stop")
    assert 1 <= stop["iteration"] < 100_000
    trained = [name for name, x in adapter("run").items() if name.endswith("lora_b") and np.abs(x).max() > 0]
    assert len(trained) > 20
    assert evaluated("run")["loss"] != metrics("run", "val")[0]["loss"]
    assert not list(Path("run").rglob("partial*"))


def test_interrupt_is_said(config, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("gdtrain.commands.finetune.open_session", interrupted)
    config()
    assert call("finetune", "c.yaml")[::2] == (130, "gdtrain: interrupted\n")
    assert "Traceback" in call("finetune", "c.yaml", "--debug").err
    assert not Path("run").exists()


def test_interrupt_within_a_compiled_step(config, monkeypatch):
    """While a step is traced, the model holds placeholders."""
    from gdtrain.training import step

    def interrupted(*args):
        real(*args)
        raise KeyboardInterrupt

    real = step.token_loss
    monkeypatch.setattr(step, "token_loss", interrupted)
    monkeypatch.setattr("gdtrain.commands.finetune.dry_step", lambda *args: DryStep(1, 1, 0.0, 0.0))
    config(compile=True)
    Path("data/valid.jsonl").unlink()
    mx.enable_compile()  # nothing is built: the first trace is where it ends
    try:
        result = call("finetune", "c.yaml")
    finally:
        mx.disable_compile()
    assert result.code == 130
    monkeypatch.setattr(step, "token_loss", real)
    losses = [evaluated("run", "--split", "train", *more)["loss"] for more in ([], ["--no-adapter"])]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


def test_closed_pipe_saves(config):
    """`gdtrain finetune ... | head`: whatever the exit code, the work is not lost."""
    config(iters=8, steps_per_report=1, steps_per_eval=100)
    child = start("finetune", "c.yaml")
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    err = child.stderr.read()
    child.wait(timeout=60)
    assert "Traceback" not in err
    assert Path("run/adapters.safetensors").is_file()


@pytest.fixture
def poisoned(work, checkpoint):
    """A checkpoint whose embedding of "v" is not a number, which of the rows only those of valid have."""
    shutil.copytree(checkpoint, "poisoned")
    tensors = dict(mx.load("poisoned/model.safetensors"))
    (token,) = toy_tokenizer("plain").encode("v")
    tensors["language_model.model.embed_tokens.weight"][token] = math.nan
    mx.save_safetensors("poisoned/model.safetensors", tensors)
    return "poisoned"


def test_loss_that_is_not_finite(config, poisoned):
    """In the shorter batch, so that the step on the longest one does not see it."""
    write_rows("rows/train.jsonl", [{"text": "v" * n} for n in (8, 8)] + [{"text": "abc" * 20}] * 2)
    config(model=poisoned, data="rows", iters=4)
    result = call("finetune", "c.yaml")
    assert result.code == 3
    (stop,) = metrics("run", "stop")
    assert result.err.startswith(f"gdtrain: iteration {stop['iteration']}: the loss is nan")
    assert "train.jsonl:1" in result.err
    assert "train.jsonl:2" in result.err
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) == 1
    assert stop["iteration"] in (1, 2)
    assert "nan" in stop["reason"]


def test_validation_that_is_not_finite(config, poisoned):
    write_rows("data/test.jsonl", [{"prompt": "v", "completion": "no"}])
    config(model=poisoned)
    result = call("finetune", "c.yaml")
    assert result.code == 3
    assert "nan" in result.err
    assert "valid.jsonl:1" in result.err
    assert metrics("run", "stop")[0]["iteration"] == 0
    result = call("eval", "run", "--split", "test")
    assert result.code == 3
    assert "test.jsonl:1" in result.err


def test_last_good_adapter_is_kept(config):
    """An update of this size leaves finite weights whose loss is not finite; they are not to be saved."""
    config(optimizer="sgd", learning_rate=1e30, iters=5, steps_per_report=1)
    result = call("finetune", "c.yaml")
    assert result.code == 3
    assert result.err.startswith("gdtrain: iteration 2: ")
    assert math.isfinite(evaluated("run")["loss"])


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_out_of_memory(kind, config, monkeypatch):
    config(fine_tune_type=kind)

    def fail(*args):
        raise RuntimeError("[metal::malloc] Attempting to allocate 99 bytes")

    monkeypatch.setattr("gdtrain.training.loop.accumulate", fail)
    result = call("finetune", "c.yaml")
    assert result.code == 3
    assert "iteration 1: out of memory; lower max_seq_length" in result.err
    kept = "the last good weights are in run" if kind == "lora" else "its weights are not saved; saved before: best"
    assert kept in result.out
    assert Path("run/adapters.safetensors").exists() == (kind == "lora")
