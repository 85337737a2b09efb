"""Our backends beside flash-linear-attention on one NVIDIA card: forward, forward + backward, peak memory, errors.

    python benchmarks/fla_side_by_side.py --json benchmarks/fla-h200.json

Needs gdtrain, MLX's CUDA build, torch, triton and fla-core 0.6.0 in one environment, and no network. Each framework
runs in one process of its own, because their memory pools would mix; they take turns, row by row and round by round,
and the one that waits does nothing. A row that fails says why. Everything is bfloat16 with float32 gates and states,
B = 1, with gradients of q, k, v, log_decay, beta and state. All compute from the same inputs, drawn by MLX's process
for each shape and T. Errors are relative L2 of each tensor against a float64 recurrence on the same rounded inputs.

The inputs lie in temporary files, 4.5 GB for the default shapes.
"""

import argparse
import json
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gdtrain.bench.machine import describe_machine, installed

WORKER = Path(__file__).with_name("fla_worker.py")
SHAPES = {"16,64,192,128": "256,512,1024,2048,4096,8192,16384", "16,32,128,128": "512,1024,2048,4096,8192,16384"}
FLA = ("torch", "chunk_gated_delta_rule")
# A token at a time: no rivals in speed.
STEP_BY_STEP = ("reference", "replay")
# How long a row that has begun may take beyond the time that all may take.
GRACE_SECONDS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="Hk,Hv,Dk,Dv; may be repeated")
    parser.add_argument("--tokens", help="T,T,... for every shape")
    parser.add_argument("--error-tokens", type=int, default=512, help="T at which errors are measured")
    parser.add_argument("--backends", help="of gdkernels; default: all but those that go step by step")
    parser.add_argument("--rounds", type=int, default=2, help="turns of every row")
    parser.add_argument("--repeats", type=int, default=10, help="timed runs of a row in each turn")
    parser.add_argument("--seconds", type=float, default=600, help="no row starts later than this")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    report = run(args)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report; prints rows as they come."""
    deadline = time.monotonic() + args.seconds
    workers = {framework: Worker(framework, deadline) for framework in ("mlx", "torch")}
    hello = {framework: worker.ask({"do": "hello"}) for framework, worker in workers.items()}
    found = [name for name in hello["mlx"].get("backends", []) if name not in STEP_BY_STEP]
    contenders = [*(("mlx", name) for name in (args.backends.split(",") if args.backends else found)), FLA]
    cases = [
        ([int(n) for n in shape.split(",")], int(T))
        for shape in args.shape or SHAPES
        for T in (args.tokens or SHAPES.get(shape, "512")).split(",")
    ]
    with tempfile.TemporaryDirectory() as folder:
        drawn = Drawn(workers["mlx"], Path(folder))
        shapes = {tuple(shape): None for shape, _ in cases}
        errors = [row for shape in shapes for row in measure_errors(workers, contenders, shape, drawn, args)]
        rows = measure_times(workers, contenders, cases, drawn, args)
    for worker in workers.values():
        worker.stop()
    about = " ".join((__doc__ or "").split("\n\n")[2].split())
    packages = {name: installed(name) for name in ("fla-core", "flash-linear-attention", "torch", "triton")}
    report = {"what": about, "rounds": args.rounds, "repeats": args.repeats, "workers": hello}
    return report | packages | describe_machine(str(hello["mlx"].get("device"))) | {"errors": errors, "rows": rows}


def measure_times(
    workers: dict[str, "Worker"],
    contenders: list[tuple[str, str]],
    cases: list[tuple[list[int], int]],
    drawn: "Drawn",
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """A row per case and contender, with all turns in it."""
    rows = [
        {
            "shape": shape,
            "tokens": T,
            "framework": framework,
            "backend": backend,
            "forward": [],
            "both": [],
            "pipelined": [],
            "peak": 0,
        }
        for shape, T in cases
        for framework, backend in contenders
    ]
    for _ in range(args.rounds):
        for row in rows:
            if "failed" in row:
                continue
            inputs, failed = drawn.file(row["shape"], row["tokens"])
            ask = {"do": "time", "backend": row["backend"], "inputs": inputs, "repeats": args.repeats}
            reply = {"failed": f"no inputs: {failed}"} if failed else workers[row["framework"]].ask(ask)
            row["forward"] += reply.get("forward_ms", [])
            row["both"] += reply.get("both_ms", [])
            row["pipelined"] += reply.get("pipelined_ms", [])
            row["peak"] = max(row["peak"], reply.get("peak", 0))
            row |= {name: reply[name] for name in ("note", "failed") if reply.get(name)}
    return [summarise(row) for row in rows]


def summarise(row: dict[str, Any]) -> dict[str, Any]:
    """Medians in ms, peak in GB of 1e9 bytes; prints the row."""
    forward, both, pipelined, peak = (row.pop(name) for name in ("forward", "both", "pipelined", "peak"))
    row["measurements"] = len(both)
    if both:
        row |= {"forward_ms": statistics.median(forward), "forward_backward_ms": statistics.median(both)}
        row |= {"pipelined_ms": statistics.median(pipelined)}  # of ten forward + backward without waiting in between
        row |= {"forward_backward_ms_min": min(both), "forward_backward_ms_max": max(both), "peak_gb": peak / 1e9}
    shown = (
        "{forward_ms:8.2f} {forward_backward_ms:8.2f} {pipelined_ms:8.2f} ms {peak_gb:7.3f} GB".format(**row)
        if both
        else row["failed"]
    )
    print(f"{row['shape']!s:>20} {row['tokens']:6} {row['backend']:>24} {shown}", flush=True)
    return row


def measure_errors(
    workers: dict[str, "Worker"],
    contenders: list[tuple[str, str]],
    shape: tuple[int, ...],
    drawn: "Drawn",
    args: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """A row per contender: every tensor's relative L2 to float64."""
    exact, made = (str(drawn.folder / f"{name}.npz") for name in ("exact", "made"))
    inputs, failed = drawn.file(list(shape), args.error_tokens)
    failed = failed or workers["torch"].ask({"do": "exact", "inputs": inputs, "results": exact}).get("failed")
    for framework, backend in contenders:
        row = {"shape": list(shape), "tokens": args.error_tokens, "framework": framework, "backend": backend}
        ask = {"do": "results", "backend": backend, "inputs": inputs, "results": made}
        reply = {"failed": f"no float64 result: {failed}"} if failed else workers[framework].ask(ask)
        row |= {name: reply[name] for name in ("note", "failed") if reply.get(name)}
        if "failed" not in reply:
            row["relative_l2"] = relative_l2(made, exact)
        print(f"{row['shape']!s:>20} {row['tokens']:6} {backend:>24} {row.get('relative_l2', row.get('failed'))}")
        yield row


