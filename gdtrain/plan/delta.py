"""The Gated DeltaNet layer around the rule: gdtrain.model.layers and the convolution of gdkernels."""

from gdtrain.plan.chunked import ChunkedRule
from gdtrain.plan.pieces import Kept, Pieces
from gdtrain.plan.rules import FusedRule, RecurrentRule, Rule, StepwiseRule
from gdtrain.plan.sizes import Block, DeltaNet, Matrix
from gdtrain.plan.tape import Buffer

_RULES = {"fused": FusedRule, "recurrent": RecurrentRule, "chunked": ChunkedRule}


class DeltaTape:
    """Its forward and backward on the tape."""

    def __init__(self, pieces: Pieces, block: Block, trained: set[str], net: DeltaNet) -> None:
        self.p, self.net, self.trained = pieces, net, trained
        self.matrices = {m.name.rsplit(".", 1)[1]: m for m in block.matrices if m.name.startswith("linear_attn.")}
        self.fused = "in_proj_qkvz" in self.matrices
        self.kept: dict[str, Kept] = {}
        self.channels = 2 * net.keys + net.values
        self.rule: Rule = _RULES.get(pieces.run.backend, StepwiseRule)(pieces, net)

    def forward(self, x: Buffer) -> Buffer:
        p, net = self.p, self.net
        k, v, c = net.keys, net.values, self.channels
        if self.fused:
            joint = self._project("in_proj_qkvz", x)
            # Heads of z lie apart: with several to a key head they are copied, with one z keeps all of the projection.
            self.z = p.act(v, joint, views=3) if net.Hv > net.Hk else p.tape.view(joint)
            qkv = p.joined(c, *(p.act(width, joint, views=3) for width in (k, k, v)))
            gates = [self._project("in_proj_ba", x)]
        else:
            qkv, self.z, *gates = (self._project(f"in_proj_{name}", x) for name in ("qkv", "z", "a", "b"))
        qkv = self._convolve(qkv)
        q_in, k_in, values = (p.tape.view(p.tape.view(qkv)) for _ in range(3))
        (q, self.q_norm), (key, self.k_norm) = (p.norm(x, k, views=1, weight=False) for x in (q_in, k_in))
        q, key = p.act_over(k, q), p.act_over(k, key)
        decays = p.wide(2 * net.Hv, p.tape.small(8, *gates))
        y = self.rule.forward(q, key, values, decays)
        normed, self.y_norm = p.norm(y, v)
        self.z_wide = p.widen(v, self.z)
        self.sigmoid, self.silu = p.silu(v, self.z_wide, wide=True)
        self.normed = p.widen(v, normed)
        return self._project("out_proj", p.narrow(v, p.wide_over(v, self.silu, self.normed)))

    def backward(self, dy: Buffer, *, dx: bool) -> Buffer:
        p, net = self.p, self.net
        k, v, c = net.keys, net.values, self.channels
        d = p.widen(v, self._back("out_proj", dy))
        d_silu, d_normed = p.wide_over(v, d, self.normed), p.wide_over(v, d, self.silu)
        dz = p.narrow(v, p.silu_backward(v, d_silu, self.z_wide, self.sigmoid, wide=True))
        d_rule = p.norm_backward(p.narrow(v, d_normed), self.y_norm, v, name="linear_attn.norm")
        dq, dk, dv, d_decays = self.rule.backward(d_rule)
        dq, dk = p.act_over(k, dq, views=1), p.act_over(k, dk, views=1)
        dq = p.norm_backward(dq, self.q_norm, k, apart=True)
        dk = p.norm_backward(dk, self.k_norm, k, apart=True)
        d_gates = p.act(net.Hv, p.tape.small(8, d_decays))
        d_qkv = self._convolve_backward(p.joined(c, dq, dk, dv, views=1))
        if self.fused:
            joint = p.joined(c + v, *(p.act(width, d_qkv, views=2) for width in (k, k, v)), dz)
            gradients = [("in_proj_qkvz", joint), ("in_proj_ba", d_gates)]
        else:
            gradients = [("in_proj_qkv", d_qkv), ("in_proj_z", dz), ("in_proj_a", d_gates), ("in_proj_b", d_gates)]
        total = None
        for name, gradient in gradients:
            part = self._back(name, gradient, dx=dx)
            total = part if total is None else p.act_over(self.matrices[name].inputs, total, part)
        assert total is not None
        return total

    def _project(self, name: str, x: Buffer) -> Buffer:
        m: Matrix = self.matrices[name]
        y, self.kept[name] = self.p.linear(x, m, m.name in self.trained)
        return y

    def _back(self, name: str, dy: Buffer, *, dx: bool = True) -> Buffer:
        m = self.matrices[name]
        return self.p.linear_backward(dy, m, self.kept[name], m.name in self.trained, dx=dx)

    def _convolve(self, x: Buffer) -> Buffer:
        """With its SiLU: a kernel, or a product for every tap on a CPU."""
        p, c = self.p, self.channels
        if p.run.gpu:
            self.conv: tuple[Buffer, ...] = (x,)
            return p.act(c, x)
        padded = p.act(c, x, commands=3)
        self.taps: list[Buffer] = []
        y: Buffer | None = None
        for back in reversed(range(self.net.taps)):
            shifted = p.widen(c, p.tape.view(padded))
            if p.run.packed and back:
                shifted = p.wide_over(c, shifted, commands=5)  # without what is of another document
            self.taps.append(shifted)
            tap = p.wide(c, shifted, commands=4) if shifted.view else p.wide_over(c, shifted, commands=3)
            y = tap if y is None else p.wide_over(c, y, tap)
        assert y is not None
        sigmoid = p.wide_over(c, y)
        self.conv = (y, sigmoid)
        return p.narrow(c, p.wide_over(c, y, sigmoid))

    def _convolve_backward(self, dy: Buffer) -> Buffer:
        p, c = self.p, self.channels
        full = p.run.kind == "full"
        if p.run.gpu:
            for _ in range(self.net.taps if full else 0):  # MLX operations, for the weight alone
                p.gradient("linear_attn.conv1d", p.run.itemsize * c, p.wide(c, dy, *self.conv))
            return p.act(c, dy, *self.conv)
        d = p.silu_backward(c, p.widen(c, dy), *self.conv, wide=True)
        total: Buffer | None = None
        for shifted in self.taps:
            if full:
                p.gradient("linear_attn.conv1d", p.run.itemsize * c, p.wide_over(c, d, shifted))
            tap = p.wide_over(c, d, commands=3)
            tap = p.narrow(c, p.wide_over(c, tap, commands=3) if p.run.packed else tap)
            part = p.act(c, tap, commands=6)
            total = part if total is None else p.act_over(c, total, part)
        assert total is not None
        return p.tape.view(total)
