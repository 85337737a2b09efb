"""NVIDIA's checkers over the GPU kernels: forward and backward of `fused` and `recurrent` at small shapes.

    python benchmarks/checkers.py

Needs compute-sanitizer of the CUDA toolkit in PATH and MLX's CUDA build. memcheck looks for accesses out of bounds,
racecheck for races in shared memory, synccheck for barriers that not all threads reach. Exit code 1 where one of them
finds anything or does not come to an end. initcheck is left out: it reports reads of memory that the host wrote through
managed memory.

Run by hand in this form on an H200 with MLX 0.32.4 on 2026-11-30: memcheck 0 errors, racecheck 0 hazards, synccheck
0 errors.
"""

import argparse
import re
import shutil
import subprocess
import sys

TOOLS = ("memcheck", "racecheck", "synccheck")
# (Hk, Hv, Dk, Dv), B, T, dtype, chunk: rows that end within a chunk, and heads that share keys.
CASES = (((2, 4, 64, 64), 2, 70, "bfloat16", 64), ((1, 2, 32, 32), 1, 37, "float32", 16))
DONE = "all kernels ran"
_SUMMARY = re.compile(r"^=+ \w+ SUMMARY: (\d+) (?:errors?|hazards?)\b.*", re.MULTILINE)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="may be repeated; default: all three")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.launch:
        launch_all()
        return
    if shutil.which("compute-sanitizer") is None:
        sys.exit("benchmarks/checkers.py needs compute-sanitizer of the CUDA toolkit in PATH")
    clean = [check(tool) for tool in args.tool or TOOLS]
    sys.exit(0 if all(clean) else 1)


def check(tool: str) -> bool:
    """Whether all kernels ran and the tool found nothing; prints its summary, or all it says."""
    command = ["compute-sanitizer", "--tool", tool, sys.executable, __file__, "--launch"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    summaries = list(_SUMMARY.finditer(done.stdout))
    clean = DONE in done.stdout and done.returncode == 0 and all(int(found[1]) == 0 for found in summaries)
    clean = clean and bool(summaries)
    said = "\n".join(found[0] for found in summaries) if clean else done.stdout
    print(f"{tool}: {'clean' if clean else f'FAILED, exit code {done.returncode}'}\n{said}", flush=True)
    return clean


def launch_all() -> None:
    """Every case on the default GPU, without the self-test, whose kernels would be checked as well."""
    import mlx.core as mx
    from gdkernels import fused, gates, recurrent

    from gdtrain.bench.measure import draw_inputs
    from gdtrain.bench.shapes import Case, Shape

    mx.disable_compile()
    for shape, B, T, dtype, chunk in CASES:
        drawn = draw_inputs(Case("", Shape(*shape), B, T, dtype))
        q, k, v, a, b, state = drawn.primals
        primals = [q, k, v, *gates(a, b, drawn.A_log, drawn.dt_bias), state]
        for package in (fused, recurrent):
            mx.eval(mx.vjp(lambda *x, rule=package.rule, C=chunk: list(rule(*x, C)), primals, drawn.cotangents))
            mx.synchronize()
    print(DONE, flush=True)


if __name__ == "__main__":
    main()
