"""gdtrain eval: the loss of a run in another process, another place, another library."""

import json
import math
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from command import distance, evaluated, finish, metrics, run, write_rows
from main_run import ROWS
from mini import FAMILIES

from gdtrain.config_file import load_config
from gdtrain.model.adapter import load_adapter
from gdtrain.model.load import find_model, load_model
from gdtrain.model.swap import swap_linear_attention

EXACT = 1e-12  # the same operations on the same machine


def test_new_process_gives_the_last_val_loss(trained):
    """C56."""
    result = run("eval", "run", "--json", "result.json")
    assert (result.code, result.err) == (0, "")
    loss = json.loads(Path("result.json").read_text())["loss"]
    assert loss == pytest.approx(metrics("run", "val")[-1]["loss"], abs=EXACT)
    assert f"{loss:.6g}" in result.out


@pytest.mark.parametrize("iteration", ["20", "22", "0000020"])
def test_checkpoint(iteration, trained):
    losses = {record["iteration"]: record["loss"] for record in metrics("run", "val")}
    result = evaluated("run", "--checkpoint", iteration)
    assert result["loss"] == pytest.approx(losses[int(iteration)], abs=EXACT)
    assert Path(result["adapter"]) == Path(f"run/checkpoints/{int(iteration):07d}")
    assert losses[15] != losses[20] != losses[22]


def test_best(trained):
    losses = [record["loss"] for record in metrics("run", "val")]
    assert evaluated("run", "--checkpoint", "best")["loss"] == pytest.approx(min(losses), abs=EXACT)


def test_compare_base(trained):
    """In all as two evaluations, and row by row; the worst ten are shown, the greatest increase first."""
    write_rows("data/test.jsonl", [*ROWS["test"], *({"prompt": "t", "completion": "no" * n} for n in range(1, 10))])
    result = evaluated("run", "--split", "test", "--compare-base")
    for loss, options in ((result["loss"], []), (result["base_loss"], ["--no-adapter"])):
        assert loss == pytest.approx(evaluated("run", "--split", "test", *options)["loss"], rel=1e-6)
    records = result["records"]
    assert len(records) == 12
    shown = finish("eval", "run", "--split", "test", "--compare-base")
    assert f"{sum(record['difference'] < 0 for record in records)} of 12 rows have a lower loss" in shown
    assert [r["difference"] for r in records] == sorted((r["tuned"] - r["base"] for r in records), reverse=True)
    for record in records[:2]:
        line = int(record["row"].rsplit(":", 1)[1])
        write_rows("data/valid.jsonl", [json.loads(Path("data/test.jsonl").read_text().splitlines()[line - 1])])
        assert evaluated("run")["loss"] == pytest.approx(record["tuned"], rel=1e-5)
    shown = shown.splitlines()
    (head,) = [i for i, line in enumerate(shown) if line.split() == ["base", "tuned", "difference", "row"]]
    assert [line.split()[3] for line in shown[head + 1 :]] == [record["row"] for record in records[:10]]


def test_without_adapter(trained):
    """lora_b starts at zero, so the validation at 0 is that of the base model."""
    result = evaluated("run", "--no-adapter")
    assert result["adapter"] is None
    assert result["loss"] == pytest.approx(metrics("run", "val")[0]["loss"], abs=EXACT)
    assert evaluated("c.yaml", "--no-adapter")["loss"] == result["loss"]


def test_config_names_the_run(trained):
    assert evaluated("c.yaml")["loss"] == pytest.approx(metrics("run", "val")[-1]["loss"], abs=EXACT)


