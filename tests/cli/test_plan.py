"""gdtrain plan: what it prints, what a script gets, and how it fails."""

import json
import re
import subprocess
import sys
from pathlib import Path

import mini
import pytest
from command import SCRIPT, call, environ, finish, run, write_config

BASE = {"model": "model", "data": "there/is/none", "batch_size": 2, "max_seq_length": 129, "dtype": "float32"}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """config(key=value): c.yaml for a model that is only a config.json."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(mini.make_config()))
    return lambda **keys: write_config(**(BASE | keys))


def parts(out):
    """{name: GB} of the table."""
    return {name.strip(): float(gb) for name, gb in re.findall(r"^ *([\w ]+?)  +([\d.]+) GB", out, re.MULTILINE)}


def test_fits(config):
    config()
    out = finish("plan", "c.yaml", "--budget-gb", "1", "--json", "plan.json")
    table = parts(out)
    assert list(table)[:3] == ["weights", "adapter", "optimizer"]
    assert {"block inputs", "activations", "GDN states", "loss", "gradients"} < set(table)
    assert table["peak"] == pytest.approx(sum(gb for name, gb in table.items() if name != "peak"), abs=0.005)
    assert re.search(r"^fits: 0\.0\d of 1\.00 GB \(--budget-gb\)$", out, re.MULTILINE)
    assert "2 x 128 positions, float32, chunked on a CPU" in out
    report = json.loads(Path("plan.json").read_text())
    assert (report["label"], report["budget_gb"], report["batch_size"]) == ("fits", 1, 2)
    assert report["peak_gb"] == pytest.approx(sum(report["parts_gb"].values()))
    assert report["peak_gb"] == pytest.approx(table["peak"], abs=0.0006)


def test_tight_and_not(config):
    """Exit codes 0 and 1, and what would fit."""
    config()
    finish("plan", "c.yaml", "--budget-gb", "1", "--json", "plan.json")
    peak = json.loads(Path("plan.json").read_text())["peak_gb"]
    assert "\ntight: " in finish("plan", "c.yaml", "--budget-gb", f"{1.01 * peak}")
    result = call("plan", "c.yaml", "--budget-gb", f"{0.99 * peak}", "--json", "plan.json")
    assert (result.code, result.err) == (1, "")
    assert re.search(r"^will not fit: 0\.0\d of .* max_seq_length 64 is the most that fits", result.out, re.MULTILINE)
    assert parts(result.out)["peak"] > 0
    assert json.loads(Path("plan.json").read_text())["label"] == "will not fit"


def test_the_most_that_fits(config):
    config()
    for option, key in (("--max-seq", "max_seq_length"), ("--max-batch", "batch_size")):
        out = finish("plan", "c.yaml", "--budget-gb", "0.03", option, "--json", "plan.json")
        found = int(re.search(rf"; {key} (\d+) is the most", out)[1])
        report = json.loads(Path("plan.json").read_text())
        assert report[key] == found
        assert report["peak_gb"] <= 0.03
        more = found + (64 if option == "--max-seq" else 1)
        assert call("plan", "c.yaml", "--budget-gb", "0.03", "--set", f"{key}={more}").code == 1
        assert call("plan", "c.yaml", "--budget-gb", "0.03", "--set", f"{key}={found}").code == 0


def test_nothing_fits(config):
    config()
    for option, message in (
        ("--max-seq", "not even rows of 64 tokens fit"),
        ("--max-batch", "not even one row of 129"),
    ):
        result = call("plan", "c.yaml", "--budget-gb", "0.0001", option)
        assert result.code == 1
        assert message in result.out


def test_for_a_gpu_that_is_not_here(config):
    config(kernel="fused", dtype="bfloat16")
    out = finish("plan", "c.yaml", "--budget-gb", "1")
    assert "bfloat16, fused on a Metal GPU" in out
    assert "note: kernel: fused needs a GPU, which this machine has not" in out
    assert "note: this forecast is not measured on a Metal GPU" in out


def test_where_forecasts_are_known_to_be_low(config):
    config(grad_accumulation_steps=2)
    assert "note: grad_accumulation_steps: measured peaks were up to 19 % higher" in finish("plan", "c.yaml")
    Path("model/config.json").write_text(json.dumps(mini.make_config("qwen3_5_moe")))
    config(fine_tune_type="full")
    assert "note: full fine-tuning of experts: a measured peak was 11 % higher" in finish("plan", "c.yaml")


def test_what_is_taken_for_granted(config):
    config(dtype=None, compile=True)
    out = finish("plan", "c.yaml")
    assert "note: model/config.json has no dtype; bfloat16 is assumed" in out
    assert "note: compile: true" in out
    assert re.search(r"of [\d.]+ GB \(.*(memory|working set)", out)


def test_a_config_json_alone(config):
    config(model="model/config.json")
    finish("plan", "c.yaml")


FAULTS = {
    "model": (["--set", "model=./none"], "model: there is no ./none; accepted: a folder with a config.json"),
    "hub": (["--set", "model=owner/none"], "owner/none is no folder here, and its config.json is not in the cache"),
    "both": (["--max-seq", "--max-batch"], "--max-seq and --max-batch exclude each other"),
    "budget": (["--budget-gb", "-1"], "--budget-gb: -1; accepted: a number above 0"),
    "json": (["--json", "none/x.json"], "--json: none/x.json cannot be written"),
    "keys": (["--set", "lora_parameters.keys=[nothing]"], "'nothing' names no projection"),
    "config": (["--set", "batch_sise=1"], "batch_sise"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault, config):
    options, message = FAULTS[fault]
    config()
    result = call("plan", "c.yaml", *options)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert "Traceback" not in result.err


def test_without_the_model_library(config):
    """Neither mlx-lm nor transformers is imported: they take two seconds."""
    config()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", SCRIPT, "plan", "c.yaml"],
        capture_output=True,
        text=True,
        env=environ(),
        check=False,
    )
    assert done.returncode == 0
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "pydantic" in imported
    assert imported & {"mlx_lm", "transformers", "datasets"} == set()


def test_help_says_what_the_exit_codes_are():
    out = " ".join(run("plan", "--help").out.split())
    assert "Exit code 0 if the run fits the budget, tightly or not, and 1 if it will not fit." in out
