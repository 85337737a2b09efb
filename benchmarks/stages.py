"""Time every stage of the fused backend alone on the default GPU, and the whole of it beside `recurrent`; bfloat16.

    python benchmarks/stages.py --shape 16,64,192,128 --tokens 2048 --json benchmarks/stages-h200.json

A stage is timed in chains of launches inside one evaluation (chains.py). Matrix products go before every chain, so that
the GPU is busy while the host prepares the launches, which on CUDA takes up to 0.1 ms for each. A chain without the
stage, behind the same products, is timed as well and subtracted; a stage that adds less to it than its own times vary
by is below the resolution, and has no time. Times are medians, of fewer repeats where those would take longer than
--part-seconds. The JSON is written after every shape, with the seconds that went into it.

The ten kernels of a shape take 2 to 3 s each to compile (nvcc 13.5, a Xeon 2.8 GHz), longer than all that is timed. On
CUDA, where MLX keeps them on disk, they are therefore compiled first, in processes side by side.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
from chains import LEAST, chain_ms, make_plug, resolution_ms
from gdkernels import fused, gates, recurrent
from gdkernels.fused import stages
from gdkernels.fused.plan import CHUNKS, HEAD_DIM_STEP, MAX_HEAD_DIM, Plan, fitting_chunk, plan
from gdkernels.fused.stages import Span
from gdkernels.portable.machine import architecture, machine, rounds_to_tf32
from gdkernels.portable.program import Program
from gdkernels.sizes import Sizes
from stage_counts import STAGES, count

from gdtrain.bench.machine import describe_machine
from gdtrain.bench.measure import draw_inputs, measure, pipelined_ms
from gdtrain.bench.shapes import Case, Shape, parse_shape
from gdtrain.errors import UserError

DTYPE = "bfloat16"
WHOLE = {"fused": fused, "recurrent": recurrent}
# Steps of forward + backward given to the GPU before the first has to be done.
PIPELINED = 10
# A launch; returns one of its outputs.
Launch = Callable[[Span], mx.array]


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if machine() is None:
        sys.exit("benchmarks/stages.py needs a GPU as MLX's default device; this is a CPU")
    if args.compile is not None:
        for shape in args.shape:
            launch_one(shape, args.chunk, args.compile)
        return
    start = time.perf_counter()
    if machine() == "cuda":
        compile_side_by_side(args)
    compile_seconds = time.perf_counter() - start
    plug = make_plug(args.plug_ms, args.warm_seconds)
    empty = chain_ms(lambda numbers: numbers, mx.zeros(4, mx.int32), plug, args)
    measured: list[dict[str, Any]] = []
    report = {
        "what": "ms per launch of every stage of the fused backend, and ms of forward and of forward + backward",
        "dtype": DTYPE,
        "chain": args.chain,
        "repeats": args.repeats,
        "plug_ms": args.plug_ms,
        "compile_seconds": compile_seconds,
        "empty_chain_ms": statistics.median(empty),
        "resolution_ms": resolution_ms(empty, args.chain),
        "peak_tflops": args.peak_tflops,
        "peak_gbps": args.peak_gbps,
        "architecture": architecture(),
        **describe_machine(str(mx.device_info().get("device_name"))),
        "shapes": measured,
    }
    for shape in args.shape:
        measured.append(measure_shape(shape, plug, empty, args))
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", type=_shape, required=True, help="Hk,Hv,Dk,Dv; several are allowed")
    parser.add_argument("--tokens", type=_positive, default=2048)
    parser.add_argument("--chunk", type=int, choices=CHUNKS, default=64)
    parser.add_argument("--chain", type=_positive, default=10, help="launches in an evaluation")
    parser.add_argument("--repeats", type=_positive, default=20, help="timed chains, and timed runs of the whole")
    parser.add_argument("--backend", action="append", choices=WHOLE, help="timed as a whole; default: both")
    parser.add_argument("--part-seconds", type=float, default=0.5, help="for the chains of a stage, or runs of a whole")
    parser.add_argument("--plug-ms", type=float, default=4.0, help="of matrix products before every chain")
    parser.add_argument("--warm-seconds", type=float, default=1.0, help="of matrix products, for the clocks")
    parser.add_argument("--peak-tflops", type=float, help="dense bfloat16 (CUDA) or float32 (Metal); H200: 989")
    parser.add_argument("--peak-gbps", type=float, help="device memory; H200: 4800")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)  # the number of a kernel
    parser.add_argument("--json", type=Path, help="write the result here as well")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _shape(text: str) -> Shape:
    try:
        shape = parse_shape(text)[1].shape
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    for size in (shape.Dk, shape.Dv):
        if size % HEAD_DIM_STEP or size > MAX_HEAD_DIM:
            raise argparse.ArgumentTypeError(f"{text}: Dk and Dv are multiples of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}")
    return shape


def compile_side_by_side(args: argparse.Namespace) -> None:
    """Every kernel in a process of its own, into MLX's cache on disk; one that fails will fail here again."""
    again = [sys.executable, __file__, f"--chunk={args.chunk}"]
    commands = [
        [*again, f"--shape={shape}", f"--compile={number}"]
        for shape in args.shape
        for number in range(launch_one(shape, args.chunk, None))
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda command: subprocess.run(command, check=False), commands))


