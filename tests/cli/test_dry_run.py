"""gdtrain finetune --dry-run: everything up to one step on the longest batch, a forecast, and nothing written."""

import math
import re
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from command import call, finish, metrics, run, write_config, write_rows
from mini import toy_tokenizer

from gdtrain.training.forecast import duration


def snapshot() -> dict[str, bytes | None]:
    """Every file and folder below the current directory, with contents."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(Path().rglob("*"))}


def tried(*args: object) -> str:
    """The output of a dry run that succeeds and writes nothing."""
    before = snapshot()
    out = finish("finetune", "c.yaml", "--dry-run", *args)
    assert snapshot() == before
    return out


def test_forecast(config):
    """The batch with the most positions has four short rows beside a long one: the two other long ones are alone."""
    lengths = [10] * 9 + [99] * 3
    write_rows("rows/train.jsonl", [{"text": "x" * length} for length in lengths])
    write_rows("rows/valid.jsonl", [{"text": "abc"}])
    config(data="rows", iters=6, batch_size=5, grad_accumulation_steps=2)
    out = tried()
    assert "# resolved config" in out
    assert re.search(r"^kernel  chunked: CPU device", out, re.MULTILINE)
    assert re.search(r"^train   lora, [\d,]+ of [\d,]+ parameters", out, re.MULTILINE)
    (rows, positions, seconds, peak) = re.findall(
        r"^longest batch: (\d+) x (\d+) positions, (\d+\.\d) s, peak (\d\.\d+) GB$", out, re.MULTILINE
    )[0]
    assert int(rows) == 5
    assert 99 <= int(positions) <= 128  # padded to one of the run's widths
    assert float(seconds) < 60
    assert 0.001 < float(peak) < 1
    tokens = sum(lengths)  # a row has one token more, its end, and one position less than tokens
    assert f"data: 12 rows, {tokens:,} positions, {tokens:,} supervised tokens" in out
    assert "run: 6 iterations of 5 rows, 3 updates, 2 epochs" in out
    assert "nothing is written" in out
    assert "Val loss" not in out
    assert not Path("run").exists()


def test_real_process(config):
    config()
    before = snapshot()
    result = run("finetune", "c.yaml", "--dry-run")
    assert (result.code, result.err) == (0, "")
    assert "longest batch: 2 x" in result.out
    assert snapshot() == before


def test_estimate(config, monkeypatch):
    """From the time of the step: 100 batches as long as the longest, and as many positions as the run has."""
    monkeypatch.setattr("time.perf_counter", iter(range(0, 10**6, 60)).__next__)  # a minute from call to call
    write_rows("rows/train.jsonl", [{"text": "x" * length} for length in (511, 127)])
    config(data="rows", iters=100, batch_size=1)
    out = tried()
    assert re.search(r"^longest batch: 1 x 51[12] positions, 60\.0 s", out, re.MULTILINE)
    assert re.search(r"^estimate: 1 h 0[23] min if time goes with positions, 1 h 40 min if every", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (3540, "59 min"), (3599, "1 h 00 min")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_earlier_run_is_left_and_named(trained):
    assert "run holds an earlier run or adapter, which a run would move aside" in tried()
    shutil.rmtree("run")
    assert "earlier run" not in tried()


def test_adapter_of_another_tool_is_left_and_named(config):
    config()
    Path("run").mkdir()
    Path("run/adapters.safetensors").write_bytes(b"precious")
    assert "run holds an earlier run or adapter" in tried()


def test_its_step_is_the_one_of_the_run(config):
    """The same line, and the figures in the header of metrics.jsonl."""
    config()
    (dry,) = re.findall(r"^longest batch: (.*?),", tried(), re.MULTILINE)
    (real,) = re.findall(r"^longest batch: (.*?),", finish("finetune", "c.yaml"), re.MULTILINE)
    assert dry == real
    (header,) = metrics("run", "header")
    assert real == "{} x {} positions".format(*header["longest_batch"])
    assert header["dry_step_seconds"] > 0
    assert header["dry_step_peak_memory_gb"] > 0


def test_limits_are_in_the_header(config):
    before = mx.set_memory_limit(2**40), mx.set_cache_limit(2**40)
    try:
        config(memory_limit_gb=8, cache_limit_gb=0.5)
        assert "limits  memory_limit_gb 8, cache_limit_gb 0.5\n" in finish("finetune", "c.yaml")
        assert (mx.set_memory_limit(2**40), mx.set_cache_limit(2**40)) == (8 * 10**9, 5 * 10**8)
    finally:
        mx.set_memory_limit(before[0])
        mx.set_cache_limit(before[1])
    (header,) = metrics("run", "header")
    assert [header[f"{kind}_limit_gb"] for kind in ("memory", "cache", "wired")] == [8, 0.5, None]


def test_test_rows_are_not_tested(config):
    config(test=True)
    assert "test loss" not in tried()


# ---- what ends it ---------------------------------------------------------------------------------------------------


def refused(*args: object) -> tuple[int, str]:
    before = snapshot()
    result = call("finetune", "c.yaml", "--dry-run", *args)
    assert snapshot() == before
    assert "Traceback" not in result.out + result.err
    assert len(result.err.splitlines()) == 1
    return result.code, result.err


def test_nothing_to_try(config):
    config(train=False, test=True)
    code, err = refused()
    assert code == 2
    assert "--dry-run" in err
    assert "train: false" in err


def test_faults_are_found_as_in_a_run(config):
    config(batch_size=100)
    code, err = refused()
    assert code == 2
    assert "batch_size: 100" in err
    Path("run").write_text("a file")
    config()
    assert "run is a file" in refused()[1]


def test_limits_in_bytes_are_refused(config):
    config(memory_limit_gb=64_000_000_000)
    code, err = refused()
    assert code == 2
    assert "memory_limit_gb: 6.4e+10" in err


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_out_of_memory(arguments, config, monkeypatch):
    """Before anything of the run is written, in a dry run or a real one."""

    def fail(*args):
        raise RuntimeError("[metal::malloc] Attempting to allocate 99 bytes")

    monkeypatch.setattr("gdtrain.training.dry_step.accumulate", fail)
    write_rows("data/train.jsonl", [{"prompt": "a" * n, "completion": "b"} for n in (3, 90, 3, 60)])
    config()
    before = snapshot()
    result = call("finetune", "c.yaml", *arguments)
    assert result.code == 3
    assert re.match(
        r"gdtrain: longest batch, B = 2, T = \d+, its longest row (\S*/)?train\.jsonl:2 with \d+ tokens, 4 blocks: "
        r"out of memory; lower max_seq_length \(now 2048\) or batch_size \(now 2\) or lora_parameters\.rank \(",
        result.err,
    )
    assert len(result.err.splitlines()) == 1
    assert snapshot() == before


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_loss_that_is_not_finite(arguments, config, checkpoint):
    """A row with one poisoned token, in the longest batch."""
    shutil.copytree(checkpoint, "poisoned")
    tensors = dict(mx.load("poisoned/model.safetensors"))
    (token,) = toy_tokenizer("plain").encode("~")
    tensors["language_model.model.embed_tokens.weight"][token] = math.nan
    mx.save_safetensors("poisoned/model.safetensors", tensors)
    write_rows("data/train.jsonl", [{"text": text} for text in ("ab", "abcd" * 20 + "~", "ab", "abcd" * 20)])
    config(model="poisoned")
    before = snapshot()
    result = call("finetune", "c.yaml", *arguments)
    assert result.code == 3
    assert result.err.startswith("gdtrain: longest batch: the loss is nan; samples: ")
    assert "train.jsonl:2" in result.err
    assert "train.jsonl:4" in result.err
    assert len(result.err.splitlines()) == 1
    assert snapshot() == before


def test_embedded_model(work):
    write_config(model="tiny", data="data", adapter_path="run", iters=2, batch_size=2)
    assert "longest batch: 2 x" in tried()
