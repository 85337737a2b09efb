"""Time and peak memory of forward + backward of the gated delta rule against mlx-lm's loop, all six gradients.

    python benchmarks/rule.py --json benchmarks/rule-cpu.json

Every variant runs in a process of its own, because the peak is one of the process; the variants take turns, so that a
change in the machine's load meets all of them. Times are medians; ratios are those of one run of this program.
"""

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

LOOP = "mlx-lm loop"
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
        print(json.dumps(measure(args.measure, args)))
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


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Times in ms and the peak in bytes, inputs included, of one variant in this process."""
    import mlx.core as mx
    from gdkernels import gated_delta_update
    from mlx_lm.models.gated_delta import gated_delta_update as loop

    Hk, Hv, Dk, Dv = map(int, args.shape.split(","))
    T, dtype = args.tokens, getattr(mx, args.dtype)
    mx.random.seed(0)
    q, k = (unit(mx.random.normal((1, T, Hk, Dk))).astype(dtype) for _ in range(2))
    v, dy = (mx.random.normal((1, T, Hv, Dv)).astype(dtype) for _ in range(2))
    a, b = (mx.random.normal((1, T, Hv)).astype(dtype) for _ in range(2))
    A_log, dt_bias = mx.random.normal((Hv,)), mx.random.normal((Hv,))
    inputs = [q * Dk**-0.5, k, v, a, b]
    mx.eval(inputs, dy, A_log, dt_bias)

    def loss(*inputs: mx.array) -> mx.array:
        if name == LOOP:
            y, _ = loop(*inputs, A_log, dt_bias, use_kernel=False)
        else:
            y, _ = gated_delta_update(*inputs, A_log, dt_bias, backend=name.split(",")[0], chunk_size=VARIANTS[name])
        return (y * dy).sum()

    step = mx.value_and_grad(loss, argnums=tuple(range(5)))
    mx.eval(step(*inputs))
    mx.clear_cache()
    mx.reset_peak_memory()
    times = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        mx.eval(step(*inputs))
        times.append(1e3 * (time.perf_counter() - start))
    return {"ms": times, "peak": mx.get_peak_memory(), "device": str(mx.device_info().get("device_name"))}


def unit(x: Any) -> Any:
    return x / (x * x).sum(axis=-1, keepdims=True) ** 0.5


def summarise(runs: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for name, measured in runs.items():
        times = [ms for run in measured for ms in run["ms"]]
        rows.append({"variant": name, "ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)})
        rows[-1] |= {"measurements": len(times), "peak_mb": max(run["peak"] for run in measured) / 1e6}
    loop = next(row for row in rows if row["variant"] == LOOP)
    for row in rows:
        row |= {"speedup": loop["ms"] / row["ms"], "saving": loop["peak_mb"] / row["peak_mb"]}
    return {
        "what": "forward + backward of gated_delta_update, B = 1, gradients of q, k, v, a, b; ratios to mlx-lm's loop",
        "shape": args.shape,
        "tokens": args.tokens,
        "dtype": args.dtype,
        "device": runs[LOOP][0]["device"],
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }


if __name__ == "__main__":
    main()
