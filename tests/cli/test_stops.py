"""gdtrain finetune: how a run stops early, and what is left of it."""

import importlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from command import SCRIPT, adapter, call, environ, evaluated, finish, metrics, write_rows
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
    assert err == f"gdtrain: interrupted at iteration {stop['iteration']}; --resume goes on from there\n"
    assert "interrupted: stopping after this iteration" in out


def test_interrupt_is_said(config, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("gdtrain.commands.finetune.open_session", interrupted)
    config()
    assert call("finetune", "c.yaml")[::2] == (130, "gdtrain: interrupted\n")
    assert "Traceback" in call("finetune", "c.yaml", "--debug").err
    assert not Path("run").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["training.loop.accumulate", "evaluation.collate"])
def test_a_signal_at_any_place(number, where, config, monkeypatch):
    """It waits for the end of the iteration, or of a batch of the validation, and nothing is lost or done twice."""
    config(iters=7, steps_per_report=1, steps_per_eval=2, grad_accumulation_steps=4, lora_parameters={"dropout": 0.2})
    finish("finetune", "c.yaml", "--set", "adapter_path=straight")
    module, name = f"gdtrain.{where}".rsplit(".", 1)
    real, calls = getattr(importlib.import_module(module), name), []

    def signalled(*args, **keys):
        calls.append(args)
        if len(calls) == 5:
            os.kill(os.getpid(), number)
        return real(*args, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(f"gdtrain.{where}", signalled)
        result = call("finetune", "c.yaml")
    asked = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[number]
    stopped = 5 if "accumulate" in where else 2  # three batches a validation, and the second is of iteration 2
    assert result[::2] == (130, f"gdtrain: {asked} at iteration {stopped}; --resume goes on from there\n")
    assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)
    assert metrics("run", "stop")[-1]["iteration"] == stopped
    finish("finetune", "c.yaml", "--resume")
    for kind in ("train", "val"):
        losses = [[(r["iteration"], r["loss"]) for r in metrics(run, kind)] for run in ("straight", "run")]
        assert losses[0] == losses[1]
    for tensor, x in adapter("straight").items():
        np.testing.assert_array_equal(x, adapter("run")[tensor], err_msg=tensor)


# An iteration that would take minutes, in which no handler of Python's can run.
ENDLESS = """
import gdtrain.cli, gdtrain.training.loop as loop, mlx.core as mx, time
loop.accumulate = lambda *args: time.sleep(300)
gdtrain.cli.main()
"""


@pytest.fixture
def endless(config):
    """A run in its first iteration, which does not end."""
    config()
    command = [sys.executable, "-c", ENDLESS, "finetune", "c.yaml"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ()) as child:
        assert any("0 |" in line for line in child.stdout or ())
        yield child
        child.kill()


def test_a_second_signal_ends_at_once(endless):
    endless.send_signal(signal.SIGINT)
    assert "once more ends at once" in endless.stdout.readline()
    assert endless.poll() is None
    time.sleep(0.5)  # two that come together are one request
    endless.send_signal(signal.SIGINT)
    assert endless.wait(timeout=20) == 130
    assert "Traceback" not in endless.stdout.read()


def test_two_runs_into_one_directory(endless):
    """The second is refused before it reads data, also with --resume, and free again when the first has ended."""
    for options in ([], ["--resume"], ["--dry-run"]):
        result = call("finetune", "c.yaml", *options)
        assert (result.code, "rows kept" in result.out) == (2, False)
        assert result.err.startswith(f"gdtrain: adapter_path: run is in use by a run, process {endless.pid} on ")
    endless.kill()
    endless.wait()
    finish("finetune", "c.yaml")


def test_a_fault_within_a_compiled_step(config, monkeypatch):
    """While a step is traced, the model holds placeholders."""
    from gdtrain.training import step

    def interrupted(*args):
        real(*args)
        raise RuntimeError("[malloc] no more")

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
    assert result.code == 3
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


LOWER = "lower max_seq_length (now 2048) or batch_size (now 2)"
WATCHDOG = (
    f"the watchdog of the GPU ended a kernel that took too long; {LOWER}; on a Mac with its display asleep there is"
)
METAL = "[METAL] Command buffer execution failed: "
OF_THE_DEVICE = {
    "[metal::malloc] Attempting to allocate 99 bytes": f"out of memory; {LOWER} or ",
    METAL + "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)": f"out of memory; {LOWER}",
    METAL + "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)": WATCHDOG,
    METAL + "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)": WATCHDOG,
    "[metal::malloc] Resource limit (499000) exceeded.": "too many buffers at once; lower max_seq_length (now 2048);",
}


@pytest.mark.parametrize("error", OF_THE_DEVICE)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_errors_of_the_device(kind, error, config, monkeypatch):
    """They name the batch, the blocks and what to change, and the last good weights are there."""
    config(fine_tune_type=kind)

    def fail(*args):
        raise RuntimeError(error)

    monkeypatch.setattr("gdtrain.training.loop.accumulate", fail)
    result = call("finetune", "c.yaml")
    assert result.code == 3
    assert result.err.startswith(f"gdtrain: iteration 1, B = 2, T = 32, 4 blocks: {OF_THE_DEVICE[error]}")
    assert f"({error})" in result.err
    kept = "the last good weights are in run" if kind == "lora" else "its weights are not saved; saved before: best"
    assert kept in result.out
    assert Path("run/adapters.safetensors").exists() == (kind == "lora")


@pytest.mark.parametrize("arguments", [["finetune", "c.yaml"], ["eval", "run"], ["eval", "run", "--split", "test"]])
def test_errors_of_the_device_in_an_evaluation(arguments, trained, monkeypatch):
    """They name the batch of the evaluation, not one of the training."""
    write_rows("data/valid.jsonl", [{"prompt": "v" * 200, "completion": "yes"}] * 3)

    def fail(*args):
        raise RuntimeError("[metal::malloc] Resource limit (499000) exceeded.")

    monkeypatch.setattr("gdtrain.evaluation.token_loss", fail)
    result = call(*arguments)
    assert result.code == 3
    when = "validation at iteration 0" if arguments[0] == "finetune" else "evaluation"
    size = "B = 2, T = 32" if "test" in arguments else "B = 2, T = 224"
    assert result.err.startswith(f"gdtrain: {when}, {size}, 4 blocks: too many buffers at once")


def test_a_loss_beyond_the_range_of_its_perplexity(trained, monkeypatch):
    monkeypatch.setattr("gdtrain.evaluation.token_loss", lambda *args: mx.array(1e6))
    assert evaluated("run")["perplexity"] is None
    assert "perplexity  none" in finish("eval", "run")


def test_terminated_before_the_training(config, monkeypatch):
    config()
    real = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("gdtrain.commands.finetune.open_session", lambda *args: os.kill(os.getpid(), signal.SIGTERM))
    assert call("finetune", "c.yaml")[::2] == (130, "gdtrain: terminated\n")
    assert signal.getsignal(signal.SIGTERM) is real
    assert not Path("run").exists()


def test_a_signal_while_the_last_files_are_written(config, monkeypatch):
    """The run is complete; what would follow is left out."""
    from gdtrain.training.run_files import RunFiles

    real = RunFiles.save

    def save(*args):
        os.kill(os.getpid(), signal.SIGINT)
        real(*args)
        time.sleep(0.1)  # the watcher's turn

    monkeypatch.setattr(RunFiles, "save", save)
    config(test=True)
    result = call("finetune", "c.yaml")
    assert (result.code, "test loss" in result.out) == (130, False)
    assert Path("run/adapters.safetensors").is_file()
