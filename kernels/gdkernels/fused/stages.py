"""The stages of the fused backend as functions on arrays; their texts lie beside this file.

Arrays between the stages, for the n chunks of a span, tokens that fill up the last chunk included. Factors of matrix
products are stored as they are multiplied, in `parts` planes (see plan.py); the rest is float32.

    scales      (B, Hv, n, 3, C)                Gamma, E and beta
    QK, KK      (B, Hk, n, C, C)                q_i . k_j and k_i . k_j
    M, P        (B, Hv, n, parts, C, C)
    delta, x    (B, Hv, n, parts, C, Dv)
    starts      (B, Hv, N, parts, Dv, Dk)       states at the start of all N chunks of the row
    d_ends      (B, Hv, n, parts, Dv, Dk)       gradients of the states at the ends of the chunks
    d_pairs     (B, Hk, n, 4, parts, C, C)      gradient of QK and its transpose, of KK and its transpose
"""

from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from gdkernels.fused.plan import Plan, Stage
from gdkernels.portable.program import Program, read_text

_DECAY, _INVERSE, _OPERANDS, _SCAN = (f"{__package__}:{name}.h" for name in ("decay", "inverse", "operands", "scan"))


def _program(stage: str, inputs: str, outputs: str, *headers: str) -> Program:
    text = read_text(__package__, f"{stage}.metal")
    headers = ("tiles.h", "tiles.*.h", _OPERANDS, *headers)
    return Program(f"gd_{stage}", tuple(inputs.split()), tuple(outputs.split()), text, headers)


_INTRA = _program("intra", "q k log_decay beta span", "scales M P", _DECAY, _INVERSE)
_INTRA_PAIRS = _program("intra", "q k log_decay beta span", "scales M P QK KK", _DECAY, _INVERSE)
_FORWARD = _program("forward", "q k v M P scales state span", "y starts final_state", _SCAN)
_DELTA = _program("delta", "k v M scales starts span", "delta", _SCAN)
_REVERSE = _program("reverse", "q k dy M P scales d_final span", "x d_ends d_state", _SCAN)
_PAIRS = _program("pairs", "v dy log_decay beta QK KK delta x span", "dv d_beta_pairs d_decay_pairs d_pairs", _DECAY)
_KEYS = _program("keys", "q k dy scales delta x starts d_ends d_pairs span", "dq dk row_sums state_sums")
_GATES = _program("gates", "d_beta_pairs d_decay_pairs row_sums state_sums span", "d_log_decay d_beta")
PROGRAMS = (_INTRA, _INTRA_PAIRS, _FORWARD, _DELTA, _REVERSE, _PAIRS, _KEYS, _GATES)


