"""The recurrence as two GPU kernels: a scan over the tokens, and a reverse scan that replays chunk by chunk.

    layout.py           how the state lies in the threads, and how many tokens one launch takes
    scan.py/.metal      y, the final state, and the state at the start of every chunk
    reverse.py/.metal   six gradients from those states

The state of a value row stays in the registers of one SIMD group for all tokens; rows never meet, but for the sums over
rows in dq, dk and the gates' gradients, which are taken in a fixed order and never by atomics: the same input gives the
same bits. Everything is float32 between loading an activation and storing one. No division: g and beta may be 0.

Costs for a token of one value head, with n = Dk Dv, b threadgroups to a head and STEPS tokens at a time in registers
(layout.py), C tokens to a chunk: fused multiply-adds, and bytes of device memory beside activations and gates.

    forward     4 n                 4 n / C         states at the chunk starts
    backward    3 n + 2 n + 8 n     8 n / STEPS     two replays and the way back; states kept and read again,
                                    + 16 b Dk       dq and dk of every threadgroup written, and read to be added,
                                    + 4 n / C + 12 Dv

    (Dk, Dv) = (128, 128), b = 16, C = 64: 65,536 and 212,992 multiply-adds, 1 and 68 KB
    (Dk, Dv) = (192, 128), b = 16, C = 64: 98,304 and 319,488 multiply-adds, 1.5 and 101 KB

Scratch of a launch of the backward, whatever T is: sums of at most `layout.SUMS_BYTES`, and C / STEPS states for each
row of the batch and value head, 32 MiB for B = 1, Hv = 32, C = 64, Dk = Dv = 128. Where memory is plenty, the program
that feeds a GPU runs ahead and the scratch of all launches may be alive: 5.7 GB in all for (16, 64, 192, 128),
T = 2048, bfloat16, on an H200 (2026-11-30). Kept between the passes: T / C states.
"""

import mlx.core as mx

from gdkernels.custom import with_gradient
from gdkernels.portable.machine import machine
from gdkernels.portable.program import SIMD_WIDTH, read_text
from gdkernels.recurrent.layout import MAX_CHUNK, MAX_KEY_DIM, STEPS, layout_of
from gdkernels.recurrent.reverse import backward
from gdkernels.recurrent.scan import forward
from gdkernels.sizes import Sizes

__all__ = ["refusal", "rule", "text"]


def rule(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array, chunk_size: int
) -> tuple[mx.array, mx.array]:
    """Readout y (B, T, Hv, Dv) in q's dtype, final state (B, Hv, Dv, Dk) float32; shapes as in the package docstring.

    Kept for the backward: the inputs, and the state at the start of every chunk. Neither T, B nor chunk_size is part of
    a kernel: another length compiles nothing. A chunk_size above `layout.MAX_CHUNK` is taken as that: results are the
    same, and the scratch stays bounded.

    Raises:
        RuntimeError: the kernels do not compile or do not run here. Sizes they do not take: see `refusal`.
    """
    C = min(chunk_size, q.shape[1], MAX_CHUNK)
    y, final, _ = with_gradient(forward, backward, C)(q, k, v, log_decay, beta, state)
    return y, final


def refusal(sizes: Sizes) -> str | None:
    """Why the kernels cannot take these sizes here, and what they accept; None if they can."""
    if machine() is None:
        return "needs a GPU"
    if sizes.Dk % SIMD_WIDTH or sizes.Dk > MAX_KEY_DIM:
        return f"Dk = {sizes.Dk} is not accepted: a multiple of {SIMD_WIDTH} up to {MAX_KEY_DIM} is"
    if sizes.Dv % 4:
        return f"Dv = {sizes.Dv} is not accepted: a multiple of 4 is"
    return None


def text() -> str:
    """All texts that reach a kernel, on either machine, and the layouts they are compiled for."""
    names = ("names.metal.h", "names.cuda.h", "lanes.h")
    stages = ("scan.metal", "reverse.metal")
    layouts = [f"// Dk {Dk}: {layout_of(Dk)}, {STEPS} steps" for Dk in range(SIMD_WIDTH, MAX_KEY_DIM + 1, SIMD_WIDTH)]
    parts = [*(read_text("gdkernels.portable", f) for f in names), *(read_text(__name__, f) for f in stages)]
    return "\n".join([*parts, *layouts])
