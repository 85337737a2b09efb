"""benchmarks/tokenise.py at a tiny size, beside its committed result."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_tokenise(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "tokenise.py"), "--rows", "6000", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [row["from_cache"] for row in report["rows"]] == [False, True] * 2
    assert {row["rows_kept"] for row in report["rows"]} == {6000}
    masked, again, whole, whole_again = (row["supervised_tokens"] for row in report["rows"])
    assert (masked, whole) == (again, whole_again)
    assert 0 < masked < whole == report["rows"][2]["tokens"] - 6000
    committed = json.loads((BENCHMARKS / "tokenise-cpu.json").read_text(encoding="utf-8"))
    assert list(report) == list(committed)
    assert list(report["rows"][0]) == list(committed["rows"][0])
    assert committed["rows_of_data"] == 100_000
