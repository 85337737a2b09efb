"""Blocks and whole steps on the tape."""

from dataclasses import dataclass

from gdtrain.plan.attention import AttentionTape
from gdtrain.plan.delta import DeltaTape
from gdtrain.plan.loss import loss_backward
from gdtrain.plan.mlp import DenseTape, MixtureTape
from gdtrain.plan.pieces import GRADIENTS, Pieces, Run
from gdtrain.plan.sizes import Block, DeltaNet, Experts, ModelSizes
from gdtrain.plan.tape import Buffer, Tape

ACTIVATIONS, INPUTS = "activations", "block inputs"
# Blocks at the end that are laid out: whatever MLX is ahead by, they are more. Those before need less memory, since
# fewer inputs are kept for their backward.
_BLOCKS = 8


@dataclass(frozen=True)
class Step:
    """A model and what trains in it: names of projections for every block, all of them in full fine-tuning.
    recomputed: gradient checkpointing. head: elements of the head's weight, as they are stored. window: bytes of every
    block's gradients of the batches before, to which those of this one are added; empty where there are none."""

    sizes: ModelSizes
    trained: list[set[str]]
    recomputed: bool
    head: float
    window: list[int]


def lay_out(step: Step, run: Run) -> Tape:
    """The tape of one step: the forward, the loss and the backward of the last blocks.

    All inputs that the backward will need are there at the end of the forward.
    """
    tape = Tape(run.itemsize)
    tape.part = ACTIVATIONS
    pieces = Pieces(tape, run)
    blocks, hidden = step.sizes.blocks, step.sizes.hidden
    first = next((i for i, names in enumerate(step.trained) if names), len(blocks))
    start = max(0, len(blocks) - _BLOCKS) if step.recomputed else 0
    row = run.positions * run.itemsize * hidden
    for _ in range(first, start):
        tape.output(tape.given(row, INPUTS))  # of a block whose backward is not laid out
    x = tape.given(row, INPUTS) if start > first or step.recomputed else tape.make(row, part=INPUTS)
    inputs: list[Buffer] = []
    layers: list[BlockTape] = []
    for block, names in list(zip(blocks, step.trained, strict=True))[start:]:
        layer = BlockTape(pieces, block, names, hidden)
        inputs.append(x)
        x = layer.forward(x)
        layers.append(layer)
    loss, dy = loss_backward(pieces, x, hidden, step.sizes.vocabulary, step.head)
    gradients: list[Buffer] = []
    for i in range(len(blocks) - 1, max(first, start) - 1, -1):
        layer = layers[i - start]
        if step.recomputed:
            layer = BlockTape(pieces, blocks[i], step.trained[i], hidden)
            layer.forward(tape.view(inputs[i - start], dy), value=False)
        dy, own = layer.backward(dy, dx=i > first)
        if step.recomputed and i > first:
            dy = tape.view(dy, *own)  # see gdtrain.training.recompute
        gradients = own + gradients
    if step.window:
        # Those of blocks that are not laid out are there as well; the loop still holds the new ones.
        tape.hold(*gradients, tape.given(sum(step.window[first:start]), GRADIENTS))
        gradients = [tape.over(g.size, tape.given(g.size, GRADIENTS), g, part=GRADIENTS) for g in gradients]
    tape.output(tape.view(loss), *gradients)
    if start > first:
        tape.output(dy)
    return tape


# Of a block's parameters in mlx-lm's models, which is that of the outputs that MLX is asked for.
_ORDER = (
    *("linear_attn.conv1d", "linear_attn.in_proj", "linear_attn.norm", "linear_attn.out_proj"),
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm"),
    *("self_attn.k_norm", "input_layernorm", "post_attention_layernorm"),
    *("mlp.gate_proj", "mlp.down_proj", "mlp.up_proj", "mlp.gate", "mlp.switch_mlp.gate", "mlp.switch_mlp.up"),
    *("mlp.switch_mlp.down", "mlp.shared_expert.gate", "mlp.shared_expert.down", "mlp.shared_expert.up"),
    "mlp.shared_expert_gate",
)


class BlockTape:
    """One block: mixer and MLP, each behind a norm and beside a residual."""

    def __init__(self, pieces: Pieces, block: Block, trained: set[str], hidden: int) -> None:
        self.p, self.hidden = pieces, hidden
        mixer, mlp = block.mixer, block.mlp
        self.mixer: DeltaTape | AttentionTape
        if isinstance(mixer, DeltaNet):
            self.mixer = DeltaTape(pieces, block, trained, mixer)
        else:
            self.mixer = AttentionTape(pieces, block, trained, mixer)
        self.mlp: DenseTape | MixtureTape
        if isinstance(mlp, Experts):
            self.mlp = MixtureTape(pieces, block, trained, mlp)
        else:
            self.mlp = DenseTape(pieces, block, trained, "mlp", mlp)

    def forward(self, x: Buffer, *, value: bool = True) -> Buffer:
        """value: whether the result is needed, or only what the backward needs."""
        p, h = self.p, self.hidden
        n1, self.norm1 = p.norm(x, h)
        mixed = p.act_over(h, x, self.mixer.forward(n1))
        n2, self.norm2 = p.norm(mixed, h)
        y = self.mlp.forward(n2, value=value)
        return p.tape.over(p.run.positions * p.run.itemsize * h, mixed, y, part=INPUTS) if value else x

    def backward(self, dy: Buffer, *, dx: bool) -> tuple[Buffer, list[Buffer]]:
        """Of what `forward` kept: gradients of its input and of what trains.

        Args:
            dx: whether blocks before this one train.
        """
        p, h = self.p, self.hidden
        p.gradients = []
        d = p.act_over(h, dy, p.norm_backward(self.mlp.backward(dy), self.norm2, h, name="post_attention_layernorm"))
        through = self.mixer.backward(d, dx=dx)
        if dx:
            through = p.act_over(h, d, p.norm_backward(through, self.norm1, h, name="input_layernorm"))
        return through, [gradient for _, gradient in sorted(p.gradients, key=_place)]


def _place(gradient: tuple[str, Buffer]) -> int:
    name = gradient[0]
    return next(i for i, part in enumerate(_ORDER) if name.startswith(part))
