"""The step on the longest batch before a run: it finds what the run would, and leaves no trace in it."""

import gc
import json
from pathlib import Path

import mini
import mlx.core as mx
import numpy as np
import pytest

from gdtrain.arrays import flat
from gdtrain.commands.finetune import run_finetune
from gdtrain.config import RunConfig
from gdtrain.data.batches import RunBatches
from gdtrain.errors import TrainingStopped
from gdtrain.random_state import read_random_state, set_random_state
from gdtrain.session import Data, Session
from gdtrain.training.dry_step import DryStep, dry_step
from gdtrain.training.step import build_step

NOTHING = DryStep(1, 1, 0.0, 0.0)


def session_of(model, rows, **keys):
    config = RunConfig(model="mini", data="none", batch_size=len(rows), **keys)
    data = Data({"train": rows, "valid": []}, {}, None)
    return Session(config, data, model, swapped=None)


def try_rows(model, rows, *, multiple=1, **keys):
    step = build_step(model, compiled=False)
    return dry_step(session_of(model, rows, **keys), step, mini.batch(rows, multiple=multiple))


# ---- no trace -------------------------------------------------------------------------------------------------------


def values_of(model):
    return {name: np.array(x) for name, x in flat(model.parameters()).items()}


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_changed(training):
    model = mini.trainable(lora={"dropout": 0.3}).train(training)
    before, random = values_of(model), read_random_state()
    names = flat(model.trainable_parameters()).keys()
    try_rows(model, mini.samples(20, 30), optimizer="adamw", max_grad_norm=0.1, grad_accumulation_steps=2)
    after = values_of(model)
    assert all(np.array_equal(after[name], before[name]) for name in before)
    assert flat(model.trainable_parameters()).keys() == names
    assert model.training is training
    assert read_random_state() == random


