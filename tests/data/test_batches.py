from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdtrain.data.batches import check_enough, collate, epoch_batches, eval_batches, padding_share, train_stream
from gdtrain.data.conversation import Sample
from gdtrain.errors import UserError

RAGGED = [12, 402, 82, 1802, 26] * 20  # C41


def rows(lengths, seed=0):
    random = np.random.default_rng(seed)
    samples = []
    for i, n in enumerate(lengths):
        mask = random.random(n) < 0.5
        mask[0] = False
        samples.append(Sample(random.integers(1, 300, n).astype(np.int32), mask, f"train.jsonl:{i + 1}"))
    return samples


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 70), min_size=1, max_size=6),
    multiple=st.sampled_from([1, 8, 32]),
    pad_id=st.sampled_from([0, 7]),
)
def test_a_batch_is_its_rows(lengths, multiple, pad_id):
    samples = rows(lengths)
    order = list(range(len(samples)))[::-1]
    batch = collate(samples, order, pad_id=pad_id, multiple=multiple, max_tokens=64 + 6)
    inputs, targets, mask = (np.array(a) for a in (batch.inputs, batch.targets, batch.mask))
    width = inputs.shape[1]
    assert inputs.shape == targets.shape == mask.shape
    assert (inputs.dtype, targets.dtype, mask.dtype) == (np.int32, np.int32, np.bool_)
    assert max(lengths) - 1 <= width <= 69
    assert width % multiple == 0 or width == 69
    for row, i in enumerate(order):
        n = lengths[i] - 1
        assert inputs[row, :n].tolist() == samples[i].ids[:-1].tolist()
        assert targets[row, :n].tolist() == samples[i].ids[1:].tolist()
        assert mask[row, :n].tolist() == samples[i].supervised[1:].tolist()
        assert (inputs[row, n:] == pad_id).all()
        assert not mask[row, n:].any()
    assert batch.supervised_tokens == mask.sum() == sum(s.supervised.sum() for s in samples)
    assert batch.rows == tuple(order)
    assert batch.padding_share == pytest.approx(1 - sum(n - 1 for n in lengths) / inputs.size)


def test_a_batch_that_prepare_would_not_give():
    samples = rows([2, 40])
    assert collate(samples, [1], max_tokens=40).inputs.shape == (1, 39)  # the cap, not a multiple of 32
    for indices, limit in (([1], 39), ([], 39)):
        with pytest.raises(ValueError, match="2 to 39 are accepted"):
            collate(samples, indices, max_tokens=limit)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 300), min_size=1, max_size=40), batch_size=st.integers(1, 7), seed=st.integers(0, 9)
)
def test_an_epoch_is_every_row_once(lengths, batch_size, seed):
    samples = rows(lengths)
    batches = epoch_batches(samples, batch_size, seed=seed, epoch=3)
    assert sorted(i for batch in batches for i in batch) == list(range(len(samples)))
    assert len(batches) == -(-len(samples) // batch_size)
    assert all(len(batch) <= batch_size for batch in batches)
    assert batches == epoch_batches(samples, batch_size, seed=seed, epoch=3)


def test_c41_padding_is_low_and_the_order_is_shuffled():
    samples = rows(RAGGED)
    batches = epoch_batches(samples, 4, seed=0, epoch=0)
    unsorted = [list(range(at, at + 4)) for at in range(0, len(samples), 4)]
    assert padding_share(samples, unsorted) > 0.6
    assert padding_share(samples, batches) < 0.1
    longest = [max(RAGGED[i] for i in batch) for batch in batches]
    assert longest != sorted(longest)
    assert batches != epoch_batches(samples, 4, seed=1, epoch=0)
    assert batches != epoch_batches(samples, 4, seed=0, epoch=1)
    sets = {frozenset(batch) for batch in batches}
    assert sets != {frozenset(batch) for batch in epoch_batches(samples, 4, seed=0, epoch=1)}  # other company too


def test_padding_share_agrees_with_the_batches():
    samples = rows([5, 40, 70])
    batches = [[0, 1], [2]]
    sizes = [collate(samples, batch, max_tokens=999) for batch in batches]
    pads = sum(batch.padding_share * batch.inputs.size for batch in sizes)
    assert padding_share(samples, batches) == pytest.approx(pads / sum(batch.inputs.size for batch in sizes))
    assert padding_share(samples, []) == 0


def test_the_stream_is_the_epochs_one_after_another_and_can_start_anywhere():
    samples = rows([5, 9, 40, 70, 8, 3, 99])
    stream = list(islice(train_stream(samples, 2, seed=4), 12))
    expected = [(e, batch) for e in range(3) for batch in epoch_batches(samples, 2, seed=4, epoch=e)]
    assert stream == expected
    for start in (0, 3, 4, 9):
        assert list(islice(train_stream(samples, 2, seed=4, start=start), 3)) == expected[start : start + 3]
    with pytest.raises(ValueError, match="no samples"):
        next(train_stream([], 2, seed=0))


def test_c30_evaluation_takes_what_there_is():
    assert eval_batches(rows([9]), 4) == [[0]]
    assert eval_batches(rows([9, 5, 9, 7]), 3) == [[1, 3, 0], [2]]
    assert eval_batches([], 4) == []
    many = rows(range(2, 42))
    assert eval_batches(many, 4, limit=-1) == eval_batches(many, 4, limit=99) == eval_batches(many, 4)
    some = eval_batches(many, 4, limit=2)
    assert some == [eval_batches(many, 4)[2], eval_batches(many, 4)[7]]
    assert eval_batches(many, 4, limit=0) == []


def test_c32_fewer_rows_than_a_batch():
    check_enough(rows([5] * 4), 4)
    with pytest.raises(UserError, match="batch_size: 4, but there are 3 training rows"):
        check_enough(rows([5] * 3), 4)
