"""Accumulation windows, optimizers, schedules, clipping and the guard: single steps, and whole runs on disk."""

import json
import math
import os
import signal

import mini
import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_map

from gdtrain.arrays import flat, scalar
from gdtrain.commands.finetune import run_finetune
from gdtrain.config import RunConfig
from gdtrain.data.batches import RunBatches
from gdtrain.errors import Interrupted, TrainingStopped
from gdtrain.model.lora import adapt
from gdtrain.model.swap import swap_linear_attention
from gdtrain.training.loop import guard
from gdtrain.training.optimizer import build_optimizer
from gdtrain.training.step import Window, build_step

# Relative L2 per tensor: the same sums in another order. Measured 3e-7 on a CPU, 4e-6 on an H200.
SUMS = 1e-5


def config(**values):
    return RunConfig(model="mini", data="none", **values)


def window_of(step, batches):
    window = Window()
    for batch in batches:
        window.add(step(batch)[1], batch)
    return window


def errors(got, want):
    got, want = flat(got), flat(want)
    assert got.keys() == want.keys()
    return {name: mini.relative_l2(got[name], want[name]) for name in want}


UNEVEN = mini.samples(60, 80, 230, 20, supervised=[10, 50, 200, 7])


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_four_batches_of_one_are_one_batch_of_four(family):
    model = mini.trainable(family)
    step = build_step(model, compiled=False)
    one, four = window_of(step, [mini.batch(UNEVEN)]), Window()
    singles = [window_of(step, [mini.batch(UNEVEN, [i])]) for i in range(4)]
    for i, single in enumerate(singles):
        four.add(single.gradients, mini.batch(UNEVEN, [i]))
    assert one.tokens == four.tokens == 267
    assert four.rows == [0, 1, 2, 3]
    (whole, whole_norm), (parts, parts_norm) = one.mean(None), four.mean(None)
    assert max(errors(parts, whole).values()) <= SUMS
    assert scalar(parts_norm) == pytest.approx(scalar(whole_norm), rel=1e-6)
    start = model.trainable_parameters()
    moved = []
    for gradients in (whole, parts):
        model.update(start)
        optim.SGD(0.1).update(model, gradients)
        moved.append(tree_map(lambda x, y: x - y, model.trainable_parameters(), start))
    assert max(errors(moved[1], moved[0]).values()) <= 1e-4  # differences of parameters of size 0.1 in float32

    # The mean of the batches' means, which others make, is another update.
    means = [flat(single.mean(None)[0]) for single in singles]
    wrong = {name: sum(mean[name] for mean in means) / 4 for name in means[0]}
    assert min(errors(wrong, whole).values()) > 0.1


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "adafactor", "muon"])
def test_every_optimizer_lowers_the_loss_of_the_batch(name):
    rates = {"sgd": 0.05, "muon": 3e-3}
    model = mini.trainable(fill=False)
    batch = mini.batch(mini.samples(20, 30))
    step = build_step(model, compiled=False)
    optimizer = build_optimizer(config(optimizer=name, learning_rate=rates.get(name, 1e-3)))
    assert type(optimizer).__name__.lower() == name
    losses = []
    for _ in range(3):
        loss, _ = step(batch)
        losses.append(scalar(loss))
        optimizer.update(model, window_of(step, [batch]).mean(None)[0])
    # The first step moves lora_b only; each of them counts.
    assert losses[0] > losses[1] > losses[2]


def test_optimizer_arguments_arrive():
    options = {"adamw": {"weight_decay": 0.3, "betas": [0.5, 0.6]}, "sgd": {"momentum": 0.7}}
    adamw = build_optimizer(config(optimizer="adamw", optimizer_config=options))
    assert (adamw.weight_decay, adamw.betas) == (0.3, [0.5, 0.6])
    assert build_optimizer(config(optimizer="sgd", optimizer_config=options)).momentum == 0.7


def rates_of(**schedule):
    """The learning rate that each of ten updates really uses: SGD on a gradient of one."""
    optimizer = build_optimizer(config(optimizer="sgd", lr_schedule=schedule))
    parameters, rates = {"x": mx.array(0.0)}, []
    for _ in range(10):
        moved = optimizer.apply_gradients({"x": mx.array(1.0)}, parameters)
        rates.append((parameters["x"] - moved["x"]).item())
    return rates


def test_schedule_with_warm_up():
    """mlx-lm's: a line from warmup_init to the initial rate in `warmup` updates, which the next one reaches; then the
    schedule from its beginning."""
    rates = rates_of(name="cosine_decay", arguments=[0.4, 5, 0.1], warmup=3, warmup_init=0.1)
    warm = [0.1, 0.2, 0.3, 0.4]
    decay = [0.1 + 0.15 * (1 + math.cos(math.pi * min(i, 5) / 5)) for i in range(6)]
    assert rates == pytest.approx(warm + decay, rel=1e-5)  # float32


