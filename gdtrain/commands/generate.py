"""gdtrain generate: text from a run or a model, token by token, on mlx-lm's own inference path."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import stream_generate
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from gdtrain.commands.adapter_source import AdapterSource, find_source, is_adapter
from gdtrain.errors import Interrupted, UserError
from gdtrain.model.adapter import load_adapter
from gdtrain.model.layout import main_dtype
from gdtrain.model.load import ModelFiles, find_model, load_model, load_tokenizer, text_heads
from gdtrain.model.tiny_path import TINY

_DTYPE_KEYS = ("dtype", "torch_dtype")


def run_generate(
    target: str,
    *,
    prompt: str,
    system: str | None,
    max_tokens: int,
    temp: float,
    seed: int | None,
    no_adapter: bool,
    compare: bool,
    checkpoint: str,
    base: str | None,
    enable_thinking: bool | None,
    raw: bool,
) -> None:
    """Write the text to standard output as it comes, and figures to standard error; raises UserError, which is for
    cli.py."""
    if max_tokens < 1:
        raise UserError(f"--max-tokens: {max_tokens}; accepted: at least 1")
    if temp < 0:
        raise UserError(f"--temp: {temp:g}; accepted: at least 0, which takes the likeliest token every time")
    _check_exclusions(no_adapter=no_adapter, compare=compare, raw=raw, system=system, thinking=enable_thinking)
    source = _source(target, checkpoint, base)
    if source is None and (no_adapter or compare):
        raise UserError(f"{target} is a model: --no-adapter and --compare take a run, which has an adapter")
    files = find_model(source.base if source else target)
    config = source.config if source else None
    tokenizer = load_tokenizer(files, trust_remote_code=bool(config and config.trust_remote_code))
    text = _read(prompt)
    if enable_thinking is not None and _encode(tokenizer, text, system, enable_thinking) == _encode(
        tokenizer, text, system, not enable_thinking
    ):
        print("note: the chat template makes no difference between thinking and not", file=sys.stderr)
    if enable_thinking is None and config is not None and not raw and tokenizer.has_chat_template:
        enable_thinking = config.enable_thinking
    ids = _encode(tokenizer, text, system, enable_thinking, raw=raw)
    model = load_model(files, dtype=source.dtype if source else _dtype(files))
    settings = {"max_tokens": max_tokens, "temp": temp, "seed": seed}
    if compare or no_adapter or source is None:
        _generate(model, tokenizer, ids, "base" if compare else None, settings)
    if source is not None and not no_adapter:
        load_adapter(model, source.folder)
        _generate(model, tokenizer, ids, "adapter" if compare else None, settings)


def _check_exclusions(*, no_adapter: bool, compare: bool, raw: bool, system: str | None, thinking: bool | None) -> None:
    if no_adapter and compare:
        raise UserError("--no-adapter and --compare exclude each other")
    if raw and (system is not None or thinking is not None):
        raise UserError("--raw leaves out the chat template, and --system and thinking are parts of it")


def _source(target: str, checkpoint: str, base: str | None) -> AdapterSource | None:
    """None for a model."""
    run = Path(target).expanduser()
    if target != TINY and is_adapter(run):
        return find_source(run, checkpoint, base)
    if checkpoint != "last":
        raise UserError(f"--checkpoint: {target} is no run directory")
    if base is not None:
        raise UserError(f"--model: {target} is no run directory, for which it would name the base")
    return None


def _dtype(files: ModelFiles) -> str | None:
    """float16 has to be asked for, because it is bad to train in; for text it will do."""
    if files.repository is None:
        return "float16" if main_dtype(text_heads(files)) == mx.float16 else None
    named = [part.get(key) for part in (files.config, files.config.get("text_config", {})) for key in _DTYPE_KEYS]
    return "float16" if "float16" in named else None  # the weights may not be downloaded yet


def _read(prompt: str) -> str:
    if prompt != "-":
        return prompt
    if sys.stdin.isatty():
        print("the prompt, then Ctrl-D:", file=sys.stderr)
    text = sys.stdin.read()
    if not text.strip():
        raise UserError("--prompt: standard input is empty")
    return text.removesuffix("\n")


def _encode(
    tokenizer: TokenizerWrapper, prompt: str, system: str | None, thinking: bool | None, *, raw: bool = False
) -> list[int]:
    """Through the chat template, if there is one and it is wanted."""
    if raw or not tokenizer.has_chat_template:
        if system is not None or thinking is not None:
            raise UserError("this tokenizer has no chat template, of which --system and thinking are parts")
        return _not_empty(tokenizer.encode(prompt))
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
    except Exception as error:  # Jinja raises whatever a template leads to
        raise UserError(f"the chat template fails on this prompt: {error}; --raw leaves it out") from error
    return _not_empty(ids)


def _not_empty(ids: Sequence[int]) -> list[int]:
    if not ids:
        raise UserError("--prompt: there is no token in it")
    return list(ids)


def _generate(
    model: nn.Module, tokenizer: TokenizerWrapper, ids: list[int], title: str | None, settings: dict[str, Any]
) -> None:
    model.eval()  # without it LoRA layers drop out, and mlx-lm's loop over tokens runs instead of its kernel
    mx.eval(model.parameters())
    mx.reset_peak_memory()
    if settings["seed"] is not None:
        mx.random.seed(settings["seed"])  # each of two has the same draws
    if title is not None:
        print(f"--- {title}")
    last = None
    sampler = make_sampler(settings["temp"])
    try:
        for last in stream_generate(model, tokenizer, ids, max_tokens=settings["max_tokens"], sampler=sampler):
            print(last.text, end="", flush=True)
        print(flush=True)
    except KeyboardInterrupt:
        print(flush=True)
        raise
    except BrokenPipeError as error:
        # Python writes what is left to standard output as it ends; there nobody reads it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise Interrupted("standard output was closed") from error
    if last is not None:
        print(
            f"{title + ': ' if title else ''}{last.prompt_tokens} tokens read at {last.prompt_tps:.1f}/s, "
            f"{last.generation_tokens} written at {last.generation_tps:.1f}/s, peak {mx.get_peak_memory() / 1e9:.3f} GB"
            + ("" if last.finish_reason == "stop" else " (--max-tokens reached)"),
            file=sys.stderr,
        )
