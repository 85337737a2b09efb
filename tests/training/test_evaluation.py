"""The evaluation loss: a mean over supervised tokens that depends on neither batches nor dropout."""

import mini
import mlx.core as mx
import numpy as np
import pytest

from gdtrain.errors import TrainingStopped
from gdtrain.evaluation import evaluate
from gdtrain.training.recompute import recomputed_blocks

LENGTHS, SUPERVISED = (9, 34, 3, 45, 28, 12, 22), [8, 2, 1, 40, 20, 11, 6]
ROWS = mini.samples(*LENGTHS, supervised=SUPERVISED)

# Relative. Sums of the same float32 losses in another order: measured 2e-7.
BATCHED = 1e-6


def loss_of(model, rows=ROWS, batch_size=3, **options):
    return evaluate(model, rows, batch_size=batch_size, max_seq_length=128, **options)


def plain(model, rows):
    """(summed loss, targets), row by row, in float64, from the logits of the whole row."""
    total, count = 0.0, 0
    for row in rows:
        logits = np.array(model(mx.array(row.ids)[None])[0], np.float64)
        for t in np.flatnonzero(row.supervised):
            scores = logits[t - 1]
            total += np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[row.ids[t]]
            count += 1
    return total, count


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_equals_a_plain_computation(family):
    model = mini.trainable(family).eval()
    total, count = plain(model, ROWS)
    result = loss_of(model)
    assert count == result.supervised_tokens == sum(SUPERVISED)
    assert result.rows == 7
    assert result.loss == pytest.approx(total / count, rel=1e-5)  # logits to 1e-6 of their size, which is 1
    assert result.perplexity == pytest.approx(np.exp(total / count), rel=1e-4)


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_does_not_depend_on_the_batch_size(family):
    model = mini.trainable(family)
    results = [loss_of(model, batch_size=size) for size in (1, 2, 3, 7)]
    for result in results:
        assert result.loss == pytest.approx(results[0].loss, rel=BATCHED)
        assert (result.rows, result.supervised_tokens) == (7, sum(SUPERVISED))


def test_every_token_weighs_the_same():
    """A mean of the rows' or batches' means is another number here."""
    model = mini.trainable().eval()
    sums = [plain(model, [row]) for row in ROWS]
    means = np.mean([total / count for total, count in sums])
    token_mean = sum(total for total, _ in sums) / sum(SUPERVISED)
    assert abs(means / token_mean - 1) > 1000 * BATCHED
    assert loss_of(model, batch_size=1).loss == pytest.approx(token_mean, rel=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_restored(training):
    model = mini.trainable(lora={"dropout": 0.1}).train(training)
    loss_of(model)
    assert {m.training for m in model.modules()} == {training}


def test_the_mode_is_restored_after_a_failure():
    model = mini.trainable()
    with pytest.raises(ValueError, match="44 positions"):
        evaluate(model, ROWS, batch_size=3, max_seq_length=40)
    assert model.training


def test_dropout_is_inactive_and_draws_nothing():
    with_dropout, without = mini.trainable(lora={"dropout": 0.5}), mini.trainable()
    mx.random.seed(5)
    before = np.array(mx.random.state[0])
    assert loss_of(with_dropout.train()).loss == loss_of(without).loss
    assert np.array_equal(mx.random.state[0], before)  # validating does not change what the training draws next


def test_evaluation_within_a_training_run(monkeypatch):
    """The blocks are recomputed in training only."""
    model = mini.trainable()
    want = loss_of(model).loss
    monkeypatch.setattr(mx, "checkpoint", None)  # calling it would raise
    with recomputed_blocks(model.layers):
        assert loss_of(model).loss == want
        assert model.training


@pytest.mark.parametrize("batches", [1, 2, 3, 7, 20, -1])
def test_a_limit_of_batches(batches):
    model = mini.trainable()
    done = []
    result = loss_of(model, batch_size=2, batches=batches, progress=lambda *at: done.append(at))
    taken = 4 if batches == -1 else min(batches, 4)
    assert done == [(i + 1, taken) for i in range(taken)]
    assert result.rows == {1: 2, 2: 3, 3: 5, 4: 7}[taken]  # the longest row is a batch of its own, and taken from 2 on
    assert result.supervised_tokens <= sum(SUPERVISED)
    if taken == 4:
        assert result.loss == loss_of(model, batch_size=2).loss


def test_one_limited_batch_is_not_of_the_shortest_rows():
    result = loss_of(mini.trainable(), batch_size=1, batches=1)
    assert result.supervised_tokens == 6  # the row of 22 tokens, in the middle


def test_fewer_rows_than_a_batch():
    model = mini.trainable()
    assert loss_of(model, ROWS[:1], batch_size=4).loss == pytest.approx(loss_of(model, ROWS[:1], 1).loss, rel=BATCHED)


def test_a_loss_that_is_not_finite_names_the_rows():
    model = mini.trainable()
    weight = model.language_model.model.embed_tokens.weight
    weight[int(ROWS[3].ids[5])] = mx.nan
    hit = [row.where for row in ROWS if ROWS[3].ids[5] in row.ids[:-1]]
    with pytest.raises(TrainingStopped, match="the loss of these rows is nan") as error:
        loss_of(model, batch_size=1)
    assert str(error.value).split(": ", 1)[1] in hit
    assert model.training