def stock_loss(model: str, split: str) -> tuple[float, int]:
    """Mean loss over the answers of a split and their tokens, by stock mlx-lm, one row after the other, in float64."""
    network, tokenizer = mlx_lm.load(model, adapter_path="run")
    total, count = 0.0, 0
    for row in ROWS[split]:
        question = [{"role": "user", "content": row["prompt"]}]
        answer = {"role": "assistant", "content": row["completion"]}
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template([*question, answer], return_dict=False)
        end = len(ids) - 1  # the newline after the end of the turn is not learnt
        logits = np.array(network(mx.array([ids]))[0].astype(mx.float32), np.float64)
        peak = logits.max(axis=-1, keepdims=True)
        logp = logits - peak - np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True))
        total -= sum(logp[i - 1, ids[i]] for i in range(len(prompt), end))
        count += end - len(prompt)
    return total / count, count


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_split(split, trained):
    expected, tokens = stock_loss(load_config(Path("c.yaml")).model, split)
    result = evaluated("run", "--split", split)
    assert (result["split"], result["rows"], result["supervised_tokens"]) == (split, len(ROWS[split]), tokens)
    assert result["loss"] == pytest.approx(expected, rel=1e-5)  # float32 against float64


def test_result(trained):
    out = finish("eval", "run", "--split", "test", "--json", "result.json")
    result = json.loads(Path("result.json").read_text())
    assert result.keys() == {
        *("split", "adapter", "kernel", "loss", "perplexity", "rows", "rows_in_split", "supervised_tokens"),
        *("tokens_per_second", "seconds", "peak_memory_gb"),
    }
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]), rel=1e-12)
    assert result["kernel"] == "chunked"
    assert result["tokens_per_second"] > 0
    assert 0 < result["peak_memory_gb"] < 1
    shown = {" ".join(line.split()[:-1]): line.split()[-1] for line in out.splitlines()[-11:]}
    assert shown == {
        name.replace("_", " "): str(value)
        if not isinstance(value, float)
        else f"{value:,.0f}"
        if value >= 1000
        else f"{value:.6g}"
        for name, value in result.items()
    }


def test_batch_size_does_not_matter(trained):
    losses = [evaluated("run", "--set", f"batch_size={size}")["loss"] for size in (1, 3, 5, 64)]
    # Rows of other widths are summed in another order.
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


@pytest.mark.parametrize("kernel", ["chunked", "replay", "reference"])
def test_every_kernel_gives_the_same_loss(kernel, trained):
    result = evaluated("run", "--set", f"kernel={kernel}")
    assert result["kernel"] == kernel
    assert result["loss"] == pytest.approx(metrics("run", "val")[-1]["loss"], rel=1e-4)


def test_nothing_is_written(trained):
    before = {p: p.read_bytes() for p in Path().rglob("*") if p.is_file()}
    finish("eval", "run")
    assert {p: p.read_bytes() for p in Path().rglob("*") if p.is_file()} == before


def test_moved_run(trained):
    expected = metrics("run", "val")[-1]["loss"]
    Path("elsewhere").mkdir()
    shutil.move("run", "elsewhere/renamed")
    result = evaluated("elsewhere/renamed")
    assert result["loss"] == pytest.approx(expected, abs=EXACT)
    assert Path(result["adapter"]) == Path("elsewhere/renamed")


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, family_run, monkeypatch):
    monkeypatch.chdir(family_run(family))
    assert evaluated("run")["loss"] == pytest.approx(metrics("run", "val")[-1]["loss"], abs=EXACT)


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_mlx_lm_gives_the_same_logits(family, family_run, monkeypatch):
    """C57."""
    monkeypatch.chdir(family_run(family))
    ids = mx.array([[(7 * i) % 256 for i in range(70)]])
    stock, _ = mlx_lm.load("model", adapter_path="run")
    base, _ = mlx_lm.load("model")
    files = find_model("model")
    ours = load_model(files)
    swap_linear_attention(ours, files.config)
    load_adapter(ours, Path("run"))
    ours.eval()
    logits = np.array(stock(ids))
    assert distance(np.array(ours(ids)), logits) < 1e-5
    assert distance(np.array(base(ids)), logits) > 1e-2


def test_rows_that_changed_are_read_again(trained):
    """The data are those of the files now, as the config names them."""
    write_rows("data/valid.jsonl", ROWS["test"])
    assert evaluated("run")["loss"] == evaluated("run", "--split", "test")["loss"]


def test_from_another_directory(trained, monkeypatch):
    """The saved config names its data by absolute path."""
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert evaluated("../run")["loss"] == metrics("../run", "val")[-1]["loss"]
