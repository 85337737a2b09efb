"""The tables of kernels/README.md are those of the committed measurements."""

import json
import sys
from pathlib import Path

import pytest
from stage_counts import STAGES, Count

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

import kernel_tables  # noqa: E402


def report():
    return json.loads(kernel_tables.MEASURED.read_text(encoding="utf-8"))


def test_readme_agrees():
    """python scripts/kernel_tables.py writes them anew."""
    text = kernel_tables.README.read_text(encoding="utf-8")
    assert kernel_tables.with_tables(text, report()) == text


def test_counts_are_those_of_today():
    """What the measured kernels were counted to do is what they are counted to do now."""
    for shape in report()["shapes"]:
        assert [row["stage"] for row in shape["stages"]] == list(STAGES)
        sizes = kernel_tables.sizes_of(shape, "cuda")
        for row in shape["stages"]:
            counted = kernel_tables.count(row["stage"], sizes, shape["tokens"])
            assert counted == Count(row["operations"], row["partial_operations"], row["bytes"])


def test_what_bounds_them():
    """The README's reasons lean on these."""
    first, second = ({row["stage"]: row for row in shape["stages"]} for shape in report()["shapes"])
    for stage in ("forward", "reverse"):
        assert second[stage]["operations"] < 0.4 * first[stage]["operations"]
        assert second[stage]["ms"] > 0.5 * first[stage]["ms"]
    for stages in (first, second):
        assert max(stages.values(), key=lambda row: row["bytes"] / row["ms"])["stage"] == "delta"


def test_below_the_resolution():
    """It is said so in its row, and adds nothing to the sum."""
    measured = report()
    first = measured["shapes"][0]
    gates = first["stages"][-1]
    whole = kernel_tables.measured(measured, first)
    assert "| 0.018 | 0% | 8% |" in whole
    gates |= {"ms": None, "resolution_ms": 0.021, "chains": 12}
    table = kernel_tables.measured(measured, first)
    assert "| 7 | below 0.021 |  |  |" in table
    assert "| 0.51 | 1.12 |" in table
    assert "Medians of 12 to 20 chains" in table


def test_model():
    """32.3 GFLOP at half of 16.2 TFLOP/s, or 0.355 GB at 0.65 of 546 GB/s; each with a launch of 2.5 us."""
    flops = kernel_tables.M4_MAX_FLOPS
    assert kernel_tables.model_seconds(Count(round(2e-3 * flops), 0, 0), 0.5) == pytest.approx(4.0025e-3)
    assert kernel_tables.model_seconds(Count(0, 0, 354_900_000), 0.5) == pytest.approx(1.0025e-3)