class Span(NamedTuple):
    """Chunks first to first + chunks of a row of T tokens."""

    first: int
    chunks: int
    T: int

    def array(self, plan: Plan) -> mx.array:
        """What the kernels are told: first, chunks, T, the chunks of the whole row, and the numbers of heads."""
        return _integers(self.first, self.chunks, self.T, -(-self.T // plan.C), plan.Hk, plan.Hv)

    def tokens(self, C: int) -> int:
        return min(self.T - self.first * C, self.chunks * C)


@lru_cache(maxsize=1024)
def _integers(*values: int) -> mx.array:
    # Kept: a new array of the host's would have to reach the GPU before every launch.
    return mx.array(values, mx.int32)


class Intra(NamedTuple):
    scales: mx.array
    M: mx.array
    P: mx.array


def intra(plan: Plan, q: mx.array, k: mx.array, log_decay: mx.array, beta: mx.array, span: Span) -> Intra:
    """What the tokens of each chunk do to each other."""
    return Intra(*_intra(False, plan, q, k, log_decay, beta, span))


def intra_with_pairs(
    plan: Plan, q: mx.array, k: mx.array, log_decay: mx.array, beta: mx.array, span: Span
) -> tuple[Intra, mx.array, mx.array]:
    """The same, and q_i . k_j and k_i . k_j for j <= i."""
    scales, M, P, QK, KK = _intra(True, plan, q, k, log_decay, beta, span)
    return Intra(scales, M, P), QK, KK


def _intra(
    pairs: bool, plan: Plan, q: mx.array, k: mx.array, log_decay: mx.array, beta: mx.array, span: Span
) -> list[mx.array]:
    C = plan.C
    outputs = [_floats(plan.B, plan.Hv, span.chunks, 3, C), *[_factors(plan, plan.Hv, span, C, C)] * 2]
    if pairs:
        outputs += [_floats(plan.B, plan.Hk, span.chunks, C, C)] * 2
    return (_INTRA_PAIRS if pairs else _INTRA)(
        [q, k, log_decay, beta, span.array(plan)],
        outputs,
        groups=(span.chunks, plan.Hv // plan.intra.constants["HEADS"], plan.B),
        **_launch(plan.intra, PAIRS=pairs),
    )


def forward(
    plan: Plan, q: mx.array, k: mx.array, v: mx.array, within: Intra, state: mx.array, span: Span
) -> tuple[mx.array, mx.array, mx.array]:
    """y (B, tokens, Hv, Dv), the states at the start of every chunk, and the state after the span."""
    y, starts, final = _FORWARD(
        [q, k, v, within.M, within.P, within.scales, state, span.array(plan)],
        [
            ((plan.B, span.tokens(plan.C), plan.Hv, plan.Dv), v.dtype),
            _factors(plan, plan.Hv, span, plan.Dv, plan.Dk),
            (state.shape, mx.float32),
        ],
        groups=(_strips(plan, plan.sweep), plan.B * plan.Hv, 1),
        **_launch(plan.sweep),
    )
    return y, starts, final


def delta(plan: Plan, k: mx.array, v: mx.array, within: Intra, starts: mx.array, span: Span) -> mx.array:
    """The rank-one updates of every chunk."""
    return _DELTA(
        [k, v, within.M, within.scales, starts, span.array(plan)],
        [_factors(plan, plan.Hv, span, plan.C, plan.Dv)],
        groups=(_strips(plan, plan.delta), span.chunks, plan.B * plan.Hv),
        **_launch(plan.delta),
    )[0]


def reverse(
    plan: Plan, q: mx.array, k: mx.array, dy: mx.array, within: Intra, d_final: mx.array, span: Span
) -> tuple[mx.array, mx.array, mx.array]:
    """x, the gradients of the states at the ends of the chunks, and of the state before the span."""
    x, d_ends, d_state = _REVERSE(
        [q, k, dy, within.M, within.P, within.scales, d_final, span.array(plan)],
        [
            _factors(plan, plan.Hv, span, plan.C, plan.Dv),
            _factors(plan, plan.Hv, span, plan.Dv, plan.Dk),
            (d_final.shape, mx.float32),
        ],
        groups=(_strips(plan, plan.sweep), plan.B * plan.Hv, 1),
        **_launch(plan.sweep),
    )
    return x, d_ends, d_state


class Pairs(NamedTuple):
    """dv (B, tokens, Hv, Dv); parts of dbeta and dlog_decay (B, Hv, n, C); d_pairs as in the module docstring."""

    dv: mx.array
    d_beta: mx.array
    d_decay: mx.array
    d_pairs: mx.array


def pairs(
    plan: Plan,
    v: mx.array,
    dy: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    QK: mx.array,
    KK: mx.array,
    delta: mx.array,
    x: mx.array,
    span: Span,
) -> Pairs:
    """Gradients of what the tokens of each chunk do to each other."""
    C = plan.C
    gates = _floats(plan.B, plan.Hv, span.chunks, C)
    d_pairs = ((plan.B, plan.Hk, span.chunks, 4, plan.parts, C, C), plan.factor)
    return Pairs(
        *_PAIRS(
            [v, dy, log_decay, beta, QK, KK, delta, x, span.array(plan)],
            [((plan.B, span.tokens(C), plan.Hv, plan.Dv), v.dtype), gates, gates, d_pairs],
            groups=(span.chunks, plan.Hk, plan.B),
            **_launch(plan.pairs),
        )
    )


class Keys(NamedTuple):
    """dq, dk (B, tokens, Hk, Dk), and sums that the gates get: over the columns of a block (B, Hv, n, blocks, 3, C),
    over the part of a state that a SIMD group reads (B, Hv, n, blocks, groups)."""

    dq: mx.array
    dk: mx.array
    row_sums: mx.array
    state_sums: mx.array


def keys(
    plan: Plan,
    q: mx.array,
    k: mx.array,
    dy: mx.array,
    scales: mx.array,
    delta: mx.array,
    x: mx.array,
    starts: mx.array,
    d_ends: mx.array,
    d_pairs: mx.array,
    span: Span,
) -> Keys:
    """Gradients of q and k, and what the gates get from products with the states."""
    C = plan.C
    by_key = ((plan.B, span.tokens(C), plan.Hk, plan.Dk), q.dtype)
    blocks = plan.Dk // plan.block
    sums = (plan.B, plan.Hv, span.chunks, blocks)
    return Keys(
        *_KEYS(
            [q, k, dy, scales, delta, x, starts, d_ends, d_pairs, span.array(plan)],
            [by_key, by_key, _floats(*sums, 3, C), _floats(*sums, plan.keys.groups)],
            groups=(span.chunks, blocks, plan.B * plan.Hk),
            **_launch(plan.keys),
        )
    )


def gates(plan: Plan, pairs: Pairs, keys: Keys, span: Span) -> tuple[mx.array, mx.array]:
    """Gradients of log_decay and beta (B, tokens, Hv)."""
    output = _floats(plan.B, span.tokens(plan.C), plan.Hv)
    d_log_decay, d_beta = _GATES(
        [pairs.d_beta, pairs.d_decay, keys.row_sums, keys.state_sums, span.array(plan)],
        [output, output],
        groups=(span.chunks, plan.B * plan.Hv, 1),
        **_launch(plan.gates),
    )
    return d_log_decay, d_beta


def _floats(*shape: int) -> tuple[tuple[int, ...], mx.Dtype]:
    return shape, mx.float32


def _factors(plan: Plan, heads: int, span: Span, *shape: int) -> tuple[tuple[int, ...], mx.Dtype]:
    return (plan.B, heads, span.chunks, plan.parts, *shape), plan.factor


def _strips(plan: Plan, stage: Stage) -> int:
    """Threadgroups that share the value rows of a head."""
    return plan.Dv // (stage.rows * stage.groups)


def _launch(stage: Stage, **constants: int) -> dict[str, Any]:
    return {"constants": {**stage.constants, **constants}, "threads": stage.threads, "arena": stage.arena}
