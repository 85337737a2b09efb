"""What all layers are made of: activations, casts, norms and projections with their adapters, forward and backward.

Widths are channels of every position. `wide` is float32; where activations are float32 a cast is nothing.
"""

from dataclasses import dataclass
from typing import NamedTuple

from gdtrain.plan.sizes import Matrix
from gdtrain.plan.tape import Buffer, Tape

GRADIENTS = "gradients"


@dataclass(frozen=True)
class Run:
    """What a step runs on and with.

    B, T: rows and their positions. itemsize: bytes of an activation. rank, dropout: of the adapters. kind: of
    fine-tuning. packed: rows of several documents. backend, chunk: of the rule. gpu: whether MLX has its GPU kernels.
    cores: that share the rule on a CPU.
    """

    B: int
    T: int
    itemsize: int
    rank: int
    dropout: bool
    kind: str
    packed: bool
    backend: str
    chunk: int
    gpu: bool
    cores: int

    @property
    def positions(self) -> int:
        return self.B * self.T


@dataclass(frozen=True)
class Kept:
    """What the backward of a projection needs: its input; its weight, where DoRA makes it of a quantised one; and of
    its adapter, if there is one, the input in float32, the product with the first matrix, and what dropout left.
    before: the output that DoRA scales."""

    x: Buffer
    weight: Buffer | None = None
    adapter: tuple[Buffer, Buffer, Buffer | None] | None = None
    before: Buffer | None = None


class Normed(NamedTuple):
    """What the backward of a norm needs: its input, in float32 on a CPU; the mean; unit: what its weight scales, where
    that trains."""

    x: Buffer
    mean: Buffer
    unit: Buffer | None


