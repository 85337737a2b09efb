"""gdtrain generate: the text of stock mlx-lm, on its inference path, token by token."""

import io
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from command import SCRIPT, call, environ, run
from mini import toy_tokenizer, write_checkpoint
from mlx_lm.models import qwen3_5
from mlx_lm.tokenizer_utils import TokenizerWrapper

from gdtrain.commands import generate
from gdtrain.config_file import load_config
from gdtrain.errors import UserError

PROMPT = ("--prompt", "v0", "--max-tokens", "7")


def stock(prompt="v0", *, adapter="run", raw=False, tokens=7):
    """What mlx_lm.generate writes for the same prompt."""
    model, tokenizer = mlx_lm.load(load_config(Path("c.yaml")).model, adapter_path=adapter)
    if not raw:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return mlx_lm.generate(model, tokenizer, prompt, max_tokens=tokens)


def generated(*args):
    result = call("generate", *args)
    assert result.code == 0, result.err
    return result


def test_text_is_that_of_stock_mlx_lm(trained):
    result = run("generate", "run", *PROMPT)
    assert (result.code, result.out) == (0, stock() + "\n")
    assert result.out != stock(adapter=None) + "\n"  # it was trained
    assert "tokens read at" in result.err
    assert "written at" in result.err
    assert "peak 0.0" in result.err


def test_base_beside_the_adapter(trained, monkeypatch):
    loaded = []
    real = generate.load_model
    monkeypatch.setattr(generate, "load_model", lambda *args, **keys: loaded.append(args) or real(*args, **keys))
    base, adapter = stock(adapter=None), stock()
    assert base != adapter
    result = generated("run", *PROMPT, "--compare")
    assert result.out == f"--- base\n{base}\n--- adapter\n{adapter}\n"
    assert len(loaded) == 1
    assert [line.split(":")[0] for line in result.err.splitlines()] == ["base", "adapter"]
    assert generated("run", *PROMPT, "--no-adapter").out == base + "\n"


def test_checkpoint(trained):
    folder = max(Path("run/checkpoints").iterdir())
    out = generated("run", *PROMPT, "--checkpoint", str(int(folder.name))).out
    assert out == stock(adapter=str(folder)) + "\n"
    assert generated(folder, *PROMPT).out == out  # a folder with an adapter alone, which names its base
    assert generated("run", *PROMPT, "--checkpoint", "best").out == stock(adapter="run/best") + "\n"


def test_raw_prompt_from_standard_input(trained, monkeypatch):
    for given in (["--prompt", "-"], []):
        monkeypatch.setattr(sys, "stdin", io.StringIO("v0 is\n"))
        out = generated("run", "--raw", "--max-tokens", "5", *given).out
        assert out == stock("v0 is", raw=True, tokens=5) + "\n"


def test_a_model_without_a_run(trained, checkpoint):
    assert generated(checkpoint, *PROMPT).out == stock(adapter=None) + "\n"


def test_tiny(work):
    result = run("generate", "tiny", "--prompt", "def f(x): return x", "--max-tokens", "4")
    assert result.code == 0
    assert "4 written at" in result.err


def test_the_inference_path_of_mlx_lm(trained, monkeypatch):
    """The kernel, where there is one, and not the loop over tokens; no dropout."""
    used = []
    real = qwen3_5.gated_delta_update

    def update(*args, use_kernel=True, **keys):
        used.append(use_kernel)
        return real(*args, use_kernel=use_kernel, **keys)

    monkeypatch.setattr(qwen3_5, "gated_delta_update", update)
    seen = []
    stream = generate.stream_generate
    monkeypatch.setattr(
        generate, "stream_generate", lambda model, *a, **k: seen.append(model) or stream(model, *a, **k)
    )
    generated("run", *PROMPT)
    assert used
    assert all(used)
    assert not any(module.training for _, module in seen[0].named_modules())
    assert {type(block.linear_attn).__module__ for block in seen[0].layers if block.is_linear} == {qwen3_5.__name__}


def test_seed(trained):
    def text(seed):
        return generated("run", "--prompt", "v0", "--max-tokens", "12", "--temp", "3", "--seed", seed).out

    assert text("1") == text("1") != text("2")
    # Both of --compare draw alike: without an adapter in it, a run of base against base would be equal.
    result = generated("run", "--prompt", "v0", "--temp", "3", "--seed", "1", "--max-tokens", "12", "--compare")
    assert result.out.endswith(f"--- adapter\n{text('1')}")


