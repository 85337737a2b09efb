"""Gradients of a step: gradient checkpointing changes none of them, rows add up, padding has no part in them."""

import mini
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from gdtrain.arrays import flat, scalar
from gdtrain.model.dropout import KeyedDropout
from gdtrain.model.lora import adapt
from gdtrain.training.recompute import recomputed_blocks
from gdtrain.training.step import build_step

RAGGED = mini.samples(5, 17, 33, 64)
SHORT = mini.samples(5, 17, 30)

# Relative L2 per tensor. Recomputing runs the same operations again: measured 0, and another kernel choice of MLX may
# round differently. Rows in a batch are summed in another order than one by one: 3e-7 on a CPU, 3.5e-6 on an H200.
RECOMPUTED, ROWS = 1e-6, 1e-5


def gradients_of(model, batch, *, recompute=False, seed=3):
    """(summed loss, gradients by name); seeded, because dropout draws its keys in the step."""
    mx.random.seed(seed)
    with recomputed_blocks(model.layers, recompute):
        loss, gradients = build_step(model, compiled=False)(batch)
        mx.eval(loss, gradients)
    return scalar(loss), flat(gradients)


def errors(got, want):
    assert got.keys() == want.keys()
    return {name: mini.relative_l2(got[name], want[name]) for name in want}


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
@pytest.mark.parametrize("family", mini.FAMILIES)
def test_recomputing_changes_nothing(family, kind):
    model = mini.trainable(family, chunk_size=8, lora={"fine_tune_type": kind})
    batch = mini.batch(SHORT)
    loss, want = gradients_of(model, batch)
    recomputed_loss, got = gradients_of(model, batch, recompute=True)
    assert recomputed_loss == pytest.approx(loss, rel=RECOMPUTED)
    assert max(errors(got, want).values()) <= RECOMPUTED
    assert all(mx.any(g != 0).item() for name, g in want.items() if "lora" in name)


@pytest.mark.parametrize("lora", [{"keys": ["q_proj"]}, {"keys": ["in_proj_a"]}, {"num_layers": 1}])
def test_recomputing_blocks_of_which_some_have_nothing_to_train(lora):
    model = mini.trainable(lora=lora)
    batch = mini.batch(SHORT)
    _, want = gradients_of(model, batch)
    _, got = gradients_of(model, batch, recompute=True)
    assert max(errors(got, want).values()) <= RECOMPUTED


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_recomputing_really_runs_the_blocks_again(family, monkeypatch):
    model = mini.trainable(family)
    calls = []
    kind = type(model.layers[0])
    forward = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, *x, **k: calls.append(1) or forward(self, *x, **k))
    counts = []
    for recompute in (False, True):
        calls.clear()
        gradients_of(model, mini.batch(SHORT), recompute=recompute)
        counts.append(len(calls))
    assert counts == [4, 8]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", mini.FAMILIES)
def test_every_adapted_leaf_learns(family, recompute):
    """A new adapter: lora_b has a gradient at step 1, lora_a, behind a lora_b that is zero, from step 2."""
    model = mini.trainable(family, fill=False)
    batch = mini.batch(mini.samples(20, 30))
    _, first = gradients_of(model, batch, recompute=recompute)
    nonzero = {name: mx.any(g != 0).item() for name, g in first.items()}
    assert {name for name, yes in nonzero.items() if yes} == {name for name in first if name.endswith("lora_b")}
    parameters = flat(model.trainable_parameters())
    model.load_weights([(n, p - 1e-3 * first[n]) for n, p in parameters.items()], strict=False)
    _, second = gradients_of(model, batch, recompute=recompute)
    assert all(mx.any(g != 0).item() for g in second.values())


def test_the_class_of_the_blocks_comes_back():
    model, other = mini.trainable(), mini.trainable()
    kinds = [type(block) for block in model.layers]
    with recomputed_blocks(model.layers):
        assert all(type(block) is not kind for block, kind in zip(model.layers, kinds, strict=True))
        assert all(isinstance(block, kind) for block, kind in zip(model.layers, kinds, strict=True))
        assert [type(block) for block in other.layers] == kinds
    assert [type(block) for block in model.layers] == kinds
    with recomputed_blocks(model.layers, enabled=False):
        assert [type(block) for block in model.layers] == kinds
    with pytest.raises(KeyboardInterrupt), recomputed_blocks(model.layers):
        raise KeyboardInterrupt
    assert [type(block) for block in model.layers] == kinds


