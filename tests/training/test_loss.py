"""The loss by blocks of rows against all logits at once: values, every gradient, memory."""

import io
from functools import partial

import mini
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear

import gdtrain.loss
from gdtrain.arrays import flat, scalar
from gdtrain.head_loss import _rows_of_block, summed_cross_entropy
from gdtrain.loss import supervised_positions, token_loss
from gdtrain.model.dropout import draw_keys, key_dropouts
from gdtrain.model.head import Head, find_head
from gdtrain.model.hidden import hidden_states
from gdtrain.training.recompute import recomputed_blocks
from gdtrain.training.step import build_step

# Relative: the same float32 sums in another order. Gradients relative L2 per tensor.
LOSS, GRADIENT = 1e-6, 1e-5
# The head's gradient is rounded to bfloat16 (2**-9 at most) once a block instead of once; the rest is summed as before.
BFLOAT16 = 4e-3

P, HIDDEN, VOCABULARY = 150, 64, 300
BLOCK = 16 * VOCABULARY * 64  # 64 rows of a frozen head on a CPU: 64 + 64 + 22; an adapter's 32

QUANTISED = {
    "affine 4": {"group_size": 32, "bits": 4, "mode": "affine"},
    "affine 8": {"group_size": 64, "bits": 8, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}
ADAPTERS = {"lora": LoRALinear, "dora": DoRALinear}
FROZEN = ["dense", "bias", "tied", *QUANTISED, *(f"tied {mode}" for mode in QUANTISED)]
TRAINED = ["dense trained", "bias trained", "tied trained", "lora", "dora", "lora affine 4", "dora affine 8"]


def make_head(kind, dtype=mx.float32, dropout=0.0, vocabulary=VOCABULARY):
    """`kind`: any of the above. Logits have a standard deviation of about 3: neither uniform nor one-hot."""
    mx.random.seed(0)
    tied = kind.startswith("tied")
    bias = kind.startswith("bias")
    module = nn.Embedding(vocabulary, HIDDEN) if tied else nn.Linear(HIDDEN, vocabulary, bias=bias)
    module.weight = (3 / HIDDEN**0.5 * mx.random.normal((vocabulary, HIDDEN))).astype(dtype)
    if bias:
        module.bias = mx.random.normal((vocabulary,)).astype(dtype)
    for name, options in QUANTISED.items():
        if kind.endswith(name):
            module = module.to_quantized(**options)
    if not kind.endswith("trained"):
        module.freeze()
    for name, adapter in ADAPTERS.items():
        if kind.startswith(name):
            module = adapter.from_base(module, r=4, scale=2.0, dropout=dropout)
            module.lora_b = 0.3 * mx.random.normal(module.lora_b.shape)
            key_dropouts(module)
    mx.eval(module.parameters())
    return Head(module.train(), module.as_linear if tied else module)


def make_rows(dtype=mx.float32, rows=P, vocabulary=VOCABULARY):
    """hidden, targets, counted"""
    rng = np.random.default_rng(1)
    hidden = mx.array(rng.standard_normal((rows, HIDDEN)).astype(np.float32)).astype(dtype)
    counted = mx.array(np.arange(rows) % 7 != 3)
    return hidden, mx.array(rng.integers(0, vocabulary, rows).astype(np.int32)), counted


def plain(head, hidden, targets, counted):
    """All logits at once."""
    losses = nn.losses.cross_entropy(head.project(hidden).astype(mx.float32), targets)
    return mx.where(counted, losses, 0.0).sum()


def blocked(head, hidden, targets, counted, block_bytes=BLOCK):
    return summed_cross_entropy(head, hidden, targets, counted, block_bytes=block_bytes)


def gradients_of(loss, head, rows, factor=1.0):
    """(loss, gradients of the hidden states and of what trains in the head, by name)"""
    parameters = head.module.trainable_parameters()

    def run(hidden, parameters):
        head.module.update(parameters)
        return factor * loss(head, hidden, *rows[1:])

    value, (d_hidden, gradients) = mx.value_and_grad(run, argnums=(0, 1))(rows[0], parameters)
    head.module.update(parameters)
    return scalar(value), {"hidden": d_hidden, **flat(gradients)}


def assert_same(got, want, loss=LOSS, gradient=GRADIENT):
    assert got[0] == pytest.approx(want[0], rel=loss)
    assert got[1].keys() == want[1].keys()
    assert {name: x.dtype for name, x in got[1].items()} == {name: x.dtype for name, x in want[1].items()}
    errors = {name: mini.relative_l2(got[1][name], want[1][name]) for name in want[1]}
    assert max(errors.values()) <= gradient, errors


# ---- values and gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*FROZEN, *TRAINED])
def test_equals_all_logits_at_once(kind):
    head, rows = make_head(kind), make_rows()
    assert _rows_of_block(head, rows[0], BLOCK) < P / 2
    want = gradients_of(plain, head, rows)
    assert (len(want[1]) > 1) == (kind in TRAINED)
    assert all(mx.any(x != 0).item() for x in want[1].values())
    assert_same(gradients_of(blocked, head, rows), want)
    head.module.eval()
    assert scalar(blocked(head, *rows)) == pytest.approx(want[0], rel=LOSS)
    assert_same(gradients_of(blocked, head, rows), want)  # dearer, but the same


@pytest.mark.parametrize("kind", ["dense", "dense trained", "bias trained", "tied trained", "lora", "dora"])
def test_equals_all_logits_at_once_in_bfloat16(kind):
    head, rows = make_head(kind, mx.bfloat16), make_rows(mx.bfloat16)
    assert_same(gradients_of(blocked, head, rows), gradients_of(plain, head, rows), gradient=BFLOAT16)


def test_float64():
    head, (hidden, targets, counted) = make_head("dense trained"), make_rows()
    value, got = gradients_of(blocked, head, (hidden, targets, counted))
    h, w = (np.array(x, np.float64) for x in (hidden, head.module.weight))
    logits, rows, seen = h @ w.T, np.arange(P), np.array(counted)
    log_sum = np.log(np.exp(logits).sum(-1))
    assert value == pytest.approx((log_sum - logits[rows, np.array(targets)])[seen].sum(), rel=LOSS)
    d_logits = np.exp(logits - log_sum[:, None])
    d_logits[rows, np.array(targets)] -= 1
    d_logits[~seen] = 0
    for name, want in {"hidden": d_logits @ w, "weight": d_logits.T @ h}.items():
        assert mini.relative_l2(got[name], mx.array(want.astype(np.float32))) <= GRADIENT


@pytest.mark.parametrize("training", [True, False])
def test_a_factor_reaches_every_gradient(training):
    head, rows = make_head("lora"), make_rows()
    head.module.train(training)
    _, want = gradients_of(plain, head, rows)
    _, got = gradients_of(blocked, head, rows, factor=-2.5)
    assert_same((0, got), (0, {name: -2.5 * x for name, x in want.items()}))


@pytest.mark.parametrize("training", [True, False])
def test_rows_that_are_not_counted_have_no_part(training):
    head, (hidden, targets, counted) = make_head("dense trained"), make_rows()
    head.module.train(training)
    loss, gradients = gradients_of(blocked, head, (hidden, targets, counted))
    assert not np.array(gradients["hidden"])[~np.array(counted)].any()
    other_hidden = mx.where(counted[:, None], hidden, 7 - hidden)
    other = gradients_of(blocked, head, (other_hidden, mx.where(counted, targets, 0), counted))
    assert other[0] == loss
    assert mx.array_equal(other[1]["weight"], gradients["weight"])
    # One more row is seen, and has its part.
    more = gradients_of(blocked, head, (hidden, targets, mx.ones_like(counted)))
    assert more[0] > loss * 1.1
    assert mini.relative_l2(more[1]["weight"], gradients["weight"]) > 0.1


def test_dropout_on_the_head():
    """Loss and gradients are of the same masks, and every block has its own."""
    head, (hidden, targets, counted) = make_head("lora", dropout=0.5), make_rows()
    draw_keys(head.module)  # as a step does
    size = _rows_of_block(head, hidden, BLOCK)
    masks = []

    def by_hand(head, hidden, targets, counted):
        total = 0.0
        for first in range(0, P, size):
            part = slice(first, first + size)
            draw_keys(head.module)
            masks.append(head.module.dropout(mx.ones((size, HIDDEN))))
            total = total + plain(head, hidden[part], targets[part], counted[part])
        return total

    results = []
    for loss in (by_hand, blocked):
        mx.random.seed(5)
        results.append(gradients_of(loss, head, (hidden, targets, counted)))
    assert_same(results[1], results[0])
    assert not mx.array_equal(masks[0], masks[1])
    head.module.eval()
    assert scalar(blocked(head, hidden, targets, counted)) != pytest.approx(results[1][0], rel=1e-3)


def test_of_any_number_of_rows():
    head, rows = make_head("dense trained"), make_rows()
    for count in (1, 31, 64, 65, 128):
        few = [x[:count] for x in rows]
        assert_same(gradients_of(blocked, head, few), gradients_of(plain, head, few))


def test_compiled():
    head, rows = make_head("lora"), make_rows()
    want = gradients_of(plain, head, rows)

    @mx.compile
    def step(parameters, hidden, targets, counted):
        def run(parameters, hidden):
            head.module.update(parameters)
            return blocked(head, hidden, targets, counted)

        return mx.value_and_grad(run, argnums=(0, 1))(parameters, hidden)

    parameters = head.module.trainable_parameters()
    mx.enable_compile()
    try:
        loss, (gradients, d_hidden) = step(parameters, *rows)
        mx.eval(loss, gradients, d_hidden)
    finally:
        mx.disable_compile()
    head.module.update(parameters)
    assert_same((scalar(loss), {"hidden": d_hidden, **flat(gradients)}), want)


# ---- in a model -----------------------------------------------------------------------------------------------------


def adapted_head(model, dropout=0.0):
    language_model = model.language_model if "language_model" in model else model
    language_model.lm_head = LoRALinear.from_base(language_model.lm_head, r=4, scale=2.0, dropout=dropout)
    language_model.lm_head.lora_b = 0.3 * mx.random.normal(language_model.lm_head.lora_b.shape)
    key_dropouts(language_model)
    return model.train()


def trained_embedding(model):
    find_head(model).module.unfreeze()
    return model


MODELS = {
    **{family: partial(mini.trainable, family) for family in mini.FAMILIES},
    "adapted head": lambda: adapted_head(mini.trainable()),
    "trained head": lambda: trained_embedding(mini.trainable()),
    "trained embedding, tied": lambda: trained_embedding(mini.trainable(tie_word_embeddings=True)),
    "full": partial(mini.trainable, lora={"fine_tune_type": "full"}),
}


def plain_token_loss(model, inputs, supervised, segments=None):
    hidden = hidden_states(model, inputs, segments).flatten(0, 1)[supervised.positions]
    logits = find_head(model).project(hidden).astype(mx.float32)
    losses = nn.losses.cross_entropy(logits, supervised.targets)
    return mx.where(supervised.counted, losses, 0.0).sum()


@pytest.mark.parametrize("name", MODELS)
def test_a_step_equals_that_of_all_logits(name, monkeypatch):
    """Through the blocks, run again in the backward or not."""
    model = MODELS[name]()
    batch = mini.batch(mini.samples(40, 90, 60))
    monkeypatch.setattr("gdtrain.training.step.token_loss", plain_token_loss)
    loss, gradients = build_step(model, compiled=False)(batch)
    want = scalar(loss), flat(gradients)
    monkeypatch.setattr("gdtrain.training.step.token_loss", token_loss)
    monkeypatch.setattr(gdtrain.loss, "summed_cross_entropy", partial(summed_cross_entropy, block_bytes=BLOCK))
    for recompute in (False, True):
        with recomputed_blocks(model.layers, recompute):
            loss, gradients = build_step(model, compiled=False)(batch)
            mx.eval(loss, gradients)
        assert_same((scalar(loss), flat(gradients)), want)


def test_a_batch_without_targets():
    model = mini.trainable()
    batch = mini.batch([mini.unsupervised(row) for row in mini.samples(5, 9)])
    loss, gradients = build_step(model, compiled=False)(batch)
    assert scalar(loss) == 0
    assert not any(mx.any(x != 0).item() for x in flat(gradients).values())


@pytest.mark.parametrize("target", [-1, -100, 300, 2**31 - 1])
def test_a_target_that_does_not_exist_is_refused(target):
    row = mini.samples(9)[0]
    ids = row.ids.copy()
    ids[-1] = target  # never an input
    batch = mini.batch([mini.whole(ids.tolist())])
    vocabulary = find_head(mini.trainable()).vocabulary
    with pytest.raises(ValueError, match=rf"target is {target}; accepted: 0 to 299$"):
        supervised_positions(batch, vocabulary)
    if target < 0:
        with pytest.raises(ValueError, match=rf"target is {target}; accepted: 0 or more$"):
            supervised_positions(batch)
    supervised_positions(mini.batch([mini.unsupervised(mini.whole(ids.tolist()))]), vocabulary)  # it has no part


@pytest.mark.parametrize("kind", [*FROZEN, *TRAINED])
def test_vocabulary(kind):
    assert make_head(kind).vocabulary == VOCABULARY


# ---- cost -----------------------------------------------------------------------------------------------------------


def products(*arrays):
    """How many matrix products their graph has."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return text.getvalue().count('label ="Matmul"')


def test_two_products_a_block_in_training_and_one_in_evaluation():
    head, rows = make_head("dense"), make_rows()
    blocks = -(-P // _rows_of_block(head, rows[0], BLOCK))
    assert blocks == 3
    step = mx.value_and_grad(lambda hidden: blocked(head, hidden, *rows[1:]))
    assert products(*step(rows[0])) == 2 * blocks
    head.module.eval()
    assert products(blocked(head, *rows)) == blocks
    assert products(*step(rows[0])) == 3 * blocks


def test_few_shapes():
    head, (hidden, *_) = make_head("dense"), make_rows()
    sizes = {_rows_of_block(head, hidden, size * VOCABULARY * 16) for size in range(1, 1000)}
    assert sizes == {1, 2, 4, 8, 16, 32, *range(64, 1000, 64)}
    assert _rows_of_block(head, hidden, 1) == 1


WIDE = 8_192
LARGE = 16 * WIDE * 64  # 8.4 MB: 64 rows, an adapter's 32


def peaks(head, *, gradient, compiled=False):
    """Bytes above what was there before, in units of a block's, for 512 rows and for 1024; their logits are 2 and 4."""

    def loss(hidden, targets, counted):
        return blocked(head, hidden, targets, counted, LARGE)

    step = mx.value_and_grad(loss) if gradient else loss
    head.module.train(gradient)
    found = []
    for rows in (512, 1024):
        inputs = make_rows(rows=rows, vocabulary=WIDE)
        run = mx.compile(step) if compiled else step
        mx.eval(inputs)
        found.append(min(peak(lambda run=run, inputs=inputs: mx.eval(run(*inputs))) for _ in range(3)) / LARGE)
    return found


def peak(run):
    """Bytes above what was there before. MLX allocates ahead of the computation, and far ahead on a busy machine."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    return mx.get_peak_memory() - before


# Measured on two CPU cores: 2.3 blocks, 1.3 for an adapter, whose size is reckoned for a GPU; 1.3 without gradients.
@pytest.mark.parametrize("kind", ["dense", "affine 4", "lora"])
@pytest.mark.parametrize("gradient", [True, False])
def test_peak(kind, gradient):
    """That of the blocks in flight, however many rows there are."""
    few, many = peaks(make_head(kind, vocabulary=WIDE), gradient=gradient)
    assert many <= 3
    assert many <= 1.2 * few


def test_compiled_peak():
    mx.enable_compile()
    try:
        few, many = peaks(make_head("dense", vocabulary=WIDE), gradient=True, compiled=True)
    finally:
        mx.disable_compile()
    assert many <= 4  # measured: 3.3
    assert many <= 1.1 * few


def test_peak_grows_with_the_rows_when_blocks_do_not_wait(monkeypatch):
    """Measured: 5.5 and 8.5 blocks."""
    monkeypatch.setattr(mx, "depends", lambda inputs, dependencies: inputs)
    few, many = peaks(make_head("dense", vocabulary=WIDE), gradient=True)
    assert many > 4
    assert many > 1.4 * few
