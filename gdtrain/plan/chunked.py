"""gdkernels.chunked on the tape: MLX operations in float32, for a block of chunks at a time."""

from gdkernels.blocks import _BLOCK_BYTES

from gdtrain.plan.pieces import Pieces
from gdtrain.plan.rules import RULE, Gradients, Rule
from gdtrain.plan.sizes import DeltaNet
from gdtrain.plan.tape import Buffer

# Chunks that are laid out one after another; of more, each stands for several.
_CHUNKS = 48


class ChunkedRule(Rule):
    """On a CPU the heads are shared by its cores, and what is made for them is joined."""

    def __init__(self, pieces: Pieces, net: DeltaNet) -> None:
        super().__init__(pieces, net)
        self.groups = 1 if pieces.run.gpu else max(1, min(pieces.run.cores, net.Hk))
        B, C, share = pieces.run.B, self.C, 1 / self.groups
        # Bytes of a chunk: keys, values, pairs of tokens for every key head and every value head, and a state.
        self.k, self.v = 4 * B * net.Hk * C * net.Dk * share, 4 * B * net.Hv * C * net.Dv * share
        self.kk, self.vv = 4 * B * net.Hk * C * C * share, 4 * B * net.Hv * C * C * share
        self.s = self.state * share

    def forward(self, q: Buffer, k: Buffer, v: Buffer, gates: Buffer) -> Buffer:
        state = self.p.tape.view(self.make(self.state))
        self.inputs = [q, k, v, gates]
        self.starts: list[list[Buffer]] = []
        ys: list[Buffer] = []
        for group in range(self.groups):
            self._on(group)
            tokens, S = [self.p.tape.view(x) for x in self.inputs], self.p.tape.view(state)
            own: list[Buffer] = []
            parts: list[Buffer] = []
            for n in self._blocks():
                y, S0, S = self._forward_block(n, tokens, S)
                parts.append(self._tokens(n, self.net.values, y))
                own.append(S0)
                S, *tokens = (self.p.tape.view(x, parts[-1], S0) for x in (S, *tokens))
            self.starts.append(own)
            ys.append(parts[0] if len(parts) == 1 else self.p.joined(self.net.values / self.groups, *parts))
        self.p.tape.stream = 0
        return ys[0] if len(ys) == 1 else self.p.joined(self.net.values, *ys)

    def backward(self, dy: Buffer) -> Gradients:
        net = self.net
        widths = (net.keys, net.keys, net.values)
        everything = [self.p.tape.view(x, dy) for x in (*self.inputs, dy)]
        last = self.make(self.state)
        groups: list[tuple[Buffer, ...]] = []
        for group, own in enumerate(self.starts):
            self._on(group)
            tokens, dS = [self.p.tape.view(x) for x in everything], self.p.tape.view(last)
            parts: list[tuple[Buffer, ...]] = []
            for n, S0 in zip(reversed(self._blocks()), reversed(own), strict=True):
                *wide, gates, dS = self._backward_block(n, tokens, S0, dS)
                part = [self._tokens(n, w, x) for w, x in zip(widths, wide, strict=True)]
                parts.append((*part, gates))
                dS, *tokens = (self.p.tape.view(x, *parts[-1]) for x in (dS, *tokens))
            groups.append(self._join(parts[::-1], 1 / self.groups))
        self.p.tape.stream = 0
        q, k, v, gates = groups[0] if len(groups) == 1 else self._join(groups, 1)
        return q, k, v, gates

    def _on(self, group: int) -> None:
        """What is made from now on is the group's."""
        self.p.tape.stream = group + 1 if self.groups > 1 else 0

    def _join(self, parts: list[tuple[Buffer, ...]], share: float) -> tuple[Buffer, ...]:
        if len(parts) == 1:
            return parts[0]
        net = self.net
        *wide, gates = zip(*parts, strict=True)
        joined = (self.p.joined(w * share, *xs) for w, xs in zip((net.keys, net.keys, net.values), wide, strict=True))
        return (*joined, self.make(0, *gates))

    def _blocks(self) -> list[int]:
        return self.spans(_BLOCK_BYTES // (8 * self.vv + 12 * self.v + 3 * self.s + 6 * self.k))

    def _steps(self, n: int) -> tuple[float, float, float, int]:
        """Bytes of keys, values and the state in one step of n chunks, and how many steps."""
        steps = min(n, _CHUNKS)
        share = n / steps
        return self.k * share, self.v * share, self.s * share, steps

    def _tokens(self, n: int, width: float, x: Buffer) -> Buffer:
        """The rows of n chunks as activations."""
        size = self.rows(width / self.groups, n)
        made = self.make(4 * size / self.p.run.itemsize, x, views=3)
        return made if self.p.run.itemsize == 4 else self.p.tape.make(size, made, part=RULE)

    def _over(self, size: float, *inputs: Buffer, views: int = 0) -> Buffer:
        return self.p.tape.over(size, *inputs, views=views, item=4, part=RULE)

    def _cast(self, size: float, x: Buffer) -> Buffer:
        """Tokens of a block in float32. Heads lie side by side in them, so that products copy them again."""
        for _ in range(3):
            x = self.p.tape.view(x)
        return x if self.p.run.itemsize == 4 else self.make(size, x)

    def _within(self, n: int, q: Buffer, k: Buffer, gates: Buffer) -> tuple[Buffer, ...]:
        """Decays between tokens, k.k, q.k, P and M of n chunks, and decays of tokens."""
        keys, kk, vv = n * self.k, n * self.kk, n * self.vv
        k_k = self.make(kk, k, self.p.tape.view(k), scratch=2 * keys)
        q_k = self.make(kk, q, self.p.tape.view(k), scratch=2 * keys)
        sums = self._over(vv, self.make(vv, gates, views=6))
        between = self._over(vv, self._over(vv, sums))
        A = self._over(vv, between, k_k)
        A = self._over(vv, self._over(vv, A, gates))
        M = self._over(vv, self._over(vv, A))
        return between, k_k, q_k, self._over(vv, between, q_k), M, self.p.tape.small(3, gates, views=2)

    def _forward_block(self, n: int, tokens: list[Buffer], S: Buffer) -> tuple[Buffer, Buffer, Buffer]:
        q, k, v = (self._cast(n * size, x) for size, x in zip((self.k, self.k, self.v), tokens, strict=False))
        gates = tokens[3]
        view = self.p.tape.view
        _, _, _, P, M, decays = self._within(n, q, k, gates)
        starts, deltas = [], []
        one_k, one_v, one_s, steps = self._steps(n)
        for _ in range(steps):
            starts.append(S)
            k_i, decay = view(k), view(decays)
            read = self.make(one_v, k_i, view(S), scratch=one_k)
            error = self._over(one_v, view(v), self._over(one_v, view(decay), view(read)))
            weighted = view(self._over(one_v, view(decay), error))
            deltas.append(self.make(one_v, view(M), weighted, scratch=one_v))
            weighted = view(self._over(one_v, view(decay), view(deltas[-1])))
            write = view(self.make(one_s, view(k_i), weighted, scratch=one_k))
            S = self._over(one_s, self._over(one_s, view(view(decay)), S), write)
        S0 = self.make(n * self.s, *(view(x) for x in starts))
        y = view(self.make(n * self.v, P, self.make(n * self.v, *(view(x) for x in deltas))))
        read = view(self.make(n * self.v, q, view(S0), scratch=n * self.k))
        return self._over(n * self.v, y, self._over(n * self.v, view(decays), read)), S0, S

    def _backward_block(self, n: int, tokens: list[Buffer], S0: Buffer, dS: Buffer) -> tuple[Buffer, ...]:
        k_, v_, kk, vv = n * self.k, n * self.v, n * self.kk, n * self.vv
        q, k, v = (self._cast(n * size, x) for size, x in zip((self.k, self.k, self.v), tokens, strict=False))
        gates, dy = tokens[3], self._cast(v_, tokens[4])
        view, make, over = self.p.tape.view, self.make, self._over
        between, k_k, q_k, P, M, decays = self._within(n, q, k, gates)
        k_S0 = view(make(v_, k, view(S0), scratch=k_))
        error = over(v_, v, over(v_, view(decays), k_S0))
        delta = make(v_, M, view(over(v_, view(decays), error)), scratch=v_)
        d_delta = make(v_, view(P), view(dy), scratch=v_)
        gamma_dy = over(v_, view(decays), dy)
        ends, xs, k_ends = [], [], []
        one_k, one_v, one_s, steps = self._steps(n)
        for _ in range(steps):
            ends.append(dS)
            k_i, decay = view(k), view(decays)
            k_ends.append(view(make(one_v, k_i, view(dS), scratch=one_k)))
            moved = over(one_v, view(d_delta), view(over(one_v, view(decay), k_ends[-1])))
            xs.append(make(one_v, view(view(M)), moved))
            decayed = over(one_s, view(view(decay)), dS)
            decayed = over(one_s, decayed, view(make(one_s, view(view(q)), view(view(gamma_dy)), scratch=one_k)))
            weighted = view(over(one_v, view(decay), view(xs[-1])))
            dS = over(one_s, decayed, view(make(one_s, view(k_i), weighted, scratch=one_k)))
        dS_C = make(n * self.s, *(view(x) for x in ends))
        k_dS_C, x = (make(v_, *(view(y) for y in of)) for of in (k_ends, xs))
        dP = over(vv, make(vv, view(dy), view(delta), scratch=v_), between)
        dA = over(vv, over(vv, over(vv, make(vv, x, view(delta)), between)))
        x_wide, delta_wide = view(x), view(delta)
        through_P = view(make(kk, dP))
        through_A = view(make(kk, over(vv, view(gates), dA)))
        dq = over(k_, make(k_, through_P, k, scratch=k_), make(k_, view(gamma_dy), view(view(S0))))
        dk = make(k_, view(through_P), q, scratch=k_)
        dk = over(k_, dk, make(k_, make(kk, through_A, view(through_A)), k, scratch=k_))
        dk = over(k_, dk, make(k_, view(over(v_, view(decays), delta_wide)), view(view(dS_C))))
        scaled = over(v_, view(decays), x_wide)
        dk = over(k_, dk, make(k_, view(scaled), view(view(S0))))
        by_pairs = over(vv, dA, k_k)
        d_beta = self.p.tape.small(3, over(v_, x_wide, error), by_pairs, views=1)
        R = over(vv, over(vv, dP, q_k), over(vv, view(gates), by_pairs))
        R = self.p.tape.small(2, over(vv, make(vv, R)))
        read = over(v_, gamma_dy, view(make(v_, q, view(S0), scratch=k_)))
        u = self.p.tape.small(3, over(v_, read, over(v_, scaled, k_S0)), views=1)
        e = self.p.tape.small(3, over(v_, delta_wide, k_dS_C), views=1)
        w = self.p.tape.small(3, over(n * self.s, S0, dS_C), views=1)
        d_gates = self.p.tape.small(3, R, u, e, w, d_beta)
        return dq, dk, over(v_, view(gates), x_wide), d_gates, dS