def test_other_models_are_not_recomputed(monkeypatch):
    model, other = mini.trainable(), mini.trainable()
    calls = []
    kind = type(model.layers[0])
    forward = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, *x, **k: calls.append(self) or forward(self, *x, **k))
    with recomputed_blocks(model.layers):
        gradients_of(other, mini.batch(SHORT))
    assert len(calls) == 4
    assert all(any(call is block for block in other.layers) for call in calls)


@pytest.mark.parametrize(("where", "compiled"), [("forward", False), ("backward", False), ("forward", True)])
def test_a_failed_step_leaves_the_parameters_as_they_were(where, compiled, monkeypatch):
    """The adapter is saved after an interruption, so nothing of the interrupted step may be left in the model. That of
    a compiled step comes while it is traced: nothing is compiled here."""
    if compiled:
        mx.enable_compile()
    model = mini.trainable()
    before = {name: np.array(x) for name, x in flat(model.trainable_parameters()).items()}
    last = type(model.layers[2].linear_attn)
    forward, calls = last.__call__, []

    def interrupted(self, *args):
        calls.append(1)
        if len(calls) == (3 if where == "forward" else 5):  # 3 forwards, then the backward runs them again
            raise KeyboardInterrupt
        return forward(self, *args)

    monkeypatch.setattr(last, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt), recomputed_blocks(model.layers):
        mx.eval(build_step(model, compiled=compiled)(mini.batch(SHORT)))
    mx.disable_compile()
    after = {name: np.array(x) for name, x in flat(model.trainable_parameters()).items()}
    assert after.keys() == before.keys()
    assert all(np.array_equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_dropout_is_the_same_when_recomputed(family):
    model = mini.trainable(family, chunk_size=8, lora={"dropout": 0.1})
    batch = mini.batch(SHORT)
    loss, want = gradients_of(model, batch)
    recomputed_loss, got = gradients_of(model, batch, recompute=True)
    assert recomputed_loss == loss
    assert max(errors(got, want).values()) <= RECOMPUTED
    other_loss, _ = gradients_of(model, batch, seed=4)
    assert other_loss != loss  # there is dropout, and it depends on the keys
    without, _ = gradients_of(mini.trainable(family, chunk_size=8), batch)
    assert without != loss


def test_dropout_of_mlx_would_not_be():
    """The fault that KeyedDropout is there for: the loss is right and the gradients are those of other masks."""
    model = mini.trainable(lora={"dropout": 0.1})
    replaced = 0
    for _, parent in model.named_modules():
        for name, child in parent.children().items():
            if isinstance(child, KeyedDropout):
                setattr(parent, name, nn.Dropout(0.1))
                replaced += 1
    assert replaced == 31
    batch = mini.batch(SHORT)
    loss, want = gradients_of(model.train(), batch)
    recomputed_loss, got = gradients_of(model, batch, recompute=True)
    assert recomputed_loss == loss
    assert min(errors(got, want).values()) > 0.1


def test_dropout_without_a_key_is_refused():
    model = mini.trainable(lora={"dropout": 0.1})
    with pytest.raises(RuntimeError, match="draw_keys"):
        model(mini.batch(SHORT).inputs)


def test_every_dropout_has_its_own_mask():
    model = mini.trainable(lora={"dropout": 0.5})
    gradients_of(model, mini.batch(SHORT))
    keys = [tuple(np.array(m._key).tolist()) for m in model.modules() if isinstance(m, KeyedDropout)]
    assert len(set(keys)) == len(keys) == 31


def test_no_dropout_is_left_as_it_is():
    model = mini.trainable()
    assert not [m for m in model.modules() if isinstance(m, KeyedDropout)]
    before = [np.array(x) for x in mx.random.state]
    build_step(model, compiled=False)(mini.batch(SHORT))
    assert all(np.array_equal(x, y) for x, y in zip(before, map(np.array, mx.random.state), strict=True))


# The names of C01: the rule's projections and the MLP.
LEAVES = {
    "qwen3_5": ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen3_5_moe": ["in_proj_qkv", "out_proj", "switch_mlp.up_proj", "shared_expert.down_proj"],
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "switch_mlp.down_proj", "shared_expert.up_proj"],
}


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_a_batch_is_the_sum_of_its_rows(family):
    model = mini.trainable(family, lora={"keys": LEAVES[family]})
    loss, want = gradients_of(model, mini.batch(RAGGED, multiple=32), recompute=True)
    alone = [gradients_of(model, mini.batch(RAGGED, [i]), recompute=True) for i in range(4)]
    assert sum(row_loss for row_loss, _ in alone) == pytest.approx(loss, rel=1e-6)
    total = {name: sum(gradients[name] for _, gradients in alone) for name in want}
    assert max(errors(total, want).values()) <= ROWS
    # Every row has its part: without any one of them the sum is another.
    for _, row in alone:
        less = {name: total[name] - row[name] for name in total}
        assert max(errors(less, want).values()) > 1000 * ROWS


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_each_row_has_its_own_gradient_in_a_batch(family):
    """Row by row: the others are there and have no supervised token."""
    model = mini.trainable(family, lora={"keys": LEAVES[family]})
    for i in range(4):
        rows = [mini.unsupervised(row) if j != i else row for j, row in enumerate(RAGGED)]
        _, got = gradients_of(model, mini.batch(rows))
        _, want = gradients_of(model, mini.batch(RAGGED, [i]))
        assert max(errors(got, want).values()) <= ROWS, f"row {i}"


