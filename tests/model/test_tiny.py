import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load, load_model, load_tokenizer
from tokenizers import Tokenizer

from gdtrain.model.tiny_path import tiny_model_path

FOLDER = tiny_model_path()
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

USER = {"role": "user", "content": "Hi"}
USER_TEXT = "<|im_start|>user\nHi<|im_end|>\n"
CALL = {"name": "add", "arguments": {"x": 1, "s": "é"}}
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"x": 1, "s": "é"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(FOLDER)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "make_tiny.py"
    spec = importlib.util.spec_from_file_location("make_tiny", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 12_000_000


def test_weights_load_strictly_in_their_dtypes() -> None:
    model, _ = load_model(FOLDER, strict=True)
    saved = mx.load(str(FOLDER / "model.safetensors"))
    assert isinstance(saved, dict)
    assert {k for k, v in saved.items() if v.dtype != mx.bfloat16} == {k for k in saved if k.endswith("A_log")}
    assert all(v.dtype == mx.float32 for k, v in saved.items() if k.endswith("A_log"))
    assert all(mx.isfinite(v).all().item() for v in saved.values())
    assert model.layers[0].linear_attn.A_log.dtype == mx.float32


def test_three_linear_blocks_to_one_of_attention() -> None:
    model, config = load_model(FOLDER)
    kinds = [layer.is_linear for layer in model.layers]
    assert kinds == [True, True, True, False] * (len(kinds) // 4)
    names = {True: "linear_attention", False: "full_attention"}
    assert config["text_config"]["layer_types"] == [names[kind] for kind in kinds]


def test_gates_start_in_the_range_of_real_models() -> None:
    model, _ = load_model(FOLDER)
    for layer in model.layers:
        if layer.is_linear:
            rate = np.array(mx.exp(layer.linear_attn.A_log))
            step = np.array(mx.logaddexp(layer.linear_attn.dt_bias.astype(mx.float32), 0))
            assert rate.min() >= 1
            assert rate.max() <= 16
            assert step.min() > 0.9e-3  # bfloat16 rounds the bias by up to 0.4 in a hundred.
            assert step.max() < 0.11


def test_generates_and_stops_at_the_end_of_a_turn() -> None:
    model, tokenizer = load(str(FOLDER))[:2]
    logits = model(mx.array([tokenizer.encode("def f(x):")]))
    assert logits.shape[-1] == len(tokenizer) == 4096
    assert mx.isfinite(logits).all().item()
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.eos_token_id in tokenizer.eos_token_ids


def test_script_gives_the_committed_weights_and_configs(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert script.make_config(tokenizer) == json.loads((FOLDER / "config.json").read_text())
    assert script.make_tokenizer_config() == json.loads((FOLDER / "tokenizer_config.json").read_text())
    saved = mx.load(str(FOLDER / "model.safetensors"))
    assert isinstance(saved, dict)
    # The embedding also depends on the library of the Python that made it.
    monkeypatch.setattr(script, "make_embedding", lambda tokenizer: np.zeros((script.VOCABULARY, script.HIDDEN)))
    made = script.make_weights(tokenizer)
    assert made.keys() == saved.keys()
    for name in made:
        assert made[name].shape == saved[name].shape
        assert name.endswith("embed_tokens.weight") or mx.array_equal(made[name], saved[name]).item(), name


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n\treturn {'a': [1, 23.5]}  # why\n\n\nclass A:\n    pass\n",
        "naïve — “quoted” हिन्दी ภาษาไทย 日本語 😀\u200d",
        " leading and trailing  \n",
        "\x00\x7f\ufffd\r\n",
    ],
)
def test_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_streams_as_it_decodes(tokenizer: Any) -> None:
    text = "naïve — हिन्दी 日本語 😀\n\tx = 1"
    detokenizer = tokenizer.detokenizer
    for token in tokenizer.encode(text):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == text


@pytest.mark.parametrize("text", ["x = 'e\u0301'", "หน้า हिन्दी", "a_b  \n\n c's 1234", "<think>\n<|im_end|> y"])
def test_same_ids_through_tokenizers_alone(tokenizer: Any, text: str) -> None:
    """transformers builds its own normaliser and splitting for this model type: both must agree with the file."""
    alone = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert tokenizer.encode(text) == alone.encode(text, add_special_tokens=False).ids


def test_special_tokens_are_single_ids_at_the_end(tokenizer: Any) -> None:
    ids = [tokenizer.encode(token) for token in SPECIAL + MARKERS]
    assert ids == [[i] for i in range(4096 - len(ids), 4096)]
    text = "".join(SPECIAL + MARKERS)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == "".join(MARKERS)


def test_mlx_lm_recognises_thinking_and_tools(tokenizer: Any) -> None:
    assert (tokenizer.think_start, tokenizer.think_end) == ("<think>", "</think>")
    assert (tokenizer.tool_call_start, tokenizer.tool_call_end) == ("<tool_call>", "</tool_call>")
    assert tokenizer.tool_parser('{"name": "add", "arguments": {"x": 1}}') == {"name": "add", "arguments": {"x": 1}}


def answer(content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CASES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "system": (
        [{"role": "system", "content": "Be short."}, USER],
        "<|im_start|>system\nBe short.<|im_end|>\n" + USER_TEXT,
    ),
    "an answer after the last question always has a think block": (
        [USER, answer("Hello")],
        USER_TEXT + "<|im_start|>assistant\n<think>\n\n</think>\n\nHello<|im_end|>\n",
    ),
    "reasoning_content": (
        [USER, answer("Hello", reasoning_content="\nGreet.\n")],
        USER_TEXT + "<|im_start|>assistant\n<think>\nGreet.\n</think>\n\nHello<|im_end|>\n",
    ),
    "inline think block": (
        [USER, answer("<think>\nGreet.\n</think>\n\nHello")],
        USER_TEXT + "<|im_start|>assistant\n<think>\nGreet.\n</think>\n\nHello<|im_end|>\n",
    ),
    "think blocks before the last question are dropped": (
        [USER, answer("<think>\na\n</think>\n\nA"), USER, answer("B", reasoning_content="b"), USER],
        f"{USER_TEXT}<|im_start|>assistant\nA<|im_end|>\n{USER_TEXT}<|im_start|>assistant\nB<|im_end|>\n{USER_TEXT}",
    ),
    "content null, missing or in parts": (
        [USER, answer(None), {"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant"}],
        USER_TEXT
        + "<|im_start|>assistant\n<|im_end|>\n"
        + USER_TEXT
        + "<|im_start|>assistant\n<think>\n\n</think>\n\n<|im_end|>\n",
    ),
    "tool calls, their answers in one turn, all after one question": (
        [
            USER,
            answer(
                "Adding.",
                tool_calls=[
                    {"type": "function", "function": CALL},
                    {"name": "add", "arguments": '{"x": 1, "s": "é"}'},
                ],
            ),
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
            answer("Done."),
        ],
        USER_TEXT
        + f"<|im_start|>assistant\n<think>\n\n</think>\n\nAdding.\n{CALL_TEXT}\n{CALL_TEXT}<|im_end|>\n"
        + "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        + "<|im_start|>assistant\n<think>\n\n</think>\n\nDone.<|im_end|>\n",
    ),
    "a call without content": (
        [USER, answer(None, tool_calls=[{"function": CALL}])],
        USER_TEXT + f"<|im_start|>assistant\n<think>\n\n</think>\n\n{CALL_TEXT}<|im_end|>\n",
    ),
}


@pytest.mark.parametrize(("messages", "expected"), CASES.values(), ids=CASES.keys())
def test_template(tokenizer: Any, messages: list[dict[str, Any]], expected: str) -> None:
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "<think>\n"),
        ({"enable_thinking": True}, "<think>\n"),
        ({"enable_thinking": False}, "<think>\n\n</think>\n\n"),
    ],
)
def test_generation_prompt(tokenizer: Any, options: dict[str, bool], expected: str) -> None:
    # Not through mlx-lm's wrapper, which sets enable_thinking itself.
    text = tokenizer._tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True, **options)
    assert text == USER_TEXT + "<|im_start|>assistant\n" + expected


