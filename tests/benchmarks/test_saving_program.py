"""The program that measures what saving costs, and what it found."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_saving(tmp_path, monkeypatch):
    monkeypatch.chdir(BENCHMARKS.parent)
    options = ("iters=4", "save_every=2", "steps_per_eval=4", "val_batches=1")
    command = [sys.executable, "benchmarks/saving.py", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(
        [*command, *(f"--set={option}" for option in options)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    committed = json.loads((BENCHMARKS / "saving-cpu.json").read_text(encoding="utf-8"))
    assert list(report) == list(committed)
    assert report["writes"]["checkpoints"] == 2
    assert report["writes"]["adapter"] == 1
    assert report["writes"]["best"] >= 1
    assert report["writes"]["page"] == report["writes"]["records"]
    assert min(report["write_seconds"].values()) > 0
    assert sum(report["write_seconds"].values()) < report["seconds"]


def test_the_quickstart_spends_less_than_three_per_cent():
    committed = json.loads((BENCHMARKS / "saving-cpu.json").read_text(encoding="utf-8"))
    assert (committed["config"], committed["set"]) == ("configs/quickstart.yaml", [])
    assert committed["share"] < 0.03