PADDED = [*((family, "chunked") for family in mini.FAMILIES), ("qwen3_5", "replay"), ("qwen3_5", "reference")]


@pytest.mark.parametrize(("family", "kernel"), PADDED)
def test_padding_has_no_part(family, kernel):
    model = mini.trainable(family, kernel=kernel, chunk_size=16)
    rows = mini.samples(5, 17, 30)
    loss, want = gradients_of(model, mini.batch(rows))
    for options in ({"multiple": 32}, {"multiple": 50, "pad_id": 7}, {"pad_id": 255}):
        padded_loss, got = gradients_of(model, mini.batch(rows, **options))
        assert padded_loss == pytest.approx(loss, rel=1e-6)
        assert max(errors(got, want).values()) <= ROWS


def test_rows_in_another_order():
    model = mini.trainable()
    _, want = gradients_of(model, mini.batch(RAGGED))
    _, got = gradients_of(model, mini.batch(RAGGED, [2, 0, 3, 1]))
    assert max(errors(got, want).values()) <= ROWS


def test_the_loss_is_the_plain_cross_entropy_of_the_supervised_targets():
    rows = mini.samples(9, 14, supervised=[3, 1])
    model = mini.trainable()
    loss, _ = gradients_of(model, mini.batch(rows, multiple=16))
    want = 0.0
    for row in rows:
        logits = np.array(model(mx.array(row.ids)[None])[0], np.float64)
        log_sum = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
        want += sum(log_sum[t - 1] - logits[t - 1, row.ids[t]] for t in range(len(row.ids)) if row.supervised[t])
    assert loss == pytest.approx(want, rel=1e-5)


def test_gradients_against_finite_differences():
    """Along a random direction, central differences of the loss; float32 losses of 200 nats leave three digits."""
    model = mini.trainable()
    batch = mini.batch(mini.samples(12, 25))
    _, gradients = gradients_of(model, batch, recompute=True)
    start = flat(model.trainable_parameters())
    rng = np.random.default_rng(0)
    for leaf in ("in_proj_qkv", "in_proj_a", "in_proj_b", "in_proj_z", "out_proj", "q_proj", "down_proj"):
        names = [name for name in start if f".{leaf}." in name]
        # The gradient itself plus noise, so that the slope is not lost in the rounding of the loss.
        direction = {n: gradients[n] / mx.linalg.norm(gradients[n]) for n in names}
        noise = {n: mx.array(rng.standard_normal(start[n].shape).astype(np.float32)) for n in names}
        direction = {n: d + 0.3 * noise[n] / mx.linalg.norm(noise[n]) for n, d in direction.items()}
        sides = []
        for step in (3e-3, -3e-3):
            model.load_weights([(n, start[n] + step * direction[n]) for n in names], strict=False)
            sides.append(gradients_of(model, batch)[0])
        model.load_weights(list(start.items()), strict=False)
        slope = sum((gradients[n] * direction[n]).sum().item() for n in names)
        assert (sides[0] - sides[1]) / 6e-3 == pytest.approx(slope, rel=2e-2), leaf


def test_adapt_with_dropout_replaces_every_dropout_in_the_blocks():
    model, _ = mini.build("qwen3_5_moe")
    adapt(model, dropout=0.2, keys=["q_proj", "switch_mlp.up_proj"])
    kinds = [type(m) for m in model.modules() if isinstance(m, KeyedDropout | nn.Dropout)]
    assert kinds == [KeyedDropout] * 5
