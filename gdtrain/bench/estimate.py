"""Peak memory of forward + backward, in bytes, known before anything runs: what does not fit is skipped, not tried.

An estimate, inputs included, within a factor of 1.5 of what is measured (tests/bench/test_estimate.py): on the CPU of
every test run for the loop, `reference`, `replay` and `chunked`; as measured on an H200 for `fused`, `recurrent` and
`chunked`. `native`, which needs Metal, has not been measured.
"""

import os

import mlx.core as mx

from gdtrain.bench.shapes import LOOP, Case

# Automatic differentiation of the step loop keeps the decayed state, the new one and two products of a state's size for
# every token: 4.1 to 4.4 states measured (6 shapes, T 64 to 1024, two CPU cores, MLX 0.32.4; 4.2 on an H200, T = 512).
_STATES_PER_STEP = 4.25
# Backends that work span by span bound the scratch of one where memory is short, because MLX then waits for the GPU.
# Where it is not, the program that feeds a GPU runs ahead. H200, MLX 0.32.4, 2026-11-30: `chunked` had two spans alive,
# 1.10 GB, at (16, 32, 128, 128), T = 2048; `fused` all seven, 7.8 GB, at (16, 64, 192, 128), T = 16384, and 5.1 GB with
# a memory limit of 5; `recurrent` all thirteen, 5.7 GB, at T = 2048.
_SPAN = {"chunked": 512 * 2**20, "fused": 512 * 2**20, "recurrent": 256 * 2**20}
# Part of the memory of a device, or of the machine, that a measurement may take: the rest is for others.
_SHARE = 0.9
_FLOAT = 4  # bytes


def estimate_bytes(case: Case, backend: str) -> int:
    """Peak of one forward + backward, with inputs, outputs and gradients.

    Args:
        backend: a name in gdkernels.BACKENDS (not "auto"), or LOOP.
    """
    B, T, (Hk, Hv, Dk, Dv) = case.B, case.T, case.shape
    on_cpu = mx.default_device() == mx.cpu
    C = min(32 if on_cpu else 64, T)  # the default chunk of gdkernels
    chunks = -(-T // C)
    state = _FLOAT * B * Hv * Dv * Dk
    item = getattr(mx, case.dtype).size
    # q, k and v; their gradients; y and its cotangent; a and b, the gates and their gradients; states in and out.
    always = B * T * (item * (4 * Hk * Dk + 4 * Hv * Dv) + Hv * (4 * item + 4 * _FLOAT)) + 4 * state
    kept = chunks * state  # states at the start of the chunks

    def spans(bytes_per_chunk: int, bytes_per_span: int = 0) -> int:
        """Scratch alive of a backend that takes as many chunks at a time as keep within its limit."""
        length = min(chunks, max(1, _SPAN[backend] // bytes_per_chunk))
        count = -(-chunks // length)
        alive = 1 if on_cpu else min(count, 2 if backend == "chunked" else count)
        return min(chunks, alive * length) * bytes_per_chunk + alive * bytes_per_span

    if backend in (LOOP, "reference"):
        return always + int(_STATES_PER_STEP * T * state)
    if backend == "replay":
        return always + int(_STATES_PER_STEP * C * state) + kept
    if backend == "chunked":
        heads = Hv * (8 * C * C + 12 * C * Dv + 3 * Dk * Dv) + 6 * Hk * C * Dk
        return always + kept + spans(_FLOAT * B * heads)
    if backend == "fused":
        pairs = 2 * Hv * C * C  # of the forward, whose scratch is not cut into spans
        heads = Hv * (2 * C * C + 2 * C * Dv + Dv * Dk) + 6 * Hk * C * C
        return always + kept + chunks * _FLOAT * B * pairs + spans(_FLOAT * B * heads)
    if backend == "native":
        return always + B * Hv * T * 64 * 2**10  # the scratch of MLX's own backward on M1 to M4
    # `recurrent`: for every token partial sums of dq and dk, one for 8 rows of the state; C / 4 states for every span.
    return always + kept + spans(_FLOAT * B * C * Hv * -(-Dv // 8) * 2 * Dk, C // 4 * state)


def find_budget(budget_gb: float | None) -> tuple[int, str]:
    """Bytes a measurement may take, and why: --budget-gb, else the device's memory, else the machine's."""
    if budget_gb is not None:
        return int(budget_gb * 1e9), "--budget-gb"
    info = mx.device_info()
    # Metal: what the system lets a GPU keep resident.
    if working_set := info.get("max_recommended_working_set_size"):
        return int(working_set), "recommended working set of the device"
    for key in ("total_memory", "memory_size"):
        if memory := info.get(key):
            return int(_SHARE * int(memory)), f"{_SHARE:.0%} of the device's memory"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(_SHARE * memory), f"{_SHARE:.0%} of physical memory"
