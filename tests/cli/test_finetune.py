"""gdtrain finetune: what a run prints, writes and computes."""

import os
import pty
import re
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest
from command import SCRIPT, adapter, call, distance, environ, evaluated, finish, metrics, write_config, write_rows
from main_run import ITERATIONS
from mini import FAMILIES

from gdtrain.commands.finetune import with_absolute_paths
from gdtrain.config_file import dump_yaml, load_config

# The run of conftest: validations every 5 of 22 iterations, checkpoints every 5 (2 kept), reports every 4

VALIDATED = [0, 5, 10, 15, 20, 22]


def test_run_succeeds(finished):
    result, _ = finished
    assert (result.code, result.err) == (0, "")


def test_run_directory(trained):
    files = {str(p.relative_to("run")) for p in Path("run").rglob("*") if p.is_file()}
    adapters = {"adapters.safetensors", "adapter_config.json"}
    expected = adapters | {"config.yaml", "metrics.jsonl", "report.html", "run.lock"}
    expected |= {f"best/{name}" for name in adapters | {"validation.json"}}
    for folder in ("checkpoints/0000020", "checkpoints/0000022"):
        expected |= {f"{folder}/{name}" for name in adapters | {"state.json", "state.safetensors"}}
    assert files == expected


def test_saved_config_is_the_effective_one(trained):
    effective = load_config(Path("c.yaml"), [f"iters={ITERATIONS}"])
    saved = load_config(Path("run/config.yaml"))
    assert saved == with_absolute_paths(effective)
    assert saved.data == str(Path("data").resolve())  # means the same from every directory
    assert effective.iters == ITERATIONS != load_config(Path("c.yaml")).iters


def test_kinds_of_records(trained):
    kinds = [record["kind"] for record in metrics("run")]
    assert kinds[0] == "header"
    assert kinds.count("header") == 1
    assert set(kinds) == {"header", "train", "val", "save"}


def test_header_record(trained):
    (header,) = metrics("run", "header")
    weights = adapter("run")
    model = mx.load(str(Path(load_config(Path("c.yaml")).model, "model.safetensors")))
    assert header["mlx"] == mx.__version__
    assert header["kernel"] == "chunked"
    assert "CPU" in header["kernel_reason"]
    assert header["device"].startswith("cpu")
    assert (header["gdn_layers"], header["gdn_layers_swapped"]) == (3, 3)
    assert header["trainable_parameters"] == sum(x.size for x in weights.values())
    # Without the adapter; mlx-lm, whose count this is, leaves out the few parameters that are in no layer of their own.
    assert header["total_parameters"] == pytest.approx(sum(x.size for x in model.values()), rel=1e-3)
    # "yes yes" is seven tokens, and the turn ends with one more.
    assert header["supervised_tokens"] == 12 * 8
    assert {"gdtrain", "mlx_lm"} <= header.keys()


def test_train_records(trained):
    records = metrics("run", "train")
    assert [record["iteration"] for record in records] == [4, 8, 12, 16, 20, 22]
    for record, batches in zip(records, [4, 4, 4, 4, 4, 2], strict=True):
        assert record["supervised_tokens"] == batches * 2 * 8
        assert record["learning_rate"] == pytest.approx(5e-3, rel=1e-6)
        for key in ("loss", "grad_norm", "tokens_per_second", "iterations_per_second", "active_memory_gb"):
            assert record[key] > 0
        assert record["peak_memory_gb"] >= record["active_memory_gb"]
        assert record["cache_memory_gb"] >= 0


def test_val_records(trained):
    records = metrics("run", "val")
    assert [record["iteration"] for record in records] == VALIDATED
    for record in records:
        assert record["supervised_tokens"] == 5 * 8
        assert record["seconds"] > 0
        assert record["peak_memory_gb"] > 0
    peaks = [record["peak_memory_gb"] for record in records]
    assert peaks == sorted(peaks)


def test_save_records(trained):
    saves = [(record["iteration"], record["path"]) for record in metrics("run", "save") if record["path"] != "best"]
    assert saves == [*((n, f"checkpoints/{n:07d}") for n in (5, 10, 15, 20, 22)), (22, ".")]


