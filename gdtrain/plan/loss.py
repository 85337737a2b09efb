"""The loss on the tape: gdtrain.loss and gdtrain.head_loss."""

from gdtrain.head_loss import _MULTIPLE, BLOCK_BYTES
from gdtrain.plan.pieces import Pieces
from gdtrain.plan.tape import Buffer

LOSS = "loss"
# Blocks that are laid out, the last ones. The others are the gradients that they make.
_BLOCKS = 16


def loss_backward(pieces: Pieces, x: Buffer, hidden: int, vocabulary: int, head: float) -> tuple[Buffer, Buffer]:
    """The loss on every position, and its gradient for x, the output of the last block.

    Args:
        head: elements of the head's weight, as they are stored.
    """
    tape, run = pieces.tape, pieces.run
    tape.part, before = LOSS, tape.part
    normed, kept = pieces.norm(x, hidden, weight=False)
    positions = -(-run.positions // _MULTIPLE) * _MULTIPLE
    rest = tape.make(positions * hidden * run.itemsize, normed, views=2)
    gradients: list[Buffer] = []
    losses: list[Buffer] = []
    block = _rows(vocabulary, run.itemsize, gpu=run.gpu)
    for first in range(0, positions, block):
        rows = min(block, positions - first)
        if first + block * _BLOCKS < positions:
            gradients.append(tape.make(rows * hidden * run.itemsize))
            continue
        logits, own = rows * vocabulary * run.itemsize, tape.view(rest)
        y = tape.make(logits, own, commands=3, reads=head)
        if run.gpu:
            loss, d = tape.small(3, y), tape.over(logits, y)
        else:
            wide = y if run.itemsize == 4 else tape.make(2 * logits, y)
            loss = tape.small(4, wide, views=4)
            spread = tape.make(rows * vocabulary * 4, commands=4)
            spread = tape.over(rows * vocabulary * 4, spread, loss, commands=6)
            soft = tape.over(rows * vocabulary * 4, wide)
            d = tape.over(rows * vocabulary * 4, spread, tape.over(rows * vocabulary * 4, soft))
            d = d if run.itemsize == 4 else tape.make(logits, d)
        gradients.append(tape.make(rows * hidden * run.itemsize, d, commands=3, reads=head))
        losses = [tape.small(1, loss, *losses)]
        rest = tape.view(rest, gradients[-1], losses[0])
    made = gradients[0]
    if len(gradients) > 1:
        made = tape.make(positions * hidden * run.itemsize, *gradients, commands=1 + len(gradients))
    made = tape.over(positions * hidden * run.itemsize, made, views=5)
    spread = pieces.act_over(hidden, pieces.act(hidden, commands=4), made, views=1)
    dx = pieces.norm_backward(tape.view(spread), kept, hidden)
    tape.part = before
    return losses[0], dx


def _rows(vocabulary: int, itemsize: int, *, gpu: bool) -> int:
    """Of a block."""
    fit = max(1, int(BLOCK_BYTES / (vocabulary * (2 * itemsize if gpu else 16))))
    return fit // _MULTIPLE * _MULTIPLE or 1 << (fit.bit_length() - 1)
