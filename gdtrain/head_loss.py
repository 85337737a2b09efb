"""Cross-entropy from hidden states and head, block by block of rows, with the logits of a few blocks alive at a time.

The gradient of the hidden states is made in the forward, where the logits are: two products with the head in all, none
of them in the backward. So are the gradients of what trains in the head: made later, they would need the logits again,
and the backward of the model begins with them anyway.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_unflatten

from gdtrain.arrays import flat
from gdtrain.model.dropout import draw_keys
from gdtrain.model.head import Head

# What a block may take: logits, their gradient and temporaries. 256 rows of 248,320 logits in bfloat16, with their
# gradient, are 254 MB. MLX runs ahead of the device: a few blocks are alive at once whatever the number of rows, 3 on
# two CPU cores (5 without gradients). H200, 4,096 rows, hidden 4096, MLX 0.32.4, 2026-12-01: 140 ms and 0.46 GB with
# blocks of 32 MB, 72 ms and 0.85 GB with 64, 39 and 1.1 with 134, 30 and 1.7 with 256, 29 and 3.2 with 512; all logits
# at once 32 ms and 12.2 GB. A memory limit holds MLX back (see memory_limit_gb).
BLOCK_BYTES = 256 * 2**20
# Blocks have a multiple of so many rows, so that few shapes occur; smaller ones a power of two.
_MULTIPLE = 64

# hidden, leaves, targets, counted -> loss and, if asked for, gradients of hidden and leaves
_Block = Callable[[mx.array, Sequence[mx.array], mx.array, mx.array], list[mx.array]]


def summed_cross_entropy(
    head: Head, hidden: mx.array, targets: mx.array, counted: mx.array, *, block_bytes: float = BLOCK_BYTES
) -> mx.array:
    """Sum over the counted rows of -log softmax(logits)[target], in nats, float32.

    Differentiable in the hidden states and in what is trainable in the head. A head in training mode makes the
    gradients together with the loss. In evaluation mode there is the loss alone, and a gradient projects once more.

    Args:
        hidden: (P, hidden), one row at least.
        targets: int32 (P,), 0 to vocabulary - 1. Any other gives a number without meaning: see `supervised_positions`.
        counted: bool (P,); the other rows have no part in loss and gradients.
    """
    trainable = head.module.trainable_parameters()
    named = flat(trainable)
    learns = head.module.training
    rows = _rows_of_block(head, hidden, block_bytes)

    def block_loss(hidden: mx.array, leaves: Sequence[mx.array], targets: mx.array, counted: mx.array) -> mx.array:
        head.module.update(tree_unflatten(list(zip(named, leaves, strict=True))))
        return mx.where(counted, _cross_entropies(head.project(hidden), targets), 0.0).sum()

    def block_gradients(*arguments: Any) -> list[mx.array]:
        draw_keys(head.module)  # with one key, dropout would have the same mask in every block
        loss, (d_hidden, d_leaves) = mx.value_and_grad(block_loss, argnums=(0, 1))(*arguments)
        return [loss, d_hidden, *d_leaves]

    @mx.custom_function
    def loss(hidden: mx.array, leaves: list[mx.array]) -> list[mx.array]:
        block = block_gradients if learns else lambda *arguments: [block_loss(*arguments)]
        return _sum_blocks(block, hidden, leaves, targets, counted, rows)

    @loss.vjp
    def scaled(primals: Any, cotangents: list[mx.array], outputs: list[mx.array]) -> Any:
        if not learns:
            hidden, *leaves = mx.depends([primals[0], *primals[1]], cotangents)
            outputs = _sum_blocks(block_gradients, hidden, leaves, targets, counted, rows)
        d_hidden, *d_leaves = [(cotangents[0] * made).astype(made.dtype) for made in outputs[1:]]
        return d_hidden, d_leaves

    try:
        return cast(list[mx.array], loss(hidden, list(named.values())))[0]
    finally:
        head.module.update(trainable)  # tracing left its placeholders there


def _sum_blocks(
    block: _Block,
    hidden: mx.array,
    leaves: Sequence[mx.array],
    targets: mx.array,
    counted: mx.array,
    rows: int,
) -> list[mx.array]:
    """What `block` gives, for all rows: losses and gradients of the leaves are summed, in float32, and gradients of the
    hidden states joined."""
    dtypes = [leaf.dtype for leaf in leaves]
    sums: list[mx.array] = []
    joined: list[mx.array] = []
    for first in range(0, hidden.shape[0], rows):
        part = slice(first, first + rows)
        loss, *gradients = block(hidden[part], leaves, targets[part], counted[part])
        terms = [x.astype(mx.float32) for x in (loss, *gradients[1:])]
        sums = [x + term for x, term in zip(sums, terms, strict=True)] if sums else terms
        joined += gradients[:1]
        # MLX would make the logits of all blocks first, and keep them, if the next block did not wait for this one.
        hidden, *leaves = mx.depends([hidden, *leaves], [*sums, *gradients[:1]])
    d_hidden = [mx.concatenate(joined)] if joined else []
    return [sums[0], *d_hidden, *(x.astype(dtype) for x, dtype in zip(sums[1:], dtypes, strict=False))]


def _cross_entropies(logits: mx.array, targets: mx.array) -> mx.array:
    """-log softmax(logits)[target] of each row, float32."""
    if mx.default_device() == mx.cpu:
        logits = logits.astype(mx.float32)  # where MLX has no kernel for it, it sums in the dtype of the logits
    return mx.fast.cross_entropy(logits, targets)


def _rows_of_block(head: Head, hidden: mx.array, block_bytes: float) -> int:
    """As many as fit, one at least."""
    logits = head.project(hidden[:1])  # never evaluated: it is there for its shape and dtype
    fit = max(1, int(block_bytes / (logits.shape[-1] * _bytes_per_logit(head, logits.dtype))))
    return fit // _MULTIPLE * _MULTIPLE or 1 << (fit.bit_length() - 1)


def _bytes_per_logit(head: Head, dtype: mx.Dtype) -> int:
    # On a CPU logits, exponentials and gradient in float32, and what is cast.
    one_block = 16 if mx.default_device() == mx.cpu else 2 * dtype.size
    # mlx-lm's adapters are float32: their product and its gradient.
    return one_block + (8 if head.module.trainable_parameters() else 0)