def test_prompt_without_thinking_is_a_prefix_of_the_whole(tokenizer: Any) -> None:
    whole = tokenizer.apply_chat_template([USER, answer("Hello")])
    prompt = tokenizer.apply_chat_template([USER], add_generation_prompt=True, enable_thinking=False)
    assert whole[: len(prompt)] == prompt


def test_tools_are_json_lines_in_the_system_turn(tokenizer: Any) -> None:
    tools = [{"type": "function", "function": {"name": name, "description": "é"}} for name in ("add", "sub")]
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be short."}, USER], tools=tools, tokenize=False
    )
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    assert text.startswith("<|im_start|>system\nBe short.\n\n# Tools\n\n")
    assert f"\n<tools>\n{lines}\n</tools>\n" in text
    assert text.endswith("</tool_call><|im_end|>\n" + USER_TEXT)
    alone = tokenizer.apply_chat_template([USER], tools=tools, tokenize=False)
    assert alone == text.replace("Be short.\n\n", "")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "system", "content": "x"}], "no message of the user"),
        ([USER, {"role": "system", "content": "x"}], "must be the first"),
        ([USER, {"role": "robot", "content": "x"}], "Unknown role: robot"),
        ([{"role": "user", "content": [{"type": "image"}]}], "Only text parts"),
        ([{"role": "user", "content": 3}], "must be text"),
    ],
)
def test_template_refuses(tokenizer: Any, messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(jinja2.TemplateError, match=message):
        tokenizer.apply_chat_template(messages, tokenize=False)
