"""Time and peak memory of forward + backward of the gated delta rule against mlx-lm's loop, all six gradients.

    python benchmarks/rule.py --json benchmarks/rule-cpu.json

Every variant runs in a process of its own, because the peak is one of the process; the variants take turns, so that a
change in the machine's load meets all of them. Times are medians; ratios are those of one run of this program.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from gdtrain.bench.machine import describe_machine
from gdtrain.bench.shapes import LOOP, Case, Shape

# Chunk sizes; None is the default of the device.
VARIANTS = {LOOP: None, "replay": None, "chunked": None, "chunked, C = 64": 64, "chunked, C = 16": 16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="4,8,64,64", help="Hk,Hv,Dk,Dv")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5, help="processes for each variant")
    parser.add_argument("--repeats", type=int, default=4, help="timed repetitions in each process")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure_variant(args.measure, args)))
        return
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for _ in range(args.rounds):
        for name in VARIANTS:
            command = [sys.executable, __file__, *sys.argv[1:], "--measure", name]
            runs[name].append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    report = summarise(runs, args)
    for row in report["rows"]:
        print(
            "{variant:>16}  {ms:8.1f} ms  {peak_mb:7.1f} MB  1/{speedup:.1f} time  1/{saving:.1f} memory".format(**row)
        )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measure_variant(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Times in ms and the peak in bytes, inputs included, of one variant in this process."""
    import mlx.core as mx

    from gdtrain.bench.measure import draw_inputs, layer_rule, loop_rule, measure

    shape = Shape(*map(int, args.shape.split(",")))
    inputs = draw_inputs(Case(args.shape, shape, 1, args.tokens, args.dtype))
    rule = loop_rule(inputs) if name == LOOP else layer_rule(inputs, name.split(",")[0], VARIANTS[name])
    timing = measure(rule, inputs.primals, inputs.cotangents, args.repeats)
    return {"ms": timing.both_ms, "peak": timing.peak, "device": str(mx.device_info().get("device_name"))}


def summarise(runs: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for name, measured in runs.items():
        times = [ms for run in measured for ms in run["ms"]]
        rows.append({"variant": name, "ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)})
        rows[-1] |= {"measurements": len(times), "peak_mb": max(run["peak"] for run in measured) / 1e6}
    loop = next(row for row in rows if row["variant"] == LOOP)
    for row in rows:
        row |= {"speedup": loop["ms"] / row["ms"], "saving": loop["peak_mb"] / row["peak_mb"]}
    what = "forward + backward of gated_delta_update, B = 1, gradients of q, k, v, a, b, state; ratios to mlx-lm's loop"
    asked = {"what": what, "shape": args.shape, "tokens": args.tokens, "dtype": args.dtype}
    return asked | describe_machine(runs[LOOP][0]["device"]) | {"rows": rows}


if __name__ == "__main__":
    main()
