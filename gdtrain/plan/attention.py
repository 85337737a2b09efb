"""Gated attention: gdtrain.model.layers and gdtrain.model.attention."""

from gdtrain.model.attention import _BLOCK_BYTES, _CPU_QUERIES, _GPU_QUERIES
from gdtrain.plan.pieces import Kept, Pieces
from gdtrain.plan.sizes import Attention, Block
from gdtrain.plan.tape import Buffer

# Blocks that are laid out, the last ones, which have the most scores. The others are what they make.
_SPANS = 32


class AttentionTape:
    """Its forward and backward on the tape."""

    def __init__(self, pieces: Pieces, block: Block, trained: set[str], layer: Attention) -> None:
        self.p, self.layer, self.trained = pieces, layer, trained
        self.matrices = {name: block.matrix(f"self_attn.{name}") for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        self.kept: dict[str, Kept] = {}
        self.queries, self.keys = layer.H * layer.D, layer.Hkv * layer.D
        self.masks = pieces.run.B if pieces.run.packed else 1

    def forward(self, x: Buffer) -> Buffer:
        p, q, k = self.p, self.queries, self.keys
        qg, k_in, v = (self._project(name, x) for name in ("q_proj", "k_proj", "v_proj"))
        q_in = p.tape.view(qg)
        q_normed, self.q_norm = p.norm(q_in, q, views=2)
        k_normed, self.k_norm = p.norm(k_in, k)
        self.q, self.k, self.v = self._rotate(q_normed, q), self._rotate(k_normed, k), p.tape.view(v)
        self.y = p.act(q, self._attend(), views=2)
        self.sigmoid = p.act_over(q, p.act(q, qg, views=2))
        return self._project("o_proj", p.act_over(q, self.y, self.sigmoid))

    def backward(self, dy: Buffer, *, dx: bool) -> Buffer:
        p, q, k = self.p, self.queries, self.keys
        d = self._back("o_proj", dy)
        d_y, d_sigmoid = p.act_over(q, d, self.sigmoid), p.act_over(q, d, self.y)
        d_gate = p.act_over(q, d_sigmoid, p.act_over(q, self.sigmoid, p.act_over(q, self.sigmoid)))
        dq, dk, dv = self._attend_backward(p.tape.view(d_y))
        dq = p.norm_backward(self._rotate(dq, q), self.q_norm, q, name="self_attn.q_norm", apart=True)
        dk = p.norm_backward(self._rotate(dk, k), self.k_norm, k, name="self_attn.k_norm", apart=True)
        dqg = p.joined(2 * q, dq, d_gate, views=2)
        gradients = [("q_proj", dqg), ("k_proj", p.act(k, dk, views=2)), ("v_proj", p.act(k, dv, views=2))]
        total = None
        for name, gradient in gradients:
            part = self._back(name, gradient, dx=dx)
            total = part if total is None else p.act_over(self.matrices["q_proj"].inputs, total, part)
        assert total is not None
        return total

    def _project(self, name: str, x: Buffer) -> Buffer:
        m = self.matrices[name]
        y, self.kept[name] = self.p.linear(x, m, m.name in self.trained)
        return y

    def _back(self, name: str, dy: Buffer, *, dx: bool = True) -> Buffer:
        m = self.matrices[name]
        return self.p.linear_backward(dy, m, self.kept[name], m.name in self.trained, dx=dx)

    def _rotate(self, x: Buffer, width: int) -> Buffer:
        """A kernel, or slices on a CPU, which has none: a quarter of a head is rotated."""
        p = self.p
        if p.run.gpu:
            return p.act_over(width, p.act(width, x, views=1))
        angles = p.tape.small(8)
        halves = [p.act(width / 8, x, angles, views=1, commands=3) for _ in range(4)]
        sums = [p.act_over(width / 8, *pair) for pair in (halves[:2], halves[2:])]
        return p.act_over(width, p.act(width, x, commands=6), *sums)

    def _spans(self) -> list[tuple[int, int]]:
        """First and last (exclusive) query of every block."""
        B, T = self.p.run.B, self.p.run.T
        most = _GPU_QUERIES if self.p.run.gpu else _CPU_QUERIES
        queries = max(1, min(most, _BLOCK_BYTES // (4 * B * self.layer.H * T)))
        return [(first, min(T, first + queries)) for first in range(0, T, queries)]

    def _attend(self) -> Buffer:
        p, tape = self.p, self.p.tape
        B, H, D, item = p.run.B, self.layer.H, self.layer.D, p.run.itemsize
        ys: list[Buffer] = []
        q, k, v = self.q, self.k, self.v
        spans = self._spans()
        if others := spans[:-_SPANS]:
            ys.append(tape.make(B * H * others[-1][1] * D * item, q, k, v))
        for first, last in spans[-_SPANS:]:
            q, k, v = (tape.view(x, *ys[-1:]) for x in (q, k, v))
            rows = B * H * (last - first)
            rows_q = tape.make(rows * D * item, q, views=1)
            scores = tape.make(rows * last * item, rows_q, tape.view(k), views=1)
            mask = tape.make(self.masks * (last - first) * last, tape.small(2), views=4)
            scores = tape.over(rows * last * item, tape.over(rows * last * item, scores, mask, views=1))
            ys.append(tape.make(rows * D * item, scores, tape.view(v)))
        return p.joined(self.queries, *ys)

    def _attend_backward(self, dy: Buffer) -> tuple[Buffer, Buffer, Buffer]:
        p, tape = self.p, self.p.tape
        B, H, Hkv, D, T, item = p.run.B, self.layer.H, self.layer.Hkv, self.layer.D, p.run.T, p.run.itemsize
        q, k, v, dy = (tape.view(x, dy) for x in (self.q, self.k, self.v, dy))
        dk, dv = (tape.make(4 * B * Hkv * T * D) for _ in range(2))
        parts: list[tuple[Buffer, ...]] = []
        spans = self._spans()
        for first, last in reversed(spans[-_SPANS:]):
            rows, keys = B * H * (last - first), B * Hkv * last
            q_rows, dy_rows = (tape.make(item * rows * D, x, views=1) for x in (q, dy))
            k_past, v_past = tape.view(k), tape.view(v)
            scaled_q, scaled_dy = (self._wide_rows(x, rows) for x in (q_rows, dy_rows))
            scores = tape.make(4 * rows * last, scaled_q, self._wide_keys(k_past, keys))
            mask = tape.make(self.masks * (last - first) * last, tape.small(2), views=3)
            weights = tape.over(4 * rows * last, tape.over(4 * rows * last, scores, mask, views=1))
            d_weights = tape.view(tape.make(4 * rows * last, scaled_dy, self._wide_keys(v_past, keys)))
            sums = tape.make(4 * rows, tape.over(4 * rows * last, weights, d_weights))
            d_scores = tape.over(4 * rows * last, d_weights, tape.view(sums))
            d_scores = tape.over(4 * rows * last, weights, d_scores)
            if item != 4:
                weights, d_scores = (tape.make(item * rows * last, x) for x in (weights, d_scores))
            dk_block, dv_block = (
                self._wide_product(item * keys * D, *x) for x in ((d_scores, q_rows), (weights, dy_rows))
            )
            dk, dv = tape.over(4 * keys * D, tape.view(dk), dk_block), tape.over(4 * keys * D, tape.view(dv), dv_block)
            own = B * Hkv * (last - first) * D * item
            part = (
                tape.view(tape.make(item * rows * D, d_scores, k_past)),
                *(tape.view(x) if item == 4 else tape.make(own, x, views=1) for x in (dk, dv)),
            )
            q, k, v, dy, dk, dv = (tape.view(x, *part, dk, dv) for x in (q, k, v, dy, dk, dv))
            parts.append(part)
        if others := spans[:-_SPANS]:
            sizes = [B * heads * others[-1][1] * D * item for heads in (H, Hkv, Hkv)]
            parts.append((tape.make(sizes[0], q, dy), tape.make(sizes[1], dk), tape.make(sizes[2], dv)))
        dq_, dk_, dv_ = zip(*reversed(parts), strict=True)
        return p.joined(self.queries, *dq_), p.joined(self.keys, *dk_), p.joined(self.keys, *dv_)

    def _wide_rows(self, x: Buffer, rows: int) -> Buffer:
        """Scaled, in float32."""
        size = 4 * rows * self.layer.D
        made = self.p.tape.make(size, x, views=1)
        return made if self.p.run.itemsize == 4 else self.p.tape.over(size, made)

    def _wide_keys(self, x: Buffer, keys: int) -> Buffer:
        if self.p.run.itemsize == 4:
            return self.p.tape.view(x)
        return self.p.tape.make(4 * keys * self.layer.D, x)

    def _wide_product(self, size: int, a: Buffer, b: Buffer) -> Buffer:
        made = self.p.tape.make(size, a, b, views=1)
        return made if self.p.run.itemsize == 4 else self.p.tape.make(2 * size, made)
