"""A disk that is full in the middle of a run: one message, and what was saved before stays."""

import resource
from pathlib import Path

import pytest
from command import call, evaluated, finish, metrics

from gdtrain.training import step

KEYS = {"iters": 6, "save_every": 2, "steps_per_eval": 2, "steps_per_report": 1, "lora_parameters": {"dropout": 0.1}}


@pytest.fixture
def full_after(monkeypatch):
    """full_after(n): from iteration n on no file grows beyond 8 kB; metrics.jsonl is shorter, adapters are not."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    from gdtrain.training import loop

    real = loop.accumulate

    def choose(iteration):
        calls = []

        def accumulate(*args):
            calls.append(args)
            if len(calls) == iteration:
                resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, before[1]))
            return real(*args)

        monkeypatch.setattr(loop, "accumulate", accumulate)

    yield choose
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk(config, full_after):
    config(**KEYS)
    finish("finetune", "c.yaml", "--set", "adapter_path=straight")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    full_after(3)
    result = call("finetune", "c.yaml")
    assert result.code == 2
    assert "cannot be written" in result.err
    assert len(result.err.splitlines()) == 1
    assert "could not be saved" in result.out
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["0000002"]
    assert not list(Path("run").rglob("partial-*"))
    assert evaluated("run", "--checkpoint", "2")["loss"] == metrics("run", "val")[1]["loss"]
    assert "resumed from run/checkpoints/0000002" in finish("finetune", "c.yaml", "--resume")
    losses = [{r["iteration"]: r["loss"] for r in metrics(run, "train")} for run in ("straight", "run")]
    assert losses[0] == losses[1]


def test_full_before_the_first_checkpoint(config, full_after):
    config(**KEYS)
    full_after(1)
    result = call("finetune", "c.yaml")
    assert result.code == 2
    assert "cannot be written" in result.err
    assert not Path("run/adapters.safetensors").exists()


def test_full_while_metrics_are_written(config, monkeypatch):
    """Nothing is left in a buffer that would raise again where no one waits for it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    config(**(KEYS | {"save_every": 100, "steps_per_eval": 100}))
    real = step.accumulate

    def accumulate(*args):
        resource.setrlimit(resource.RLIMIT_FSIZE, (Path("run/metrics.jsonl").stat().st_size + 50, before[1]))
        return real(*args)

    monkeypatch.setattr("gdtrain.training.loop.accumulate", accumulate)
    try:
        result = call("finetune", "c.yaml")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.code == 2
    assert result.err == "gdtrain: adapter_path: run/metrics.jsonl cannot be written: File too large\n"
