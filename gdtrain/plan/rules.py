"""The gated delta rule on the tape: gdkernels.fused, recurrent, and what has no scratch to speak of."""

from collections.abc import Sequence
from math import ceil

from gdkernels.fused.rule import _LAUNCH_PRODUCTS as FUSED_PRODUCTS
from gdkernels.fused.rule import _SPAN_BYTES as FUSED_BYTES
from gdkernels.recurrent.layout import LAUNCH_MULTIPLY_ADDS, SUMS_BYTES

from gdtrain.bench.estimate import _STATES_PER_STEP
from gdtrain.plan.pieces import Pieces
from gdtrain.plan.sizes import DeltaNet
from gdtrain.plan.tape import Buffer

RULE = "rule"

Gradients = tuple[Buffer, Buffer, Buffer, Buffer]


class Rule:
    """One call of the rule. What all have in common: sizes in bytes, and buffers that count for the rule."""

    def __init__(self, pieces: Pieces, net: DeltaNet) -> None:
        self.p, self.net = pieces, net
        run = pieces.run
        self.C = min(run.chunk, run.T)
        self.N = ceil(run.T / self.C)
        self.state = 4 * run.B * net.Hv * net.Dv * net.Dk

    def forward(self, q: Buffer, k: Buffer, v: Buffer, gates: Buffer) -> Buffer:
        """y. It keeps what the backward needs."""
        raise NotImplementedError

    def backward(self, dy: Buffer) -> Gradients:
        """Of q, k, v and the gates."""
        raise NotImplementedError

    def make(self, size: float, *inputs: Buffer, views: int = 0, scratch: float = 0) -> Buffer:
        return self.p.tape.make(size, *inputs, views=views, scratch=scratch, item=4, part=RULE)

    def kernel(self, sizes: Sequence[float], *inputs: Buffer) -> tuple[Buffer, ...]:
        return self.p.tape.kernel(sizes, *inputs, item=4, part=RULE)

    def rows(self, width: float, chunks: float | None = None) -> float:
        """Bytes of an activation of so many chunks."""
        run = self.p.run
        return run.positions * run.itemsize * width * (1 if chunks is None else chunks / self.N)

    def join(self, spans: Sequence[tuple[Buffer, ...]]) -> Gradients:
        """Gradients of spans as those of the row."""
        net = self.net
        if len(spans) == 1:
            q, k, v, gates = spans[0]
            return q, k, v, gates
        q, k, v = (self.p.act(w, *xs) for w, xs in zip((net.keys, net.keys, net.values), zip(*spans)))  # noqa: B905
        return q, k, v, self.make(0, *(span[3] for span in spans))

    def spans(self, chunks: float) -> list[int]:
        """Numbers of chunks, of at most so many each."""
        length = max(1, int(chunks))
        return [min(length, self.N - first) for first in range(0, self.N, length)]


