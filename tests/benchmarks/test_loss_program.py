"""benchmarks/loss.py on a CPU at a tiny size."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "loss.py"
# 64 rows of 4,096 logits at 16 bytes are 4.2 MB.
SIZES = ("--rows", "512", "--hidden", "16", "--vocabulary", "4096", "--dtype", "float32", "--repeats", "1")


def run(folder, *options):
    command = [sys.executable, str(PROGRAM), *SIZES, *options, "--json", str(folder / "out.json")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return json.loads((folder / "out.json").read_text(encoding="utf-8"))


def test_blocks_take_less_and_give_the_same(tmp_path):
    report = run(tmp_path, "--budget-gb", "0.0042,0.1")
    everything, blocks, one = report["variants"]
    assert [x["variant"] for x in report["variants"]] == ["all logits", "0.0042 GB", "0.1 GB"]
    assert 2 * blocks["peak_gb"] < one["peak_gb"] <= everything["peak_gb"]
    assert everything["peak_gb"] > 512 * 4096 * 4 / 1e9
    for row in report["variants"]:
        assert abs(row["loss"] / everything["loss"] - 1) < 1e-6
        assert row["error"] < 1e-5
        assert row["ms_min"] <= row["ms"] <= row["ms_max"]
    assert {"rows", "hidden", "vocabulary", "dtype", "device", "date"} <= set(report)


def test_without_all_logits(tmp_path):
    (row,) = run(tmp_path, "--budget-gb", "0.0042", "--no-all-logits")["variants"]
    assert row["error"] is None
