"""gdtrain finetune --resume: a run that was stopped and gone on with is the run that never stopped, to the last bit."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from command import adapter, call, evaluated, finish, metrics, write_rows
from mini import toy_tokenizer, write_checkpoint

from gdtrain.training import loop

# Rows of several lengths: their order, and with it the shapes of the batches, is a part of what must go on.
LONG = [{"prompt": "q" * (3 * i % 17), "completion": "yes " * (1 + i % 5)} for i in range(11)]
COSINE = {"name": "cosine_decay", "arguments": [5e-3, 4], "warmup": 2}
EVERY = {"steps_per_report": 1, "steps_per_eval": 3, "save_every": 100}
CASES = {
    "adamw, warm-up and cosine, dropout": {
        "optimizer": "adamw",
        "lr_schedule": COSINE,
        "lora_parameters": {"dropout": 0.1},
    },
    "accumulation": {"grad_accumulation_steps": 3, "lora_parameters": {"dropout": 0.3}, "max_grad_norm": 0.5},
    "packing": {"packing": True, "max_seq_length": 64, "batch_size": 1, "grad_accumulation_steps": 2},
    "reports over several iterations": {"steps_per_report": 4},
    "adafactor, dora": {"optimizer": "adafactor", "fine_tune_type": "dora"},
    "muon": {"optimizer": "muon"},
    "momentum, full": {"optimizer": "sgd", "optimizer_config": {"sgd": {"momentum": 0.9}}, "fine_tune_type": "full"},
    "no checkpointing, last blocks": {"grad_checkpoint": False, "num_layers": 2},
}


@pytest.fixture
def rows(work):
    write_rows("data/train.jsonl", LONG)


def straight_and_resumed(config, iterations, *stops, **keys):
    """Runs into "straight" and "resumed"; the latter is ended and gone on with at these iterations."""
    config(**(EVERY | keys), iters=iterations)
    finish("finetune", "c.yaml", "--set", "adapter_path=straight")
    finish("finetune", "c.yaml", "--set", "adapter_path=resumed", "--set", f"iters={stops[0]}")
    for stop in (*stops[1:], iterations):
        finish("finetune", "c.yaml", "--set", "adapter_path=resumed", "--resume", "--set", f"iters={stop}")


def learned(run, kind="train"):
    """The last record of every iteration, without what is timed or measured."""
    keys = ("loss", "learning_rate", "grad_norm", "supervised_tokens")
    return {record["iteration"]: [record.get(key) for key in keys] for record in metrics(run, kind)}


def check_same(iterations):
    """Losses, learning rates, gradient norms, validations where both have them, and every bit of the adapter."""
    one, other = learned("straight"), learned("resumed")
    assert iterations in one
    assert {n: other[n] for n in one} == one
    one, other = learned("straight", "val"), learned("resumed", "val")
    assert {n: other[n] for n in one} == one
    assert sorted(adapter("straight")) == sorted(adapter("resumed"))
    for name, x in adapter("straight").items():
        np.testing.assert_array_equal(x, adapter("resumed")[name], err_msg=name)
    states = [tensors(run, iterations) for run in ("straight", "resumed")]
    assert states[0].keys() == states[1].keys()
    for name, x in states[0].items():
        np.testing.assert_array_equal(x, states[1][name], err_msg=name)


def tensors(run, iteration):
    return {k: np.array(x) for k, x in mx.load(f"{run}/checkpoints/{iteration:07d}/state.safetensors").items()}


@pytest.mark.parametrize("case", CASES)
def test_five_and_five_are_ten(case, rows, config):
    """Five of eleven rows in batches of two: within an epoch, within a window of three, before a report of four."""
    straight_and_resumed(config, 10, 5, **CASES[case])
    check_same(10)


def test_every_point(rows, config):
    """Many stops in one run, and then not a bit is different; the second epoch begins after six batches."""
    keys = {
        "grad_accumulation_steps": 4,
        "lora_parameters": {"dropout": 0.2},
        "optimizer": "adamw",
        "lr_schedule": COSINE,
    }
    straight_and_resumed(config, 13, *range(4, 13), **keys)
    check_same(13)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_other_families(family, rows, config):
    write_checkpoint(Path("model"), family, tokenizer=toy_tokenizer("plain"))
    straight_and_resumed(config, 6, 3, model="model", lora_parameters={"dropout": 0.1})
    check_same(6)


def test_a_resume_that_forgets_is_seen(rows, config, monkeypatch):
    """The negative control: without the random state the numbers differ."""
    monkeypatch.setattr("gdtrain.training.run_state.set_random_state", lambda state: None)
    straight_and_resumed(config, 6, 3, lora_parameters={"dropout": 0.3})
    with pytest.raises(AssertionError):
        check_same(6)


def test_what_is_said_and_left(rows, config):
    config(**EVERY, iters=4)
    finish("finetune", "c.yaml")
    before = Path("run/metrics.jsonl").read_text()
    out = finish("finetune", "c.yaml", "--resume", "--set", "iters=6", "--set", "steps_per_report=2")
    assert "resumed from run/checkpoints/0000004, iteration 4 of 6" in out
    assert Path("run/metrics.jsonl").read_text().startswith(before)
    (resume,) = metrics("run", "resume")
    assert (resume["iteration"], resume["iterations"]) == (4, 6)
    assert resume.keys() == metrics("run", "header")[0].keys()
    assert "iters: 6" in Path("run/config.yaml").read_text()
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == ["0000004", "0000006"]
    assert not Path("run-1").exists()


def test_nothing_left_to_do(rows, config):
    config(**EVERY, iters=3)
    finish("finetune", "c.yaml")
    weights = adapter("run")
    Path("run/adapters.safetensors").unlink()  # as if killed before it was saved
    finish("finetune", "c.yaml", "--resume")
    for name, x in weights.items():
        np.testing.assert_array_equal(x, adapter("run")[name], err_msg=name)
    assert len(learned("run")) == 3


def test_another_machine(rows, config, tmp_path):
    """Another folder for everything, another kernel, other intervals: all that does not change the run."""
    config(**EVERY, iters=6, lora_parameters={"dropout": 0.1})
    finish("finetune", "c.yaml", "--set", "adapter_path=straight")
    finish("finetune", "c.yaml", "--set", "adapter_path=there", "--set", "iters=3")
    Path("elsewhere").mkdir()
    for name in ("there", "data"):
        shutil.move(name, f"elsewhere/{name}")
    shutil.copytree(Path(json.loads(Path("c.yaml").read_text().split("\n")[0].removeprefix("model: "))), "elsewhere/m")
    keys = {"adapter_path": "elsewhere/there", "data": "elsewhere/data", "model": "elsewhere/m", "save_every": 2}
    sets = [f"--set={key}={value}" for key, value in {**keys, "kernel": "replay", "grad_checkpoint": False}.items()]
    out = finish("finetune", "c.yaml", "--resume", *sets)
    assert "grad_checkpoint: true in the checkpoint, false here; kernel: chunked in the checkpoint, replay here" in out
    one, other = learned("straight"), learned("elsewhere/there")
    for n in one:
        assert other[n] == pytest.approx(one[n], rel=1e-2)  # which rounds otherwise, and Adam makes much of it


CHANGES = {
    "a key": (["--set", "learning_rate=1e-4"], "learning_rate: 0.005 in the checkpoint, 0.0001 here"),
    "a nested key": (["--set", "lora_parameters.rank=4"], "lora_parameters.rank: 8 in the checkpoint, 4 here"),
    "a key that was null": (["--set", "max_grad_norm=1"], "max_grad_norm: null in the checkpoint, 1.0 here"),
    "the seed": (["--set", "seed=1"], "seed: 0 in the checkpoint, 1 here"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_config(change, rows, config):
    options, message = CHANGES[change]
    config(**EVERY)
    finish("finetune", "c.yaml")
    result = call("finetune", "c.yaml", "--resume", *options)
    assert (result.code, result.out.count("rows kept")) == (2, 0)  # before the data is read
    assert result.err.startswith("gdtrain: --resume: not the run of run/checkpoints/0000002:\n  ")
    assert message in result.err
    assert "resume_adapter_file" in result.err


def test_changed_data_and_model(rows, config, checkpoint):
    config(**EVERY)
    finish("finetune", "c.yaml")
    write_rows("data/train.jsonl", [*LONG[:-1], {"prompt": "q", "completion": "no"}])
    write_rows("data/valid.jsonl", [{"prompt": "q", "completion": "no"}])
    result = call("finetune", "c.yaml", "--resume")
    assert result.code == 2
    assert "data: train has changed: 11 rows, 435 tokens in the checkpoint, 11 rows, 4" in result.err
    assert "data: valid has changed: 5 rows" in result.err
    write_rows("data/train.jsonl", [{**row, "completion": row["completion"].replace("y", "Y")} for row in LONG])
    assert "with other contents" in call("finetune", "c.yaml", "--resume").err
    write_checkpoint(Path("other"), tokenizer=toy_tokenizer("plain"), seed=5)
    result = call("finetune", "c.yaml", "--resume", "--set", "model=other")
    assert "model: its config.json or its weights are not those of the checkpoint" in result.err


def damaged(name, cut):
    file = Path("run/checkpoints/0000004", name)
    if cut is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: cut * file.stat().st_size // 100])


@pytest.mark.parametrize("name", ["adapters.safetensors", "state.safetensors", "state.json"])
@pytest.mark.parametrize("cut", [None, 0, 1, 50, 99])
def test_damaged_checkpoints_are_passed_over(name, cut, rows, config):
    config(**(EVERY | {"save_every": 2}), iters=4)
    finish("finetune", "c.yaml")
    damaged(name, cut)
    out = finish("finetune", "c.yaml", "--resume")
    assert "checkpoint run/checkpoints/0000004 is passed over: " in out
    assert "resumed from run/checkpoints/0000002, iteration 2 of 4" in out
    assert "passed over" not in finish("finetune", "c.yaml", "--resume")
    assert Path("run/checkpoints/damaged-0000004").is_dir()


def test_a_bit_that_changed_on_disk(rows, config):
    config(**(EVERY | {"save_every": 2}), iters=4)
    finish("finetune", "c.yaml")
    file = Path("run/checkpoints/0000004/state.safetensors")
    contents = bytearray(file.read_bytes())
    contents[-3] ^= 1
    file.write_bytes(contents)
    assert "state.safetensors is not what was written" in finish("finetune", "c.yaml", "--resume")


def test_no_checkpoint(rows, config):
    config()
    result = call("finetune", "c.yaml", "--resume")
    assert result[::2] == (
        2,
        "gdtrain: --resume: run has no complete checkpoint; without --resume the run begins anew\n",
    )
    assert not Path("run").exists()
    for options in (["--dry-run"], ["--set", "train=false"]):
        assert "--resume goes on with a run" in call("finetune", "c.yaml", "--resume", *options).err


def test_resume_adapter_file_is_needed_only_once(rows, config):
    """A run that began from another adapter goes on from its own checkpoint."""
    config(**EVERY)
    finish("finetune", "c.yaml", "--set", "adapter_path=first")
    config(**EVERY, resume_adapter_file="first/adapters.safetensors")
    finish("finetune", "c.yaml")
    shutil.rmtree("first")
    finish("finetune", "c.yaml", "--resume", "--set", "iters=3")


def test_best_and_last_after_a_resume(rows, config):
    config(**(EVERY | {"steps_per_eval": 1, "early_stopping_patience": 2, "learning_rate": 0.3}), iters=12)
    finish("finetune", "c.yaml", "--set", "adapter_path=straight")
    finish("finetune", "c.yaml", "--set", "iters=2")
    finish("finetune", "c.yaml", "--resume")
    assert learned("run", "val") == learned("straight", "val")
    best = min(learned("run", "val").items(), key=lambda item: item[1][0])
    assert evaluated("run", "--checkpoint", "best")["loss"] == pytest.approx(best[1][0], rel=1e-6)
    assert metrics("run", "stop")[-1]["iteration"] == metrics("straight", "stop")[-1]["iteration"] < 12


@pytest.mark.parametrize("keys", ["iters=2", "epochs=0.2"])
def test_fewer_iterations_than_the_checkpoint_has(keys, rows, config):
    config(**EVERY, iters=4)
    finish("finetune", "c.yaml")
    options = ["--set", "iters=null"] if "epochs" in keys else []
    result = call("finetune", "c.yaml", "--resume", *options, "--set", keys)
    assert result.code == 2
    assert "run/checkpoints/0000004 comes after 4; accepted: as many or more, by iters or epochs" in result.err


def test_the_best_of_a_run_that_ended_stays_the_best(rows, config, monkeypatch):
    """The last validation of a run is one that a longer run would not make; its adapter is the best all the same."""
    losses = iter([6.0, 5.0, 1.0, 3.0])
    real = loop.evaluate_split
    monkeypatch.setattr(loop, "evaluate_split", lambda *x, **keys: replace(real(*x, **keys), loss=next(losses)))
    config(**(EVERY | {"steps_per_eval": 4}), iters=6)
    finish("finetune", "c.yaml")
    finish("finetune", "c.yaml", "--resume", "--set", "iters=8")
    assert json.loads(Path("run/best/validation.json").read_text()) == {"iteration": 6, "loss": 1.0}
    assert [r["iteration"] for r in metrics("run", "save") if r["path"] == "best"] == [0, 4, 6]


def test_a_damaged_checkpoint_does_not_push_out_a_good_one(rows, config):
    config(**(EVERY | {"save_every": 4}), iters=8)
    finish("finetune", "c.yaml")
    file = Path("run/checkpoints/0000008/state.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    finish("finetune", "c.yaml", "--resume", "--set", "iters=7", "--set", "save_every=1", "--set", "keep_checkpoints=1")
    assert "resumed from run/checkpoints/0000007" in finish("finetune", "c.yaml", "--resume", "--set", "iters=8")


def test_what_a_killed_run_left_is_tidied(rows, config):
    config(**EVERY)
    finish("finetune", "c.yaml")
    Path("run/partial-1-report.html").write_text("half")
    Path("run/best").rename("run/old-best")
    finish("finetune", "c.yaml", "--resume")
    assert Path("run/best/adapters.safetensors").is_file()
    assert not list(Path("run").rglob("partial-*"))


def test_keys_without_effect_are_said(rows, config):
    config(**EVERY)
    finish("finetune", "c.yaml")
    out = finish("finetune", "c.yaml", "--resume", "--set", "resume_adapter_file=gone.safetensors")
    assert "note: resume_adapter_file has no effect with --resume" in out