@pytest.mark.parametrize(
    ("name", "arguments", "want"),
    [
        ("linear_schedule", [0.5, 0.1, 4], [0.5, 0.4, 0.3, 0.2, *[0.1] * 6]),
        ("exponential_decay", [0.5, 0.9], [0.5 * 0.9**i for i in range(10)]),
        ("step_decay", [0.5, 0.1, 4], [*[0.5] * 4, *[0.05] * 4, *[0.005] * 2]),
    ],
)
def test_schedules_without_warm_up(name, arguments, want):
    assert rates_of(name=name, arguments=arguments) == pytest.approx(want, rel=1e-5)


def test_a_constant_rate_without_schedule():
    assert build_optimizer(config(learning_rate=0.25)).learning_rate.item() == 0.25


def norm_of(gradients):
    return math.sqrt(sum(float((np.array(g, np.float64) ** 2).sum()) for g in flat(gradients).values()))


@pytest.mark.parametrize("share", [0.1, 0.999])
def test_clipping(share):
    model = mini.trainable()
    step = build_step(model, compiled=False)

    def mean(limit):
        return window_of(step, [mini.batch(mini.samples(20, 30))]).mean(limit)

    whole, norm = mean(None)
    assert scalar(norm) == pytest.approx(norm_of(whole), rel=1e-5)
    limit = share * scalar(norm)
    clipped, reported = mean(limit)
    assert scalar(reported) == scalar(norm)  # before clipping
    assert norm_of(clipped) == pytest.approx(limit, rel=1e-5)
    scaled = tree_map(lambda g: share * g, whole)
    assert max(errors(clipped, scaled).values()) <= 1e-5  # one factor for all
    unclipped, reported = mean(1.001 * scalar(norm))
    assert scalar(reported) == scalar(norm)
    assert max(errors(unclipped, whole).values()) == 0


def test_guard():
    guard("loss", 3.0, 1, [])
    places = [f"train.jsonl:{i}" for i in range(1, 11)]
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(TrainingStopped, match=rf"iteration 7: the loss is {value}; .*:1, .*:8 and 2 more$"):
            guard("loss", value, 7, places)


# ---- whole runs -----------------------------------------------------------------------------------------------------

TEXTS = [f"Row {i}: " + "abcdefgh "[: 3 + i % 5] * (1 + i % 4) for i in range(10)]
RUN = {"num_layers": -1, "iters": 10, "batch_size": 1, "steps_per_report": 1, "learning_rate": 1e-3, "optimizer": "sgd"}
RUN |= {"lora_parameters": {"rank": 2, "scale": 2.0}, "seed": 7, "save_every": 1000}


def prepare_run(folder, texts=TEXTS, **values):
    """A config file beside a mini checkpoint and its data; returns it and the run directory."""
    checkpoint = mini.write_checkpoint(folder / "model")
    data = folder / "data"
    data.mkdir()
    lines = [json.dumps({"text": text}) for text in texts]
    (data / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run = folder / "run"
    file = folder / "config.yaml"
    content = {"model": str(checkpoint), "data": str(data), "adapter_path": str(run), **RUN, **values}
    file.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
    return file, run


def records(run, kind):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record for record in records if record["kind"] == kind]


def by_hand(texts, updates_after, *, iterations=10, rate=1e-3):
    """The adapter of such a run with SGD: an update after each of these iterations, of all batches since the last."""
    model, model_config = mini.build()
    swap_linear_attention(model, model_config)
    mx.random.seed(RUN["seed"])
    adapt(model, rank=2, scale=2.0)
    model.train()
    tokenizer = mini.toy_tokenizer()
    rows = [mini.whole([*tokenizer.encode(text), tokenizer.eos_token_id]) for text in texts]
    stream = RunBatches(rows, 1, seed=RUN["seed"], max_tokens=4096).stream()
    step = build_step(model, compiled=False)
    total, tokens, norms = None, 0, []
    for iteration in range(1, iterations + 1):
        batch = mini.batch(rows, next(stream)[1])
        _, gradients = step(batch)
        total = gradients if total is None else tree_map(lambda x, y: x + y, total, gradients)
        tokens += batch.supervised_tokens
        if iteration in updates_after:
            mean = {name: g / tokens for name, g in flat(total).items()}
            norms.append(norm_of(mean))
            moved = [(n, x - rate * mean[n]) for n, x in flat(model.trainable_parameters()).items()]
            model.load_weights(moved, strict=False)
            total, tokens = None, 0
    return flat(model.trainable_parameters()), norms


def assert_same_adapter(folder, want):
    got = mx.load(str(folder / "adapters.safetensors"))
    assert got.keys() == want.keys()
    worst = {name: mini.relative_l2(got[name], want[name]) for name in want}
    assert max(worst.values()) <= 1e-4, worst  # lora_b starts at zero: the sum of ten gradients to float32 noise


