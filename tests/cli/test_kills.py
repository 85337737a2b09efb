"""A run that is killed at any moment is not lost: fifty times, and it learns what one learns that was never killed."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from command import adapter, environ, finish, metrics

from gdtrain.config_file import load_config

KILLS = 50
PROGRAM = Path(__file__).with_name("kill_runs.py")


def test_killed_again_and_again(config, work):
    """With a checkpoint after every iteration, so that a good part of the time goes into writing."""
    config(save_every=1, iters=100_000, steps_per_eval=7, lora_parameters={"dropout": 0.1}, keep_checkpoints=2)
    done = subprocess.run(
        [sys.executable, PROGRAM, work, str(KILLS)], capture_output=True, text=True, env=environ(), timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["kills"] == len(found["iterations"]) == KILLS
    assert found["iterations"] == sorted(found["iterations"])
    assert len(set(found["iterations"])) >= 4 * KILLS // 5
    assert found["in_writing"] > 0
    log = Path("log").read_text(encoding="utf-8")
    assert "passed over" not in log
    assert log.count("resumed from") >= 4 * KILLS // 5

    last = found["iterations"][-1] + 3
    finish("finetune", "c.yaml", "--resume", "--set", f"iters={last}")
    assert not list(Path("run").rglob("partial-*"))
    assert load_config(Path("run/config.yaml")).iters == last
    finish("finetune", "c.yaml", "--set", "adapter_path=straight", "--set", f"iters={last}", "--set", "save_every=1000")
    losses = [{record["iteration"]: record["loss"] for record in metrics(run, "val")} for run in ("straight", "run")]
    assert {n: losses[1][n] for n in losses[0]} == losses[0]
    for name, x in adapter("straight").items():
        np.testing.assert_array_equal(x, adapter("run")[name], err_msg=name)
