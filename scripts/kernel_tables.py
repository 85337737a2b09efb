"""Writes the tables of kernels/README.md from benchmarks/stages-h200.json: python scripts/kernel_tables.py

They stand between two marks; the rest of the file is left as it is. Where the file and the JSON do not agree,
tests/benchmarks/test_kernel_tables.py fails.
"""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from gdkernels.fused.plan import Plan, plan  # noqa: E402
from gdkernels.portable.machine import Machine  # noqa: E402
from stage_counts import BACKWARD, FORWARD, STAGES, Count, count  # noqa: E402

README, MEASURED = ROOT / "kernels" / "README.md", ROOT / "benchmarks" / "stages-h200.json"
BEGIN = "<!-- from here on made by scripts/kernel_tables.py -->"
END = "<!-- up to here -->"

# Limits of an H200: dense bfloat16 products, and device memory.
H200_FLOPS, H200_BYTES = 989e12, 4800e9
# The crude model: t = max(F / (e P), bytes / (b BW)) + a launch. M4 Max: 40 cores, 256 operations a core and cycle,
# 1.578 GHz; 546 GB/s, of which such chips reach 0.65; 2.5 us for a launch that waits for the one before.
M4_MAX_FLOPS = 40 * 256 * 1.578e9
M4_MAX_BYTES = 0.65 * 546e9
LAUNCH_SECONDS = 2.5e-6
EFFICIENCIES = (0.4, 0.2)


def main() -> None:
    report = json.loads(MEASURED.read_text(encoding="utf-8"))
    README.write_text(with_tables(README.read_text(encoding="utf-8"), report), encoding="utf-8")


def with_tables(text: str, report: dict[str, Any]) -> str:
    """The text with what stands between the marks made anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    parts = [BEGIN, *(measured(report, shape) for shape in report["shapes"]), forecast(report), END]
    return before + "\n\n".join(parts) + after


def measured(report: dict[str, Any], shape: dict[str, Any]) -> str:
    """What the stages of one shape took, and the whole beside their sum."""
    machine = f"{report['device']}, MLX {report['mlx']}, {report['date']}"
    sizes = f"{_title(shape)}, {report['dtype']}, {shape['parts']} parts"
    title = f"**Measured**: {sizes}; {machine}. {_method(report, shape)}"
    head = ["stage", "GFLOP", "as partial products", "MB", "ms", "of the tensor cores' peak", "of the bandwidth"]
    rows = [
        [
            f"`{row['stage']}`",
            _giga(row["operations"]),
            _giga(row["partial_operations"]),
            f"{row['bytes'] / 1e6:.0f}",
            *_rates(row),
        ]
        for row in shape["stages"]
    ]
    return "\n\n".join([title, _table(head, rows), _whole(shape)])


def _rates(row: dict[str, Any]) -> list[str]:
    """Milliseconds, and the shares of both limits; without the shares where the time is below the resolution."""
    if row["ms"] is None:
        return [f"below {row['resolution_ms']:.3f}", "", ""]
    seconds = row["ms"] / 1e3
    return [
        f"{row['ms']:.3f}",
        _percent(row["partial_operations"] / seconds / H200_FLOPS),
        _percent(row["bytes"] / seconds / H200_BYTES),
    ]


def _method(report: dict[str, Any], shape: dict[str, Any]) -> str:
    most = report["repeats"]
    least = min(row.get("chains", most) for row in shape["stages"])
    number = str(most) if least == most else f"{least} to {most}"
    how = f"Medians of {number} chains of {report['chain']} launches"
    if report.get("plug_ms"):
        return f"{how}, each chain behind {report['plug_ms']:.0f} ms of other work: the GPU's time alone."
    return f"{how}; up to 0.1 ms of a launch is the host's."


def _whole(shape: dict[str, Any]) -> str:
    ms = {row["stage"]: row["ms"] or 0.0 for row in shape["stages"]}
    forward = sum(ms[stage] for stage in FORWARD)
    sums = {"fused": (f"{forward:.2f}", f"{forward + sum(ms[stage] for stage in BACKWARD):.2f}")}
    rows = []
    for row in shape["whole"]:
        name = f"`{row['backend']}`"
        if "refused" in row:
            rows.append([name, f"refused: {row['refused']}", "", "", ""])
            continue
        of_stages = sums.get(row["backend"], ("", ""))
        rows.append([f"{name}, forward", of_stages[0], f"{row['forward_ms']:.2f}", ""])
        in_a_row = f"{row['pipelined_ms']:.2f}" if "pipelined_ms" in row else ""
        rows.append([f"{name}, forward + backward", of_stages[1], f"{row['forward_backward_ms']:.2f}", in_a_row])
    return _table(["ms", "sum of the stages", "evaluated alone", "one of ten in a row"], rows)


def forecast(report: dict[str, Any]) -> str:
    """What the crude model says of the same shapes on an M4 Max."""
    counts = {_title(shape): _metal_counts(shape) for shape in report["shapes"]}
    rows = []
    for stage in STAGES:
        cells = [cell for of in counts.values() for cell in (_giga(of[stage].operations), _range([of[stage]]))]
        rows.append([f"`{stage}`", *cells])
    for name, stages in (("forward", FORWARD), ("forward + backward", FORWARD + BACKWARD)):
        cells = []
        for of in counts.values():
            every = [of[stage] for stage in stages]
            cells += [_giga(sum(one.operations for one in every)), _range(every)]
        rows.append([f"**{name}**", *cells])
    head = ["stage", *(column for title in counts for column in (f"{title}: GFLOP", "ms"))]
    low, high = EFFICIENCIES
    title = f"**Forecast, not measured**: M4 Max (40 cores), ms at e = {low} and e = {high}."
    return f"{title}\n\n{_table(head, rows)}"


def _metal_counts(shape: dict[str, Any]) -> dict[str, Count]:
    sizes = sizes_of(shape, "metal")
    return {stage: count(stage, sizes, shape["tokens"]) for stage in STAGES}


def sizes_of(shape: dict[str, Any], machine: Machine) -> Plan:
    """The plan that a machine would take for a measured shape."""
    Hk, Hv, Dk, Dv = map(int, shape["shape"].split(","))
    return plan(machine, shape["parts"] == 3, shape["B"], Hk, Hv, Dk, Dv, shape["C"], mx.bfloat16)


def model_seconds(counted: Count, efficiency: float) -> float:
    """One launch on an M4 Max by the crude model."""
    arithmetic = counted.operations / (efficiency * M4_MAX_FLOPS)
    return max(arithmetic, counted.bytes / M4_MAX_BYTES) + LAUNCH_SECONDS


def _range(counts: list[Count]) -> str:
    low, high = (f"{1e3 * sum(model_seconds(one, e) for one in counts):.2g}" for e in EFFICIENCIES)
    return low if low == high else f"{low} to {high}"


def _title(shape: dict[str, Any]) -> str:
    return f"({shape['shape'].replace(',', ', ')}), T = {shape['tokens']}"


def _giga(number: float) -> str:
    return f"{number / 1e9:.1f}"


def _percent(fraction: float) -> str:
    return f"{fraction:.0%}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