@pytest.mark.parametrize("thinking", [True, False])
def test_thinking(thinking, work):
    write_checkpoint(Path("model"), tokenizer=toy_tokenizer("qwen"))
    tokenizer = TokenizerWrapper(toy_tokenizer("qwen"))
    ids = generate._encode(tokenizer, "hello", "be brief", thinking)
    want = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert tokenizer.decode(ids) == want + ("" if thinking else "\n</think>\n\n")
    flag = "--enable-thinking" if thinking else "--no-thinking"
    result = generated("model", "--prompt", "hello", "--max-tokens", "2", flag)
    assert "note" not in result.err
    assert f"{len(generate._encode(tokenizer, 'hello', None, thinking))} tokens read" in result.err


def test_a_template_that_knows_no_thinking(trained):
    assert "note: the chat template makes no difference" in generated("run", *PROMPT, "--no-thinking").err


def test_no_chat_template():
    tokenizer = TokenizerWrapper(toy_tokenizer(None))
    assert tokenizer.decode(generate._encode(tokenizer, "hello", None, None)) == "hello"
    for system, thinking in (("x", None), (None, True)):
        with pytest.raises(UserError, match="no chat template"):
            generate._encode(tokenizer, "hello", system, thinking)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--max-tokens", "0"], "--max-tokens: 0; accepted: at least 1"),
        (["run", "--temp", "-1"], "--temp: -1; accepted: at least 0"),
        (["run", "--no-adapter", "--compare"], "--no-adapter and --compare exclude each other"),
        (["run", "--raw", "--system", "x"], "--raw leaves out the chat template"),
        (["run", "--raw", "--no-thinking"], "--raw leaves out the chat template"),
        (["run", "--checkpoint", "7"], "--checkpoint: run has no '7'; it has: last, best, "),
        (["run", "--prompt", ""], "--prompt: there is no token in it"),
        (["tiny", "--compare"], "tiny is a model: --no-adapter and --compare take a run"),
        (["tiny", "--no-adapter"], "tiny is a model: --no-adapter and --compare take a run"),
        (["tiny", "--checkpoint", "best"], "--checkpoint: tiny is no run directory"),
        (["tiny", "--model", "tiny"], "--model: tiny is no run directory"),
        (["nowhere/at/all"], "model: no folder nowhere/at/all"),
        (["data"], "model: data has no config.json"),
    ],
)
def test_faults(arguments, message, trained):
    raw = ["--raw"] if arguments[1:] == ["--prompt", ""] else []
    result = call("generate", *(PROMPT if "--prompt" not in arguments else ()), *arguments, *raw)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert "Traceback" not in result.err


def test_empty_standard_input(trained, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    result = call("generate", "run")
    assert (result.code, result.err) == (2, "gdtrain: --prompt: standard input is empty\n")


def test_ctrl_c_ends_the_text(trained, monkeypatch):
    stream = generate.stream_generate

    def interrupted(*args, **keys):
        for i, part in enumerate(stream(*args, **keys)):
            if i == 2:
                raise KeyboardInterrupt
            yield part

    monkeypatch.setattr(generate, "stream_generate", interrupted)
    result = call("generate", "run", *PROMPT)
    assert (result.code, result.err) == (130, "gdtrain: interrupted\n")
    assert result.out == stock()[:2] + "\n"


def endless(*args):
    command = [SCRIPT, "generate", "tiny", "--prompt", "x", "--raw", "--max-tokens", "1000000", "--temp", "1", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ())


def test_ctrl_c_in_a_process():
    with endless() as child:
        assert child.stdout.read(1)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert (child.returncode, err.decode()) == (130, "gdtrain: interrupted\n")


def test_a_reader_that_goes_away():
    with endless() as child:
        assert child.stdout.read(1)
        child.stdout.close()
        err = child.stderr.read().decode()
    assert (child.returncode, err) == (130, "gdtrain: standard output was closed\n")


def test_float16_will_do_for_text(work):
    """Training refuses it."""
    write_checkpoint(Path("model"), dtype="float16")
    assert generated("model", "--prompt", "a", "--max-tokens", "2").out
    assert mx.get_peak_memory() > 0
