"""The MLP of a block, dense or a mixture of experts."""

from gdtrain.plan.pieces import Kept, Pieces
from gdtrain.plan.sizes import Block, Experts
from gdtrain.plan.tape import Buffer


class DenseTape:
    """Three projections with a gate. name: in the block; width: between them."""

    def __init__(self, pieces: Pieces, block: Block, trained: set[str], name: str, width: int) -> None:
        self.p, self.width, self.trained = pieces, width, trained
        self.gate, self.up, self.down = (block.matrix(f"{name}.{part}_proj") for part in ("gate", "up", "down"))

    def forward(self, x: Buffer, *, value: bool) -> Buffer:
        """value: whether the result is needed, or only what the backward needs."""
        p, i = self.p, self.width
        self.g, self.kept_gate = p.linear(x, self.gate, self.gate.name in self.trained)
        self.u, self.kept_up = p.linear(x, self.up, self.up.name in self.trained)
        self.sigmoid, self.silu = p.silu(i, self.g)
        adapted = self.down.name in self.trained
        self.kept_down = Kept(x)
        if not (value or adapted):
            return x
        y, self.kept_down = p.linear(p.act_over(i, self.silu, self.u), self.down, adapted, value=value)
        return y

    def backward(self, dy: Buffer) -> Buffer:
        p, i, trained = self.p, self.width, self.trained
        d = p.linear_backward(dy, self.down, self.kept_down, self.down.name in trained)
        d_silu, d_up = p.act_over(i, d, self.u), p.act_over(i, d, self.silu)
        d_gate = p.silu_backward(i, d_silu, self.g, self.sigmoid)
        dx = p.linear_backward(d_up, self.up, self.kept_up, self.up.name in trained)
        through = p.linear_backward(d_gate, self.gate, self.kept_gate, self.gate.name in trained)
        return p.act_over(self.gate.inputs, dx, through)


class MixtureTape:
    """Routed experts, of which a position has `chosen`, and the shared one."""

    def __init__(self, pieces: Pieces, block: Block, trained: set[str], experts: Experts) -> None:
        self.p, self.experts, self.trained = pieces, experts, trained
        self.router, self.shared_gate = block.matrix("mlp.gate"), block.matrix("mlp.shared_expert_gate")
        self.shared = DenseTape(pieces, block, trained, "mlp.shared_expert", experts.shared)
        self.gate, self.up, self.down = (block.matrix(f"mlp.switch_mlp.{part}_proj") for part in ("gate", "up", "down"))
        # Channels of what the chosen experts make for a position, between their projections and behind them.
        self.between, self.behind = (m.rows * m.outputs for m in (self.gate, self.down))

    def forward(self, x: Buffer, *, value: bool) -> Buffer:
        p, n, hidden = self.p, self.experts.routed, self.router.inputs
        i, h = self.between, self.behind
        logits, self.kept_router = p.linear(x, self.router, self.router.name in self.trained)
        self.scores = p.act_over(n, logits)
        # The chosen ones are a view of all in order, which therefore stays.
        self.ranks = p.tape.make(p.run.positions * 4 * n, self.scores)
        chosen = p.tape.small(10, self.ranks, views=5)
        self.rows = p.act(h, x, chosen, views=2)
        self.u, self.kept_up = p.linear(self.rows, self.up, self.up.name in self.trained)
        self.g, self.kept_gate = p.linear(self.rows, self.gate, self.gate.name in self.trained)
        self.sigmoid, self.silu = p.silu(i, self.g)
        y, self.kept_down = p.linear(p.act_over(i, self.silu, self.u), self.down, self.down.name in self.trained)
        self.y = p.act(h, y, chosen, views=2)
        self.chosen = chosen
        self.shared_y = self.shared.forward(x, value=True)
        share, self.kept_share = p.linear(x, self.shared_gate, self.shared_gate.name in self.trained)
        self.share = p.act_over(1, share)
        if not value:
            return x
        routed = p.act(hidden, p.act_over(h, self.y, self.scores, views=1))
        return p.act_over(hidden, routed, p.act_over(hidden, self.shared_y, self.share))

    def backward(self, dy: Buffer) -> Buffer:
        p, i, h, trained = self.p, self.between, self.behind, self.trained
        hidden, n = self.router.inputs, self.experts.routed
        d_scores = p.tape.small(13, p.act_over(h, dy, self.y, views=2), views=6)
        d_logits = p.act(n, p.act(n, d_scores, self.ranks, views=2), self.scores)
        d = p.act(h, p.act_over(h, dy, self.scores, views=2), self.chosen)  # back in the order of the experts
        d = p.linear_backward(d, self.down, self.kept_down, self.down.name in trained)
        d_silu, d_up = p.act_over(i, d, self.u), p.act_over(i, d, self.silu)
        d_gate = p.silu_backward(i, d_silu, self.g, self.sigmoid)
        rows = p.linear_backward(d_up, self.up, self.kept_up, self.up.name in trained)
        rows = p.act_over(h, rows, p.linear_backward(d_gate, self.gate, self.kept_gate, self.gate.name in trained))
        dx = p.act(hidden, rows)
        d_share = p.tape.small(4, p.act_over(hidden, dy, self.shared_y), views=2)
        dx = p.act_over(hidden, dx, self.shared.backward(p.act_over(hidden, dy, self.share, views=1)))
        router = p.linear_backward(d_logits, self.router, self.kept_router, self.router.name in trained)
        dx = p.act_over(hidden, dx, router)
        share = p.linear_backward(d_share, self.shared_gate, self.kept_share, self.shared_gate.name in trained)
        return p.act_over(hidden, dx, share)
