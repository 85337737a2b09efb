"""Time and peak memory of the loss from hidden states, with their gradient: by blocks of rows against all logits.

    python benchmarks/loss.py --json benchmarks/loss-h200.json
    python benchmarks/loss.py --rows 512 --hidden 256 --vocabulary 8192 --dtype float32 --budget-gb 0.004,0.016

The head is dense and frozen. peak_gb is above inputs and outputs: hidden states, head, loss and gradient are not in it.
budget_gb is what a block may take; MLX runs ahead of the device, so that a few of them are alive. Times are medians of
repetitions in turns, so that a change in the machine's load meets all variants. error: relative L2 distance of the
gradient from that of all logits.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from gdtrain.bench.machine import describe_machine
from gdtrain.bench.measure import relative_l2
from gdtrain.head_loss import BLOCK_BYTES, summed_cross_entropy
from gdtrain.model.head import Head
from gdtrain.reporting.header import device_name

ALL = "all logits"
Step = Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096, help="supervised positions")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=248_320)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--budget-gb", default=f"0.032,0.064,{BLOCK_BYTES / 1e9},0.256,0.512", help="list with commas")
    parser.add_argument("--all-logits", action=argparse.BooleanOptionalAction, default=True, help="they may not fit")
    parser.add_argument("--memory-limit-gb", type=float, help="of MLX, above the inputs; it then runs ahead less")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    head, inputs = draw(args)
    if args.memory_limit_gb is not None:
        mx.set_memory_limit(mx.get_active_memory() + int(1e9 * args.memory_limit_gb))
    variants: dict[str, Step] = {ALL: mx.value_and_grad(partial(all_logits, head))} if args.all_logits else {}
    for budget in map(float, args.budget_gb.split(",")):
        loss = partial(summed_cross_entropy, head, block_bytes=1e9 * budget)
        variants[f"{budget:g} GB"] = mx.value_and_grad(loss)
    rows = [measure_peak(name, step, inputs) for name, step in variants.items()]
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(args.repeats):
        for name, step in variants.items():
            times[name].append(milliseconds(step, inputs))
    exact = rows[0]["gradient"]
    for row in rows:
        ms = times[row["variant"]]
        row |= {"ms": statistics.median(ms), "ms_min": min(ms), "ms_max": max(ms), "measurements": len(ms)}
        gradient = row.pop("gradient")
        row["error"] = relative_l2(gradient, exact) if args.all_logits else None
        error = "" if row["error"] is None else f"  error {row['error']:.1e}"
        print("{variant:>12}  {ms:9.1f} ms  {peak_gb:7.3f} GB".format(**row) + error)
    what = "summed cross-entropy from hidden states, with their gradient; dense frozen head"
    asked = {key: value for key, value in vars(args).items() if key != "json"}
    report = {"what": what} | asked | describe_machine(device_name()) | {"variants": rows}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def draw(args: argparse.Namespace) -> tuple[Head, list[mx.array]]:
    """Hidden states, targets and which rows are counted (all); logits have a standard deviation of about 3."""
    mx.random.seed(0)
    dtype = getattr(mx, args.dtype)
    module = nn.Linear(args.hidden, args.vocabulary, bias=False)
    module.weight = mx.random.normal((args.vocabulary, args.hidden), dtype=dtype, scale=3 / args.hidden**0.5)
    module.freeze()
    hidden = mx.random.normal((args.rows, args.hidden), dtype=dtype)
    inputs = [hidden, mx.random.randint(0, args.vocabulary, (args.rows,)), mx.ones((args.rows,), mx.bool_)]
    mx.eval(module.parameters(), inputs)
    return Head(module, module), inputs


def all_logits(head: Head, hidden: mx.array, targets: mx.array, counted: mx.array) -> mx.array:
    losses = nn.losses.cross_entropy(head.project(hidden).astype(mx.float32), targets)
    return mx.where(counted, losses, 0.0).sum()


def measure_peak(name: str, step: Step, inputs: list[mx.array]) -> dict[str, Any]:
    """Of the second run; the first compiles kernels and fills caches."""
    mx.eval(step(*inputs))
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loss, gradient = step(*inputs)
    mx.eval(loss, gradient)
    mx.synchronize()
    peak = mx.get_peak_memory() - before - loss.nbytes - gradient.nbytes
    return {
        "variant": name,
        "peak_gb": peak / 1e9,
        "loss": loss.item(),
        "gradient": np.array(gradient.astype(mx.float32)),
    }


def milliseconds(step: Step, inputs: list[mx.array]) -> float:
    start = time.perf_counter()
    mx.eval(step(*inputs))
    mx.synchronize()
    return 1e3 * (time.perf_counter() - start)


if __name__ == "__main__":
    main()