def launch_one(shape: Shape, chunk: int, number: int | None) -> int:
    """Forward + backward over one chunk with one kernel launched, the others giving zeros; returns how many there are.

    Another number of tokens compiles nothing.
    """
    primals, cotangents = draw_rule_inputs(shape, chunk)
    launch, seen = Program.__call__, 0

    def stand_in(program: Program, inputs: Sequence[mx.array], outputs: Any, **options: Any) -> list[mx.array]:
        nonlocal seen
        seen += 1
        if seen - 1 == number:
            return launch(program, inputs, outputs, **options)
        return [mx.zeros(*output) for output in outputs]

    with mock.patch.object(Program, "__call__", stand_in):
        for package in WHOLE.values():
            if package.refusal(Sizes(1, chunk, *shape, primals[0].dtype, chunk)) is None:
                mx.eval(mx.vjp(lambda *x, rule=package.rule: list(rule(*x, chunk)), primals, cotangents))
    return seen


def draw_rule_inputs(shape: Shape, tokens: int) -> tuple[list[mx.array], list[mx.array]]:
    """q, k, v, log_decay, beta, state and the cotangents of both outputs; B = 1."""
    inputs = draw_inputs(Case(str(shape), shape, 1, tokens, DTYPE))
    q, k, v, a, b, state = inputs.primals
    primals = [q, k, v, *gates(a, b, inputs.A_log, inputs.dt_bias), state]
    mx.eval(primals)
    return primals, inputs.cotangents