def test_loss_falls(trained):
    losses = [record["loss"] for record in metrics("run", "val")]
    assert losses[-1] < 0.5 * losses[0]
    train = [record["loss"] for record in metrics("run", "train")]
    assert train[-1] < 0.7 * train[0]


def test_console(finished):
    result, folder = finished
    lines = result.out.splitlines()
    (header,) = metrics(folder / "run", "header")
    assert (folder / "run/config.yaml").read_text() in result.out
    assert "train: 12 of 12 rows kept" in result.out
    assert "96 supervised" in result.out
    assert "3 of 3 GDN layers" in result.out
    assert f"{header['kernel']}: {header['kernel_reason']}" in result.out
    assert f"{header['trainable_parameters']:,} of {header['total_parameters']:,} parameters" in result.out
    assert lines[-1] == "saved: run"


def test_table_of_validations(finished):
    result, folder = finished
    lines = result.out.splitlines()
    heads = [i for i, line in enumerate(lines) if line.split() == ["Iter", "|", "Val", "loss", "|", "Peak", "mem"]]
    assert len(heads) == 1
    rows = [re.fullmatch(r" *(\d+) \| +(\d+\.\d{3}) \| +(\d+\.\d{3}) GB", line) for line in lines[heads[0] + 1 :]]
    shown = [(int(row[1]), row[2], row[3]) for row in rows if row]
    records = metrics(folder / "run", "val")
    assert shown == [(r["iteration"], f"{r['loss']:.3f}", f"{r['peak_memory_gb']:.3f}") for r in records]