def relative_l2(made: str, exact: str) -> dict[str, float | None]:
    """Of each tensor of two files; None where it is not finite."""
    with np.load(made) as got, np.load(exact) as want:
        errors = {name: np.linalg.norm(got[name] - want[name]) / np.linalg.norm(want[name]) for name in want}
    return {name: float(error) if np.isfinite(error) else None for name, error in errors.items()}


class Drawn:
    """A file of inputs for each shape and T, for all to compute from; drawn by MLX's worker when first asked for."""

    def __init__(self, worker: "Worker", folder: Path) -> None:
        self.folder = folder
        self._worker = worker
        self._made: dict[str, str | None] = {}

    def file(self, shape: list[int], T: int) -> tuple[str, str | None]:
        """The file, and why it could not be made."""
        name = str(self.folder / f"{'-'.join(map(str, shape))}-{T}.npz")
        if name not in self._made:
            ask = {"do": "draw", "shape": shape, "T": T, "inputs": name}
            self._made[name] = self._worker.ask(ask).get("failed")
        return name, self._made[name]


class Worker:
    """A process of fla_worker.py, started when first asked, and again after it has failed."""

    def __init__(self, framework: str, deadline: float) -> None:
        self._framework, self._deadline = framework, deadline
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply, or {"failed": why}."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return {"failed": "not run: the time was up"}
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, str(WORKER), self._framework]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(request).encode() + b"\n")
        stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            ready = selector.select(left + GRACE_SECONDS)
        # A reply is one line, written at once.
        line = stdout.readline() if ready else b""
        if not line:
            self._process.kill()
            code = self._process.wait()
            return {"failed": f"the process ended with code {code}" if ready else "took too long"}
        reply: dict[str, Any] = json.loads(line)
        if "failed" in reply:
            self._process.wait()
        return reply

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    main()