def measure_shape(
    shape: Shape, plug: Callable[[], mx.array], empty: list[float], args: argparse.Namespace
) -> dict[str, Any]:
    clock = [time.perf_counter()]
    primals, cotangents = draw_rule_inputs(shape, args.tokens)
    where = machine()
    assert where is not None
    C = fitting_chunk(where, shape.Dk, args.chunk)
    sizes = plan(where, not rounds_to_tf32(), 1, *shape, C, primals[0].dtype)
    print(f"{shape}, {args.tokens} tokens, C = {C}, {sizes.parts} part(s)", flush=True)
    rows = []
    row_span = Span(0, -(-args.tokens // C), args.tokens)
    ready = launches(sizes, row_span, primals, cotangents)
    clock.append(time.perf_counter())
    for stage, launch in ready.items():
        times = chain_ms(_of_numbers(launch, row_span), row_span.array(sizes), plug, args)
        row = {"stage": stage, **stage_row(stage, sizes, times, empty, args)}
        rows.append(row)
        print(f"{stage:>18} {_shown(row)}", flush=True)
    del ready
    clock.append(time.perf_counter())
    whole = []
    for backend in args.backend or WHOLE:
        whole.append({"backend": backend, **whole_row(backend, shape, primals, cotangents, args)})
        print(f"{backend:>18} {json.dumps(whole[-1])}", flush=True)
    clock.append(time.perf_counter())
    names = ("prepare", "stages", "whole")
    seconds = {name: end - start for name, start, end in zip(names, clock[:-1], clock[1:], strict=True)}
    print(f"{'seconds':>18} {json.dumps(seconds)}", flush=True)
    asked = {"shape": str(shape), "B": 1, "tokens": args.tokens, "C": C, "parts": sizes.parts}
    return {**asked, "seconds": seconds, "stages": rows, "whole": whole}


def _shown(row: dict[str, Any]) -> str:
    if row["ms"] is None:
        return f"below the resolution of {row['resolution_ms']:.4f} ms"
    rates = f"{row['tflops']:7.1f} ({row['partial_tflops']:6.1f}) TFLOP/s {row['gbps']:7.0f} GB/s"
    return f"{row['ms']:8.4f} ms {rates}"


def launches(sizes: Plan, row: Span, primals: list[mx.array], cotangents: list[mx.array]) -> dict[str, Launch]:
    """Every stage as a function of the row's span, with inputs as the stages before it make them."""
    q, k, v, log_decay, beta, state = primals
    dy, d_final = cotangents
    within, QK, KK = stages.intra_with_pairs(sizes, q, k, log_decay, beta, row)
    starts = stages.forward(sizes, q, k, v, within, state, row)[1]
    x, d_ends, _ = stages.reverse(sizes, q, k, dy, within, d_final, row)
    delta = stages.delta(sizes, k, v, within, starts, row)
    pairs = stages.pairs(sizes, v, dy, log_decay, beta, QK, KK, delta, x, row)
    keys = stages.keys(sizes, q, k, dy, within.scales, delta, x, starts, d_ends, pairs.d_pairs, row)
    mx.eval(within, QK, KK, starts, x, d_ends, delta, pairs, keys)
    functions: dict[str, Launch] = {
        "intra": lambda span: stages.intra(sizes, q, k, log_decay, beta, span).scales,
        "intra_with_pairs": lambda span: stages.intra_with_pairs(sizes, q, k, log_decay, beta, span)[0].scales,
        "forward": lambda span: stages.forward(sizes, q, k, v, within, state, span)[0],
        "delta": lambda span: stages.delta(sizes, k, v, within, starts, span),
        "reverse": lambda span: stages.reverse(sizes, q, k, dy, within, d_final, span)[0],
        "pairs": lambda span: stages.pairs(sizes, v, dy, log_decay, beta, QK, KK, delta, x, span).dv,
        "keys": lambda span: (
            stages.keys(sizes, q, k, dy, within.scales, delta, x, starts, d_ends, pairs.d_pairs, span).dq
        ),
        "gates": lambda span: stages.gates(sizes, pairs, keys, span)[0],
    }
    assert tuple(functions) == STAGES
    return functions


class _TiedSpan(Span):
    """A span whose numbers the GPU has to write first."""

    numbers: mx.array

    @classmethod
    def of(cls, span: Span, numbers: mx.array) -> "_TiedSpan":
        tied = cls(*span)
        tied.numbers = numbers
        return tied

    def array(self, plan: Plan) -> mx.array:
        return self.numbers


def _of_numbers(launch: Launch, span: Span) -> Callable[[mx.array], mx.array]:
    return lambda numbers: launch(_TiedSpan.of(span, numbers))


def stage_row(
    stage: str, sizes: Plan, times: list[float], empty: list[float], args: argparse.Namespace
) -> dict[str, float | None]:
    """Milliseconds a launch, what it computes and moves, and the rates of it; None below the resolution."""
    counted = count(stage, sizes, args.tokens)
    none = statistics.median(empty)
    net = [(t - none) / args.chain for t in times]
    resolution = max(resolution_ms(times, args.chain), resolution_ms(empty, args.chain))
    median = statistics.median(net)
    ms = median if median > resolution else None
    tflops, partial, gbps = (
        number / ms * scale if ms else None
        for number, scale in ((counted.operations, 1e-9), (counted.partial_operations, 1e-9), (counted.bytes, 1e-6))
    )
    return {
        "ms": ms,
        "ms_min": min(net),
        "ms_max": max(net),
        "resolution_ms": resolution,
        "chains": len(times),
        "operations": counted.operations,
        "partial_operations": counted.partial_operations,
        "bytes": counted.bytes,
        "tflops": tflops,
        "partial_tflops": partial,
        "gbps": gbps,
        "of_peak_tflops": partial / args.peak_tflops if ms and args.peak_tflops else None,
        "of_peak_gbps": gbps / args.peak_gbps if ms and args.peak_gbps else None,
    }


def whole_row(
    backend: str, shape: Shape, primals: list[mx.array], cotangents: list[mx.array], args: argparse.Namespace
) -> dict[str, Any]:
    """Milliseconds of the whole, each evaluated by itself; of `fused` also those of a step among several in a row."""
    package = WHOLE[backend]
    why_not = package.refusal(Sizes(1, args.tokens, *shape, primals[0].dtype, args.chunk))
    if why_not:
        return {"refused": why_not}

    def rule(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        return package.rule(*arrays, args.chunk)

    def repeats(ms: float) -> int:
        return min(args.repeats, max(LEAST, int(1e3 * args.part_seconds / ms)))

    timing = measure(rule, primals, cotangents, repeats)
    row = {"forward_ms": timing.forward, "forward_backward_ms": timing.both, "runs": len(timing.both_ms)}
    if backend == "fused":
        row["pipelined_ms"] = pipelined_ms(lambda: mx.vjp(lambda *x: list(rule(*x)), primals, cotangents), PIPELINED)
    return row


if __name__ == "__main__":
    main()