def test_nothing_is_changed_by_a_failure(monkeypatch):
    model = mini.trainable(lora={"dropout": 0.3}).eval()
    kind, random = type(model.layers[0]), read_random_state()

    def interrupted(*args):
        mx.random.uniform()
        raise KeyboardInterrupt

    monkeypatch.setattr("gdtrain.training.dry_step.accumulate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        try_rows(model, mini.samples(20))
    assert (type(model.layers[0]), model.training, read_random_state()) == (kind, False, random)


def test_random_state_is_set_again():
    mx.random.seed(2**63 + 12345)
    assert read_random_state() == 2**63 + 12345
    mx.random.uniform()
    state = read_random_state()
    first = mx.random.normal((5,)).tolist()
    assert read_random_state() != state
    set_random_state(state)
    assert mx.random.normal((5,)).tolist() == first


def prepare_run(folder, lengths, **values):
    """A config file beside a mini checkpoint and rows of so many bytes; returns it and the run directory."""
    checkpoint = mini.write_checkpoint(folder / "model")
    (folder / "data").mkdir()
    lines = [json.dumps({"text": ("abcdefghij"[i % 7 :] * 200)[:n]}) for i, n in enumerate(lengths)]
    (folder / "data" / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run = folder / "run"
    content = {"model": str(checkpoint), "data": str(folder / "data"), "adapter_path": str(run), "batch_size": 2}
    content |= {"iters": 6, "steps_per_report": 1, "learning_rate": 1e-3, **values}
    (folder / "c.yaml").write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
    return folder / "c.yaml", run


def records(run, kind):
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record for record in found if record["kind"] == kind]


def losses_of(file, run):
    run_finetune(file, [f"adapter_path={run}"])
    return [(record["loss"], record["grad_norm"]) for record in records(run, "train")]


def test_losses_are_those_of_a_run_without_it(tmp_path, monkeypatch):
    """To the bit, with dropout, whose masks come from MLX's random state; one that does not restore it is seen."""
    lora = {"rank": 2, "dropout": 0.2}
    file, _ = prepare_run(tmp_path, [5, 40, 12, 30, 7, 22], lora_parameters=lora, grad_accumulation_steps=2)
    mx.random.seed(99)
    with_it = losses_of(file, tmp_path / "with")
    with monkeypatch.context() as patch:
        patch.setattr("gdtrain.training.dry_step.set_random_state", lambda state: None)
        careless = losses_of(file, tmp_path / "careless")
    monkeypatch.setattr("gdtrain.commands.finetune.dry_step", lambda *args: NOTHING)
    without = losses_of(file, tmp_path / "without")
    assert with_it == without
    assert careless != without


# ---- which batch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_longest_batch_of_a_run(seed, packing):
    """More positions than any other batch of the run; 12 rows in batches of 5 leave a smaller last one."""
    lengths = np.random.default_rng(seed).integers(2, 300, 12).tolist()
    batches = RunBatches(mini.samples(*lengths), 5, seed=seed, max_tokens=300, packing=packing)
    stream = batches.stream()
    sizes = [batches.collate(next(stream)[1]).inputs.size for _ in range(3 * batches.per_epoch)]
    for iterations in range(1, len(sizes) + 1):
        assert batches.collate(batches.longest(iterations)).inputs.size == max(sizes[:iterations])


# MLX allocates ahead of the computation, now more and now less: peaks of the same step differ by up to 6 %. Without
# the optimizer's state the dry step is 26 % off, without the window's gradients 13 %.
PEAK = 0.09


# ---- what it finds --------------------------------------------------------------------------------------------------


def test_its_peak_is_that_of_the_longest_iteration(tmp_path):
    """All batches are alike here. Full fine-tuning with Adam: optimizer, gradients and window are as large as the
    model, so a dry step that leaves out any of them is far off. Peak at the last iteration, when all is there."""
    keys = {"fine_tune_type": "full", "grad_accumulation_steps": 2, "iters": 8}
    file, run = prepare_run(tmp_path, [20] * 4, **keys)
    gc.collect()  # what other tests left is not to be freed in between
    run_finetune(file, [])
    (header,) = records(run, "header")
    train = records(run, "train")
    assert header["longest_batch"] == [2, 32]
    assert header["dry_step_seconds"] > 0
    assert header["dry_step_peak_memory_gb"] == pytest.approx(train[-1]["peak_memory_gb"], rel=PEAK)


def test_the_peak_of_a_run_is_that_of_its_own_iterations(tmp_path):
    """The long row comes last: until then the peak is lower than that of the dry step, and is then the same."""
    lengths = [8] * 5 + [400]
    file, run = prepare_run(tmp_path, lengths, batch_size=1, seed=1)
    gc.collect()
    run_finetune(file, [])
    dry = records(run, "header")[0]["dry_step_peak_memory_gb"]
    batches = RunBatches(mini.samples(*[n + 1 for n in lengths]), 1, seed=1, max_tokens=2048)
    at = next(i for i, (_, rows) in enumerate(batches.stream()) if rows == [5])
    peaks = [record["peak_memory_gb"] for record in records(run, "train")]
    assert at > 0
    assert max(peaks[:at]) < 0.8 * dry
    assert peaks[at] == pytest.approx(dry, rel=PEAK)


def fail(*args):
    raise RuntimeError("[metal::malloc] Attempting to allocate 99 bytes")


@pytest.mark.parametrize(
    ("keys", "advice"),
    [
        ({}, "batch_size (now 3) or lora_parameters.rank ("),
        ({"grad_checkpoint": False}, "batch_size (now 3) or lora_parameters.rank, or set grad_checkpoint: true ("),
        ({"fine_tune_type": "full"}, "batch_size (now 3) or num_layers ("),
    ],
)
def test_out_of_memory_names_the_longest_row(keys, advice, monkeypatch):
    monkeypatch.setattr("gdtrain.training.dry_step.accumulate", fail)
    with pytest.raises(TrainingStopped) as stop:
        try_rows(mini.trainable(), mini.samples(20, 90, 50), **keys)
    message = str(stop.value)
    place = "longest batch, B = 3, T = 89, its longest row train.jsonl:2 with 90 tokens, 4 blocks: "
    assert message.startswith(place + "out of memory; lower max_seq_length (now ")
    assert advice in message


def test_too_many_buffers_have_an_advice_of_their_own(monkeypatch):
    def exceed(*args):
        raise RuntimeError("[metal::malloc] Resource limit (499000) exceeded.")

    monkeypatch.setattr("gdtrain.training.dry_step.accumulate", exceed)
    with pytest.raises(TrainingStopped, match=r"train\.jsonl:1 .*: too many buffers at once; lower max_seq_len"):
        try_rows(mini.trainable(), mini.samples(20))


def test_out_of_memory_in_the_update_counts_too(monkeypatch):
    monkeypatch.setattr("mlx.optimizers.Adam.apply_gradients", fail)
    with pytest.raises(TrainingStopped, match=r"longest row train\.jsonl:1 "):
        try_rows(mini.trainable(), mini.samples(20))


def test_other_errors_are_not_explained_away(monkeypatch):
    def broken(*args):
        raise RuntimeError("[matmul] Last dimension of first input does not match")

    monkeypatch.setattr("gdtrain.training.dry_step.accumulate", broken)
    with pytest.raises(RuntimeError, match="matmul"):
        try_rows(mini.trainable(), mini.samples(20))


def test_a_loss_that_is_not_finite_stops():
    model = mini.trainable()
    weight = model.layers[2].mlp.gate_proj.lora_b
    model.layers[2].mlp.gate_proj.lora_b = weight * mx.nan
    with pytest.raises(TrainingStopped, match=r"^longest batch: the loss is nan; samples: train\.jsonl:1, train.*:2$"):
        try_rows(model, mini.samples(20, 30))


def test_a_gradient_that_is_not_finite_stops(monkeypatch):
    monkeypatch.setattr("mlx.optimizers.clip_grad_norm", lambda gradients, limit: (gradients, mx.array(mx.inf)))
    with pytest.raises(TrainingStopped, match=r"^longest batch: the gradient norm is inf; samples: train\.jsonl:1$"):
        try_rows(mini.trainable(), mini.samples(20))


def test_a_failed_dry_step_leaves_an_earlier_run_where_it_is(tmp_path, monkeypatch):
    file, run = prepare_run(tmp_path, [5, 9])
    run_finetune(file, [])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr("gdtrain.training.dry_step.accumulate", fail)
    with pytest.raises(TrainingStopped):
        run_finetune(file, ["seed=5"])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not Path(f"{run}-1").exists()


def test_its_line():
    assert DryStep(4, 2047, 12.34, 21.44).line() == "longest batch: 4 x 2047 positions, 12.3 s, peak 21.44 GB"
    assert DryStep(1, 96, 0.06, 0.0123).line() == "longest batch: 1 x 96 positions, 0.1 s, peak 0.012 GB"