class Pieces:
    """Makes them on a tape. gradients: of the parameters of the block at hand, by their names within it."""

    def __init__(self, tape: Tape, run: Run) -> None:
        self.tape, self.run = tape, run
        self.gradients: list[tuple[str, Buffer]] = []

    def act(
        self,
        width: float,
        *inputs: Buffer,
        views: int = 0,
        scratch: float = 0,
        commands: int = 2,
        reads: float = 0,
    ) -> Buffer:
        """An activation in a new buffer; scratch: channels."""
        row = self.run.positions * self.run.itemsize
        return self.tape.make(row * width, *inputs, views=views, commands=commands, scratch=row * scratch, reads=reads)

    def joined(self, width: float, *inputs: Buffer, views: int = 0) -> Buffer:
        """Parts of an activation in one buffer."""
        return self.act(width, *inputs, views=views, commands=1 + len(inputs))

    def act_over(self, width: float, *inputs: Buffer, views: int = 0) -> Buffer:
        """One in the place of an input if it can be."""
        return self.tape.over(self.run.positions * self.run.itemsize * width, *inputs, views=views)

    def wide(self, width: float, *inputs: Buffer, views: int = 0, commands: int = 2) -> Buffer:
        return self.tape.make(self.run.positions * 4 * width, *inputs, views=views, commands=commands, item=4)

    def wide_over(self, width: float, *inputs: Buffer, views: int = 0, commands: int = 2) -> Buffer:
        return self.tape.over(self.run.positions * 4 * width, *inputs, views=views, commands=commands, item=4)

    def widen(self, width: float, x: Buffer) -> Buffer:
        return x if self.run.itemsize == 4 else self.wide(width, x)

    def narrow(self, width: float, x: Buffer) -> Buffer:
        return x if self.run.itemsize == 4 else self.act(width, x)

    def norm(self, x: Buffer, width: float, *, views: int = 0, weight: bool = True) -> tuple[Buffer, Normed]:
        """RMS norm. A kernel on a GPU; a CPU has none: squares, their mean, and two products, in float32.

        Args:
            views: of x, which then lies apart: a kernel copies it. weight: whether it has one that may train.
        """
        if self.run.gpu:
            return self.act_over(width, self.act(width, x, views=views) if views else x), Normed(x, x, None)
        x = self.widen(width, self.tape.view(x) if views else x)
        mean = self.tape.small(4, self.wide_over(width, x))
        unit = self.narrow(width, self.wide_over(width, x, mean, views=1))
        kept = Normed(x, mean, unit if weight and self.run.kind == "full" else None)
        return self.act_over(width, unit, views=1), kept

    def norm_backward(self, dy: Buffer, kept: Normed, width: float, *, name: str = "", apart: bool = False) -> Buffer:
        """name: of the weight, if there is one that may train. apart: x and dy lie apart: a kernel copies them."""
        x = kept.x
        if self.run.gpu:
            if apart:
                return self.act_over(width, self.act(width, x), self.act(width, dy))
            return self.act_over(width, x, dy)
        if kept.unit is not None:
            self.gradient(name, self.run.itemsize * width, self.act_over(width, dy, kept.unit))
        scaled = self.widen(width, self.act_over(width, dy, views=1))
        through = self.tape.small(5, self.wide_over(width, scaled, x))
        dx = self.wide_over(width, scaled, kept.mean, views=1)
        through = self.wide_over(width, self.wide_over(width, x), through)
        return self.narrow(width, self.wide_over(width, dx, through))

    def linear(self, x: Buffer, m: Matrix, trained: bool, *, value: bool = True) -> tuple[Buffer, Kept]:
        """A projection and its adapter.

        Args:
            value: whether the result is needed, or only what its gradient needs.
        """
        value = value or self.run.kind == "dora"
        inputs, outputs = m.rows * m.inputs, m.rows * m.outputs
        weight = self._dequantised(m) if trained and self.run.kind == "dora" and m.stored else None
        of = (x,) if weight is None else (x, weight)
        y = self.tape.view(self.act(outputs, *of, views=1, commands=3, reads=m.weights)) if value else x
        if not trained or self.run.kind == "full":
            return y, Kept(x)
        left = None
        dropped = x
        if self.run.dropout:
            left = self.narrow(inputs, self.wide(inputs, self.tape.make(self.run.positions * inputs)))
            dropped = self.act_over(inputs, left, x)
        dropped = self.widen(inputs, dropped)
        small = self.wide(m.rows * self.run.rank, dropped, views=1, commands=3)
        before = None
        if value:
            z = self.wide_over(outputs, self.tape.view(self.wide(outputs, small, commands=3)), commands=3)
            y = self.act_over(outputs, y, self.narrow(outputs, z))
        if self.run.kind == "dora":
            before, y = y, self.act_over(outputs, y, self._magnitudes(m, weight))
        return y, Kept(x, weight, (dropped, small, left), before)

    def _dequantised(self, m: Matrix) -> Buffer:
        """A kernel on a GPU; on a CPU integers of 32 bits, shifted and masked, then scaled."""
        size = self.run.itemsize * m.weights
        if self.run.gpu:
            return self.tape.make(size)
        integers = self.tape.over(4 * m.weights, self.tape.make(4 * m.weights, item=4), item=4)
        floats = self.tape.over(size, self.tape.view(integers))
        return self.tape.over(size, self.tape.over(size, floats))

    def _magnitudes(self, m: Matrix, weight: Buffer | None) -> Buffer:
        """Of DoRA, for every output: of the adapted weight, which is made for it in float32."""
        product = self.tape.make(4 * m.weights, item=4)
        adapted = self.tape.over(4 * m.weights, product, *([] if weight is None else [weight]), item=4)
        return self.tape.small(5, self.tape.over(4 * m.weights, adapted, item=4))

    def linear_backward(self, dy: Buffer, m: Matrix, kept: Kept, trained: bool, *, dx: bool = True) -> Buffer:
        """Gradient of the input (where it is needed), and of what trains."""
        inputs, outputs, copies = m.rows * m.inputs, m.rows * m.outputs, max(1, m.experts)
        if kept.before is not None:
            self.gradient(m.name, 4 * outputs, self.act_over(outputs, dy, kept.before))
            dy = self.act_over(outputs, dy, views=1)
        of = (dy,) if kept.weight is None else (dy, kept.weight)
        result = self.tape.view(self.act(inputs, *of, views=1, commands=4, reads=m.weights)) if dx else dy
        if trained and self.run.kind == "full":
            self.gradient(m.name, m.weights * self.run.itemsize, dy, kept.x)
        if kept.adapter is None:
            return result
        dropped, small, left = kept.adapter
        scaled = self.tape.view(self.wide_over(outputs, self.widen(outputs, dy), commands=3))
        d_small = self.wide(m.rows * self.run.rank, scaled, commands=3)
        self.gradient(m.name, 4 * self.run.rank * copies * m.inputs, dropped, d_small)
        self.gradient(m.name, 4 * self.run.rank * copies * m.outputs, small, scaled)
        if not dx:
            return dy
        d = self.narrow(inputs, self.tape.view(self.wide(inputs, d_small, commands=3)))
        if left is not None:
            d = self.act_over(inputs, d, left)
        return self.act_over(inputs, result, d)

    def gradient(self, name: str, size: float, *inputs: Buffer) -> None:
        """Of a parameter."""
        self.gradients.append((name, self.tape.make(size, *inputs, views=2, part=GRADIENTS)))

    def silu(self, width: float, gate: Buffer, *, wide: bool = False) -> tuple[Buffer, Buffer]:
        """sigmoid(gate) and silu(gate): the backward needs both."""
        over = self.wide_over if wide else self.act_over
        sigmoid = over(width, gate)
        return sigmoid, over(width, gate, sigmoid)

    def silu_backward(self, width: float, dy: Buffer, gate: Buffer, sigmoid: Buffer, *, wide: bool = False) -> Buffer:
        over = self.wide_over if wide else self.act_over
        direct = over(width, dy, sigmoid)
        through = over(width, dy, gate)
        through = over(width, through, over(width, sigmoid, over(width, sigmoid)))
        return over(width, direct, through)