def test_table_of_targets(finished):
    """C45: every projection of attention, GDN and MLP, in all blocks that have it."""
    result, _ = finished
    row = r"^((?:linear_attn|self_attn|mlp)\.\w+) +(\d+) +\d+x\d+ +[\d,]+$"
    shown = dict(re.findall(row, result.out, re.MULTILINE))
    linear = {f"linear_attn.{name}": "3" for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")}
    attention = {f"self_attn.{name}_proj": "1" for name in "qkvo"}
    assert shown == linear | attention | {f"mlp.{name}_proj": "4" for name in ("gate", "up", "down")}


def test_piped_output_is_plain(finished):
    result, _ = finished
    assert not re.findall(r"[^\n -\U0010ffff]|\x7f", result.out + result.err)


def on_a_terminal(*args: object, **environment: str) -> tuple[int, str]:
    """Exit code and everything that the command writes to a terminal of 100 columns."""
    leader, follower = pty.openpty()
    child = subprocess.Popen(
        [SCRIPT, *map(str, args)],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environ(TERM="xterm-256color", COLUMNS="100", **environment),
    )
    os.close(follower)
    written = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # Linux says so when the child has ended
            break
        if not part:
            break
        written += part
    os.close(leader)
    return child.wait(timeout=60), written.decode(errors="replace")


COLOUR = re.compile(r"\x1b\[[\d;]*(?<!\d)(3\d|4\d|9\d|10\d)(;[\d;]*)?m")


def test_progress_bar_on_a_terminal(config):
    config()
    code, written = on_a_terminal("finetune", "c.yaml")
    assert code == 0
    assert "2/2" in written
    assert COLOUR.search(written)
    code, written = on_a_terminal("finetune", "c.yaml", NO_COLOR="1")
    assert code == 0
    assert "2/2" in written
    assert not COLOUR.search(written)


# How it trains


def test_partial_window_is_applied(config):
    """C21: 10 iterations in windows of 4 are updates at 4, 8 and 10."""
    config(iters=10, grad_accumulation_steps=4, steps_per_report=1, steps_per_eval=100)
    finish("finetune", "c.yaml")
    norms = [record["grad_norm"] for record in metrics("run", "train")]
    assert norms[:3] == [None] * 3
    assert [i + 1 for i in range(3, 10) if norms[i] != norms[i - 1]] == [4, 8, 10]
    ten = adapter("run")
    finish("finetune", "c.yaml", "--set", "iters=8")
    eight = adapter("run")
    assert all(distance(ten[name], eight[name]) > 0 for name in ten if name.endswith("lora_b"))


def test_window_weighs_tokens(config):
    """C20: four batches of one row are one batch of four, however long the rows are."""
    rows = [{"text": "ab" * (length // 2)} for length in (10, 50, 200, 7)]
    write_rows("rows/train.jsonl", rows)
    config(data="rows", optimizer="sgd", learning_rate=0.1, batch_size=4, iters=1)
    finish("finetune", "c.yaml")
    whole, (record,) = adapter("run"), metrics("run", "train")
    overrides = ["--set", "batch_size=1", "--set", "iters=4"]
    finish("finetune", "c.yaml", *overrides, "--set", "grad_accumulation_steps=4")
    parts = adapter("run")
    # float32 sums in another order: about 1e-6 apart; the mean of four means is further than 0.1.
    for name in whole:
        if name.endswith("lora_b"):
            assert distance(parts[name], whole[name]) < 1e-4, name
    assert metrics("run", "train")[-1]["grad_norm"] == pytest.approx(record["grad_norm"], rel=1e-5)
    finish("finetune", "c.yaml", *overrides)
    steps = adapter("run")
    assert max(distance(steps[name], whole[name]) for name in whole if name.endswith("lora_b")) > 1e-2


@pytest.mark.parametrize(("epochs", "iterations"), [(2, 12), (0.5, 3)])
def test_epochs(epochs, iterations, config):
    config(iters=None, epochs=epochs, steps_per_report=100)
    finish("finetune", "c.yaml")
    assert metrics("run", "header")[0]["iterations"] == iterations
    assert metrics("run", "train")[-1]["iteration"] == iterations
    assert load_config(Path("run/config.yaml")) == with_absolute_paths(load_config(Path("c.yaml")))


def test_same_seed_same_run(config):
    config(iters=6, steps_per_report=1, steps_per_eval=3, lora_parameters={"dropout": 0.1})

    def losses(seed: int) -> list[float]:
        finish("finetune", "c.yaml", "--set", f"seed={seed}")
        return [record["loss"] for record in metrics("run") if "loss" in record]

    first = losses(1)
    assert len(first) == 6 + 3
    assert losses(1) == first
    assert losses(2)[2:] != first[2:]


def test_best_and_early_stopping(config):
    """C62: trained on other texts than it is validated on, the loss soon rises."""
    write_rows("rows/train.jsonl", [{"text": "zzzzzzzzzz"}] * 2)
    write_rows("rows/valid.jsonl", [{"text": "abcdefghij"}])
    config(data="rows", iters=60, steps_per_eval=2, learning_rate=0.02, early_stopping_patience=3)
    out = finish("finetune", "c.yaml")
    losses = [record["loss"] for record in metrics("run", "val")]
    best = losses.index(min(losses))
    assert len(losses) - 1 == best + 3
    (stop,) = metrics("run", "stop")
    assert stop["iteration"] == 2 * (len(losses) - 1) < 60
    assert "early stopping" in stop["reason"]
    assert "stopped early" in out
    assert evaluated("run", "--checkpoint", "best")["loss"] == pytest.approx(min(losses), abs=1e-12)
    assert evaluated("run")["loss"] == pytest.approx(losses[-1], abs=1e-12)
    assert losses[-1] > min(losses)


def test_starting_from_an_adapter(config):
    """Its validation at 0 is the last one of the run that made it."""
    config(adapter_path="first")
    finish("finetune", "c.yaml")
    config(resume_adapter_file="first/adapters.safetensors")
    finish("finetune", "c.yaml")
    first, then = metrics("first", "val"), metrics("run", "val")
    assert then[0]["loss"] == pytest.approx(first[-1]["loss"], abs=1e-12)
    assert then[0]["loss"] != first[0]["loss"]


# A file as mlx_lm.lora's users have it, with every key of its example.
EXISTING = """\
# The path to the local model directory or Hugging Face repo.
model: "{model}"
train: true
fine_tune_type: lora
optimizer: adamw
optimizer_config:
  adamw:
    betas: [0.9, 0.98]
    eps: 1e-6
    weight_decay: 0.05
    bias_correction: true
data: "data"
seed: 0
num_layers: 4
batch_size: 4
iters: 6
val_batches: 25
learning_rate: 1e-5
steps_per_report: 1
steps_per_eval: 200
grad_accumulation_steps: 1
resume_adapter_file: null
adapter_path: "adapters"
save_every: 100
test: true
test_batches: 100
max_seq_length: 2048
grad_checkpoint: false
clear_cache_threshold: 0
mask_prompt: false
report_to: null
project_name: null
lora_parameters:
  keys: ["self_attn.q_proj", "self_attn.v_proj"]
  rank: 8
  scale: 20.0
  dropout: 0.0
lr_schedule:
  name: cosine_decay
  warmup: 2
  warmup_init: 1e-7
  arguments: [1e-2, 1000, 1e-7]
"""


def test_existing_config_of_mlx_lm(work, checkpoint):
    Path("c.yaml").write_text(EXISTING.format(model=checkpoint))
    out = finish("finetune", "c.yaml")
    names = {name.split("layers.")[1].rsplit(".", 1)[0] for name in adapter("adapters")}
    assert names == {"3.self_attn.q_proj", "3.self_attn.v_proj"}
    rates = [record["learning_rate"] for record in metrics("adapters", "train")]
    assert rates[:3] == pytest.approx([1e-7, (1e-7 + 1e-2) / 2, 1e-2], rel=1e-4)
    (shown,) = re.findall(r"^test loss (\d+\.\d{3}),", out, re.MULTILINE)
    assert shown == f"{evaluated('adapters', '--split', 'test')['loss']:.3f}"


@pytest.mark.parametrize("keys", [{"train": False, "test": True}, {"test": True}], ids=["only", "after training"])
def test_test_loss(keys, config):
    """`test: true` as in mlx-lm: after training, or alone with the adapter of adapter_path."""
    config(iters=4)
    finish("finetune", "c.yaml")
    config(iters=4, **keys)
    out = finish("finetune", "c.yaml")
    (shown,) = re.findall(r"test loss (\d+\.\d{3})", out)
    assert shown == f"{evaluated('run', '--split', 'test')['loss']:.3f}"


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, family_run):
    """C11."""
    folder = family_run(family)
    assert "3 of 3 GDN layers" in (folder / "console.txt").read_text()
    losses = [record["loss"] for record in metrics(folder / "run", "val")]
    assert losses[1] < losses[0]
    names = {name.split("layers.")[1].split(".", 1)[1] for name in adapter(folder / "run")}
    leaf = "in_proj_qkvz" if family == "qwen3_next" else "in_proj_qkv"
    assert f"linear_attn.{leaf}.lora_a" in names
    routers = [name for name in names if re.match(r"mlp\.(gate|shared_expert_gate)\.", name)]
    assert routers == []  # C48


@pytest.mark.parametrize("kind", ["dora", "full"])
def test_other_kinds_of_fine_tuning(kind, config):
    config(fine_tune_type=kind, learning_rate=1e-3)
    finish("finetune", "c.yaml")
    losses = [record["loss"] for record in metrics("run", "val")]
    assert losses[-1] < losses[0]
    assert evaluated("run")["loss"] == pytest.approx(losses[-1], abs=1e-12)


# Earlier runs


def test_earlier_run_is_moved_aside(config):
    config()
    finish("finetune", "c.yaml")
    earlier = {p.name: p.read_bytes() for p in Path("run").iterdir() if p.is_file() and p.name != "run.lock"}
    Path("run-1").mkdir()
    out = finish("finetune", "c.yaml", "--set", "seed=7")
    assert "run held an earlier run or adapter; it is now in run-2" in out
    assert {p.name: p.read_bytes() for p in Path("run-2").iterdir() if p.is_file()} == earlier
    assert [record["iteration"] for record in metrics("run", "val")] == [0, 2]
    assert list(Path("run-1").iterdir()) == []


def test_adapter_of_another_tool_is_kept(config):
    """mlx-lm's folder has no metrics.jsonl."""
    Path("run").mkdir()
    Path("run/adapters.safetensors").write_bytes(b"precious")
    Path("run/adapter_config.json").write_text("{}")
    config()
    call("finetune", "c.yaml")
    assert [p for p in Path().glob("run*/adapters.safetensors") if p.read_bytes() == b"precious"]


def test_current_directory_as_run_directory(config):
    config(adapter_path=".")
    finish("finetune", "c.yaml")
    first = Path("adapters.safetensors").read_bytes()
    result = call("finetune", "c.yaml", "--set", "seed=1")
    assert result.code in (0, 2)
    assert any(p.read_bytes() == first for p in Path().rglob("adapters.safetensors"))


def test_home_is_expanded(config, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config(adapter_path="~/runs/a")
    finish("finetune", "c.yaml")
    assert (tmp_path / "home/runs/a/adapters.safetensors").is_file()
    assert not Path("~").exists()


def test_printed_config_is_one(config):
    """What is printed can be saved and run again."""
    config(lora_parameters={"alpha": 16, "rank": 4}, lr_schedule={"name": "cosine_decay", "arguments": [1e-3, 10]})
    out = finish("finetune", "c.yaml")
    printed = out.split("# resolved config\n")[1].split("\n\n")[0] + "\n"
    Path("again.yaml").write_text(printed)
    effective = with_absolute_paths(load_config(Path("c.yaml")))
    assert load_config(Path("again.yaml")) == effective
    assert printed == dump_yaml(effective)


def test_embedded_model(work):
    """`model: tiny` in its own precision, on data of this machine."""
    write_config(model="tiny", data="data", adapter_path="run", iters=4, batch_size=2, learning_rate=2e-3)
    out = finish("finetune", "c.yaml")
    assert "tiny: 3 of 3 GDN layers" in out
    losses = [record["loss"] for record in metrics("run", "val")]
    assert losses[-1] < losses[0]


# What is said of keys without effect, and of what MLX cannot do


NOTES = {
    "a schedule": (
        {"learning_rate": 1e-5, "lr_schedule": {"name": "cosine_decay", "arguments": [1e-3, 10]}},
        "note: learning_rate has no effect: lr_schedule starts at 0.001",
    ),
    "full": (
        {"fine_tune_type": "full", "lora_parameters": {"rank": 4}},
        "note: lora_parameters has no effect with fine_tune_type: full",
    ),
    "float16": ({"dtype": "float16"}, "note: float16 has little range"),
    "limits": ({"memory_limit_gb": 8}, "note: memory_limit_gb and cache_limit_gb are accepted by MLX on a CPU"),
}


@pytest.mark.parametrize("case", NOTES)
def test_notes(case, config):
    keys, note = NOTES[case]
    config(**keys)
    assert note in finish("finetune", "c.yaml")


def test_an_adapter_of_another_scale_is_not_resumed(config):
    """The same weights would mean another change of the model."""
    config(adapter_path="earlier", lora_parameters={"rank": 2, "scale": 2.0})
    finish("finetune", "c.yaml")
    config(resume_adapter_file="earlier/adapters.safetensors", lora_parameters={"rank": 2, "scale": 20.0})
    result = call("finetune", "c.yaml")
    assert (result.code, "scale is 2.0 in that adapter and 20.0 here" in result.err) == (2, True)
    config(resume_adapter_file="earlier/adapters.safetensors", lora_parameters={"rank": 2, "scale": 2.0})
    finish("finetune", "c.yaml")
    assert metrics("run", "val")[0]["loss"] == metrics("earlier", "val")[-1]["loss"]


def test_a_warm_up_longer_than_the_run(config):
    """A short trial of a config should not need other schedule values."""
    config(lr_schedule={"name": "cosine_decay", "arguments": [1e-3, 10], "warmup": 10})
    assert "warning: lr_schedule.warmup is 10, but the run has 2 updates" in finish("finetune", "c.yaml")