class FusedRule(Rule):
    """Kernels, one after another; those of the backward in spans."""

    def forward(self, q: Buffer, k: Buffer, v: Buffer, gates: Buffer) -> Buffer:
        net, C, B = self.net, self.C, self.p.run.B
        self.inputs = (q, k, v, gates)
        inputs = self.inputs
        state = self.make(self.state)
        ys, starts = [], []
        for n in self._spans(memory=False):
            pairs = 4 * B * net.Hv * n * C * C
            within = self.kernel([12 * B * net.Hv * n * C, pairs, pairs], *inputs)
            sizes = [self.rows(net.values, n), n * self.state, self.state]
            y, start, state = self.kernel(sizes, *inputs, *within, state)
            ys.append(y)
            starts.append(start)
            state, *waiting = (self.p.tape.view(x, y) for x in (state, *inputs))
            inputs = (waiting[0], waiting[1], waiting[2], waiting[3])
        single = len(ys) == 1
        self.starts = starts[0] if single else self.make(self.N * self.state, *starts)
        return ys[0] if single else self.p.act(net.values, *ys)

    def backward(self, dy: Buffer) -> Gradients:
        net, C, B = self.net, self.C, self.p.run.B
        tokens = [self.p.tape.view(x, dy) for x in (*self.inputs, dy)]
        d_state = self.make(self.state)
        parts: list[tuple[Buffer, ...]] = []
        for n in self._spans(memory=True):
            *inputs, dy = tokens
            pairs, of_keys = (4 * B * heads * n * C * C for heads in (net.Hv, net.Hk))
            rows = 4 * B * net.Hv * n * C * net.Dv
            scales, M, P, QK, KK = self.kernel([12 * B * net.Hv * n * C, pairs, pairs, of_keys, of_keys], *inputs)
            x, d_ends, d_state = self.kernel([rows, n * self.state, self.state], *inputs, dy, scales, M, P, d_state)
            delta = self.make(rows, *inputs, scales, M, self.starts)
            gates = 4 * B * net.Hv * n * C
            sizes = [self.rows(net.values, n), gates, gates, 4 * of_keys]
            dv, *by_pairs, d_pairs = self.kernel(sizes, *inputs, dy, delta, x, QK, KK)
            sizes = [self.rows(net.keys, n)] * 2 + [3 * gates]
            dq, dk, sums = self.kernel(sizes, *inputs, dy, scales, delta, x, self.starts, d_ends, d_pairs)
            parts.append((dq, dk, dv, self.kernel([gates, gates], sums, *by_pairs)[0]))
            d_state, *tokens = (self.p.tape.view(x, *parts[-1]) for x in (d_state, *inputs, dy))
        return self.join(parts[::-1])

    def _spans(self, *, memory: bool) -> list[int]:
        """Of about equal lengths."""
        net, C, B = self.net, self.C, self.p.run.B
        heads = B * net.Hv
        fit = FUSED_PRODUCTS // (heads * C * (3 * net.Dk * net.Dv + C * (net.Dk + 2 * net.Dv)))
        if memory:
            floats = heads * (2 * C * C + 2 * C * net.Dv + net.Dv * net.Dk) + B * net.Hk * 6 * C * C
            fit = min(fit, FUSED_BYTES // (4 * floats))
        return self.spans(ceil(self.N / ceil(self.N / max(1, int(fit)))))


class RecurrentRule(Rule):
    """A scan, and a reverse scan in spans, whose partial sums are the scratch."""

    def forward(self, q: Buffer, k: Buffer, v: Buffer, gates: Buffer) -> Buffer:
        self.inputs = (q, k, v, gates)
        sizes = [self.rows(self.net.values), self.N * self.state, self.state]
        y, self.starts, _ = self.kernel(sizes, *self.inputs, self.make(self.state))
        return y

    def backward(self, dy: Buffer) -> Gradients:
        net, C, B = self.net, self.C, self.p.run.B
        tokens = [self.p.tape.view(x, dy) for x in (*self.inputs, dy)]
        sums = 4 * B * net.Hv * ceil(net.Dv / 8) * 2 * net.Dk
        fit = min(LAUNCH_MULTIPLY_ADDS // (13 * B * net.Hv * net.Dv * net.Dk), SUMS_BYTES // sums)
        d_state = self.make(self.state)
        parts: list[tuple[Buffer, ...]] = []
        for n in self.spans(fit // C):
            sizes = [n * C * sums, self.rows(net.values, n), self.state, C / 4 * self.state]
            key_sums, dv, d_state, _ = self.kernel(sizes, *tokens, self.starts, d_state)
            both = self.make(self.rows(2 * net.keys, n), self.make(8 * B * n * C * net.keys, key_sums))
            dq, dk = self.p.tape.view(both), self.p.tape.view(both)
            parts.append((dq, dk, dv, self.make(0, key_sums)))
            d_state, *tokens = (self.p.tape.view(x, *parts[-1]) for x in (d_state, *tokens))
        return self.join(parts[::-1])


class StepwiseRule(Rule):
    """Token by token: automatic differentiation of all (reference) or of a chunk (replay); MLX's own kernel (native),
    whose backward takes 64 KiB for every token and value head."""

    def forward(self, q: Buffer, k: Buffer, v: Buffer, gates: Buffer) -> Buffer:
        run = self.p.run
        self.inputs = (q, k, v, gates)
        kept = {"reference": _STATES_PER_STEP * run.T * self.state, "replay": self.N * self.state}
        y, self.starts = self.kernel([self.rows(self.net.values), kept.get(run.backend, 0)], *self.inputs)
        return y

    def backward(self, dy: Buffer) -> Gradients:
        run, net = self.p.run, self.net
        sizes = {"replay": _STATES_PER_STEP * self.C * self.state, "native": run.B * net.Hv * run.T * 64 * 2**10}
        scratch = self.make(sizes.get(run.backend, 0), dy, *self.inputs, self.starts)
        rows = [self.rows(width) for width in (net.keys, net.keys, net.values, net.Hv)]
        q, k, v, gates = self.kernel(rows, scratch, dy, *self.inputs)
        return q, k, v, gates