def test_the_last_partial_window_is_applied(tmp_path):
    file, run = prepare_run(tmp_path, grad_accumulation_steps=4)
    run_finetune(file, [])
    want, norms = by_hand(TEXTS, {4, 8, 10})
    assert_same_adapter(run, want)
    dropped, _ = by_hand(TEXTS, {4, 8})
    with pytest.raises(AssertionError):  # the comparison would see a window that was dropped
        assert_same_adapter(run, dropped)
    train = records(run, "train")
    assert [record["iteration"] for record in train] == list(range(1, 11))
    reported = [train[i - 1]["grad_norm"] for i in (4, 8, 10)]
    assert reported == pytest.approx(norms, rel=1e-4)
    assert [record["grad_norm"] for record in train[:3]] == [None] * 3


def test_the_schedule_counts_updates_not_iterations(tmp_path):
    schedule = {"name": "linear_schedule", "arguments": [4e-3, 1e-3, 3], "warmup": 1}
    file, run = prepare_run(tmp_path, lr_schedule=schedule, grad_accumulation_steps=2)
    run_finetune(file, [])
    train = records(run, "train")
    # After each update, the rate that it used: warm-up 0 and 4e-3, then the line from its beginning.
    rates = [record["learning_rate"] for record in train if record["iteration"] % 2 == 0]
    assert rates == pytest.approx([0.0, 4e-3, 4e-3, 3e-3, 2e-3], rel=1e-5)


def test_clipping_in_a_run_reports_the_norm_before(tmp_path):
    file, run = prepare_run(tmp_path, max_grad_norm=1e-3, iters=3)
    run_finetune(file, [])
    _, norms = by_hand(TEXTS, {1, 2, 3}, iterations=3, rate=0.0)
    train = records(run, "train")
    assert train[0]["grad_norm"] == pytest.approx(norms[0], rel=1e-4)
    assert train[0]["grad_norm"] > 1e-2
    adapter = mx.load(str(run / "adapters.safetensors"))
    moved = norm_of({name: x for name, x in adapter.items() if name.endswith("lora_b")})
    assert 1e-6 < moved <= 3 * 1e-3 * 1e-3 * 1.0001  # three updates of rate times the limit at most


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_nan_stops_the_run_and_the_last_good_adapter_stays(accumulation, tmp_path):
    """One token's embedding is NaN, and one row has that token."""
    texts = [*TEXTS[:6], "this ~ one", *TEXTS[7:]]
    file, run = prepare_run(tmp_path, texts, grad_accumulation_steps=accumulation)
    weights_file = tmp_path / "model" / "model.safetensors"
    weights = mx.load(str(weights_file))
    embedding = next(name for name in weights if "embed_tokens" in name)
    weights[embedding][mini.toy_tokenizer().encode("~")[0]] = mx.nan
    mx.save_safetensors(str(weights_file), weights, metadata={"format": "mlx"})
    rows = [mini.whole([0] * (len(text) + 1)) for text in texts]  # lengths alone decide the order
    stream = RunBatches(rows, 1, seed=RUN["seed"], max_tokens=4096).stream()
    at = next(i for i in range(1, 11) if next(stream)[1] == [6])
    assert at > 2  # there is something good to keep
    with pytest.raises(TrainingStopped, match=rf"^iteration {at}: the loss is nan; samples: .*train\.jsonl:7$"):
        run_finetune(file, [])
    # The weights of the last finite loss: an update after it may be what spoilt the next one.
    good = {i for i in range(1, at - 1) if i % accumulation == 0}
    want, _ = by_hand(texts, good, iterations=at - 1)
    assert_same_adapter(run, want)
    (stop,) = records(run, "stop")
    assert stop["iteration"] == at
    assert "train.jsonl:7" in stop["reason"]


def test_a_gradient_that_is_not_finite_stops_the_run_too(tmp_path, monkeypatch):
    file, run = prepare_run(tmp_path)
    whole_mean, count = Window.mean, []

    def overflowing(self, limit):  # its first call is the dry step's
        mean, norm = whole_mean(self, limit)
        count.append(1)
        return (tree_map(lambda g: g * mx.inf, mean), mx.array(mx.inf)) if len(count) == 5 else (mean, norm)

    monkeypatch.setattr(Window, "mean", overflowing)
    with pytest.raises(TrainingStopped, match=r"iteration 4: the gradient norm is inf; samples: .*train\.jsonl:"):
        run_finetune(file, [])
    want, _ = by_hand(TEXTS, {1, 2, 3}, iterations=3)
    assert_same_adapter(run, want)


def test_an_interrupted_run_ends_its_iteration_and_saves(tmp_path, monkeypatch):
    file, run = prepare_run(tmp_path)
    mean, count = Window.mean, []

    def interrupted(self, limit):
        count.append(1)
        if len(count) == 5:  # the first is the dry step's
            os.kill(os.getpid(), signal.SIGINT)
        return mean(self, limit)

    monkeypatch.setattr(Window, "mean", interrupted)
    with pytest.raises(Interrupted, match="iteration 4"):
        run_finetune(file, [])
    want, _ = by_hand(TEXTS, {1, 2, 3, 4}, iterations=4)
    assert_same_adapter(run, want)
    assert [record["iteration"] for record in records(run, "stop")] == [4]
