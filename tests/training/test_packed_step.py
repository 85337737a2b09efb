"""A step on packed rows is the step on the same documents in rows of their own."""

from dataclasses import replace

import mini
import mlx.core as mx
import pytest

from gdtrain.arrays import flat
from gdtrain.data.batches import collate
from gdtrain.training.recompute import recomputed_blocks
from gdtrain.training.step import build_step

LENGTHS = (9, 40, 3, 25, 70, 2)
PACKED = [(0, 1, 2), (3,), (4, 5)]
# Relative L2 between the same sums in another order, float32: measured 1e-7 for losses, 2e-6 for gradients.
LOSS, GRADIENTS = 1e-6, 2e-5


@pytest.fixture(params=mini.FAMILIES)
def step(request):
    model, config = mini.build(request.param)
    mini.swap_linear_attention(model, config)
    mini.adapt(model)
    mini.fill_adapter(model)
    model.train()
    with recomputed_blocks(model.layers):
        yield build_step(model, compiled=False)


def batches():
    """The documents packed and alone; of some only the end is supervised."""
    rows = mini.samples(*LENGTHS, supervised=[4, 39, 1, 10, 69, 1])
    return collate(rows, PACKED, max_tokens=100), collate(rows, range(len(rows)), max_tokens=100)


def test_same_loss_and_gradients(step):
    packed, alone = batches()
    assert packed.supervised_tokens == alone.supervised_tokens
    assert packed.inputs.size < alone.inputs.size
    (loss, gradients), (want_loss, want) = step(packed), step(alone)
    assert abs(loss.item() / want_loss.item() - 1) < LOSS
    want = flat(want)
    for name, gradient in flat(gradients).items():
        assert mini.relative_l2(gradient, want[name]) < GRADIENTS, name


def test_negative_control(step):
    """The same rows as one document each."""
    packed, alone = batches()
    loss = step(replace(packed, segments=None))[0].item()
    assert abs(loss / step(alone)[0].item() - 1) > 10 * LOSS


def test_compiled():
    model, config = mini.build()
    mini.swap_linear_attention(model, config)
    mini.adapt(model)
    model.train()
    packed, _ = batches()
    want = build_step(model, compiled=False)(packed)[0].item()
    mx.enable_compile()
    with recomputed_blocks(model.layers):
        assert build_step(model, compiled=True)(packed)[0].item() == pytest.approx(want, rel=LOSS)
