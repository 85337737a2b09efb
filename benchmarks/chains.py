"""Milliseconds of GPU launches too short to be timed one by one: in chains, each launch waiting for the one before.

Between two launches a kernel of few numbers reads what the first wrote and writes what the second reads: an order that
mx.depends gives to MLX, but not to the GPU, which would let them overlap.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import mlx.core as mx
from gdkernels.portable.program import Program

# Chains that warm up, and the least number of timed ones.
_WARM_CHAINS, LEAST = 2, 3
# Rows and columns of the matrices of `make_plug`, and how many products tell the time of one.
_PLUG_SIZE, _TIMED_PRODUCTS = 4096, 10
_INDEX = "thread_index_in_threadgroup"
_TIE = Program("tie", ("numbers", "after"), ("tied",), f"if ({_INDEX} < COUNT) tied[{_INDEX}] = numbers[{_INDEX}];")


def chain_ms(
    link: Callable[[mx.array], mx.array], first: mx.array, plug: Callable[[], mx.array], args: argparse.Namespace
) -> list[float]:
    """Milliseconds of every chain and the plug before it, after two that warm up.

    At least three, then as many as args.repeats and args.part_seconds allow.

    Args:
        link: launches what reads the numbers of `first`, from this array or from a copy, and returns an output.
    """
    mx.eval(first)
    times: list[float] = []
    for _ in range(args.repeats + _WARM_CHAINS):
        if len(times) == _WARM_CHAINS:
            end = time.perf_counter() + args.part_seconds
        if len(times) >= _WARM_CHAINS + LEAST and time.perf_counter() > end:
            break
        numbers = first
        for _ in range(args.chain):
            written = link(numbers)
            numbers = _tie(first, written)
        del written
        busy = plug()
        start = time.perf_counter()
        mx.async_eval(busy)
        mx.eval(numbers)
        mx.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times[_WARM_CHAINS:]


def _tie(numbers: mx.array, after: mx.array) -> mx.array:
    launch = {"constants": {"COUNT": numbers.size}, "groups": (1, 1, 1), "threads": 32}
    return _TIE([numbers, after], [(numbers.shape, mx.int32)], **launch)[0]


def resolution_ms(times: list[float], chain: int) -> float:
    """Milliseconds a launch that chains cannot tell from none: the width of the middle half of their times."""
    middle = statistics.median(times)
    return 2 * statistics.median(abs(t - middle) for t in times) / chain


def make_plug(ms: float, warm_seconds: float) -> Callable[[], mx.array]:
    """Matrix products that take the GPU about `ms`, measured after others have warmed up its clocks."""
    if not ms:
        return lambda: mx.zeros(1)
    size = (_PLUG_SIZE, _PLUG_SIZE)
    x = mx.random.normal(size).astype(mx.bfloat16)
    w = (mx.random.normal(size) * _PLUG_SIZE**-0.5).astype(mx.bfloat16)  # a product is as large as x

    def products(number: int) -> mx.array:
        y = x
        for _ in range(number):
            y = y @ w
        return y

    end = time.perf_counter() + warm_seconds
    warm = False
    while not warm:
        warm = time.perf_counter() > end
        start = time.perf_counter()
        mx.eval(products(_TIMED_PRODUCTS))
        product_ms = 1e3 * (time.perf_counter() - start) / _TIMED_PRODUCTS
    return lambda: products(max(1, round(ms / product_ms)))
