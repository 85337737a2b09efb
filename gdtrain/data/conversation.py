"""One record to token ids and to which of them are learnt."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np

from gdtrain.data.schema import Record
from gdtrain.data.template import Template, TemplateError, find_turns, learn_template
from gdtrain.errors import UserError


@dataclass(frozen=True, eq=False)
class Sample:
    """A tokenised record. ids: int32 (n,). supervised: bool (n,), true where ids[i] is a training target; never at 0,
    which nothing predicts. where: the record's place, such as "train.jsonl:7"."""

    ids: np.ndarray
    supervised: np.ndarray
    where: str


def encode(
    record: Record,
    tokenizer: Any,
    *,
    mask_prompt: bool,
    supervise: Literal["all", "last"] = "all",
    enable_thinking: bool | None = None,
) -> Sample:
    """The ids of a record and which of them are targets.

    tokenizer: mlx-lm's TokenizerWrapper or the fast Hugging Face tokenizer inside it. enable_thinking: given to the
    chat template unless None (mlx-lm's wrapper then says true to a model that can think, as it does at inference).

    Text is tokenised with the end-of-sequence token after it. The ids of a chat or completion are exactly
    `apply_chat_template` of the whole conversation. Without mask_prompt all of them are targets. With it, only what
    the assistant says is: every turn, or the last one with supervise="last", from the first token after the
    generation prompt through the end-of-turn token; think blocks and tool calls belong to it, and so does an empty
    think block that the template writes, unless the generation prompt of inference already holds it
    (enable_thinking=False). A token that is partly generation prompt is not a target.
    Raises UserError naming the record when its template cannot be rendered or its turns not be found exactly.
    """
    if record.text is not None:
        if mask_prompt:
            raise UserError(f"{record.where}: mask_prompt needs a prompt, and a text record has none")
        ids = list(tokenizer.encode(record.text))
        if not ids or ids[-1] != tokenizer.eos_token_id:
            ids.append(tokenizer.eos_token_id)
        return _sample(ids, None, record.where)
    try:
        return _encode_conversation(record, tokenizer, mask_prompt, supervise, enable_thinking)
    except TemplateError as error:
        raise UserError(f"{record.where}: {error}") from error


def _encode_conversation(
    record: Record, tokenizer: Any, mask_prompt: bool, supervise: str, enable_thinking: bool | None
) -> Sample:
    if not getattr(tokenizer, "has_chat_template", tokenizer.chat_template is not None):
        raise TemplateError("the tokenizer has no chat template; without one only text records are accepted")
    render = _renderer(tokenizer, enable_thinking)
    ids = list(render(record.messages, record.tools, tokenize=True))
    if not mask_prompt:
        return _sample(ids, None, record.where)
    known = _known(tokenizer, render, enable_thinking)
    text = render(record.messages, record.tools)
    encoding = known.backend.encode(text, add_special_tokens=False)
    if encoding.ids != ids:
        raise TemplateError(
            "the tokenizer gives other ids for the rendered conversation than apply_chat_template, so the assistant's"
            " tokens cannot be told; accepted are mask_prompt: false, or a tokenizer without that fault"
        )
    turns = find_turns(known.template, render, record.messages, record.tools, text)
    return _sample(ids, _inside(encoding.offsets, turns[-1:] if supervise == "last" else turns), record.where)


def _renderer(tokenizer: Any, enable_thinking: bool | None) -> Callable[..., Any]:
    from jinja2 import TemplateError as JinjaError

    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    def render(messages: Any, tools: Any, add_generation_prompt: bool = False, tokenize: bool = False) -> Any:
        try:
            return tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=tokenize,
                return_dict=False,
                **options,
            )
        except (JinjaError, TypeError, ValueError, KeyError, AttributeError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise TemplateError(f"the chat template refuses the conversation: {reason[0]}") from error

    return render


@dataclass(frozen=True)
class _Known:
    template: Template
    backend: Any  # The Rust tokenizer, which gives offsets.


_KNOWN: WeakKeyDictionary[Any, dict[tuple[str, bool | None], _Known]] = WeakKeyDictionary()


def _known(tokenizer: Any, render: Callable[..., Any], enable_thinking: bool | None) -> _Known:
    """What was learnt about this tokenizer's template under this setting, kept as long as the tokenizer."""
    cache = _KNOWN.setdefault(tokenizer, {})
    key = (str(tokenizer.chat_template), enable_thinking)
    if key not in cache:
        fast = tokenizer if callable(tokenizer) else tokenizer._tokenizer  # mlx-lm's wrapper is not callable.
        if not hasattr(fast, "backend_tokenizer"):
            raise TemplateError("the tokenizer is not a fast one, which mask_prompt needs to place the tokens")
        added = [str(token) for token in fast.added_tokens_decoder.values()]
        # Several in mlx-lm's wrapper; the Hugging Face tokenizer may have an int under the same name.
        eos_ids = {fast.eos_token_id} if fast is tokenizer else {fast.eos_token_id, *tokenizer.eos_token_ids}
        eos = [fast.convert_ids_to_tokens(i) for i in eos_ids if i is not None]
        template = learn_template(render, added, [token for token in eos if token in added])
        cache[key] = _Known(template, _untrimmed(fast.backend_tokenizer))
    return cache[key]


def _untrimmed(backend: Any) -> Any:
    """The same tokenizer with offsets that cover all of the text (some leave out the space before a word)."""
    if '"trim_offsets":true' not in backend.to_str().replace(" ", ""):
        return backend
    from tokenizers import Tokenizer

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: False if key == "trim_offsets" else walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else value

    state = json.loads(backend.to_str())
    state["post_processor"] = walk(state["post_processor"])
    return Tokenizer.from_str(json.dumps(state, ensure_ascii=False))


def _inside(offsets: list[tuple[int, int]], turns: list[tuple[int, int]]) -> np.ndarray:
    """bool (n,): whether a token lies wholly inside one of the turns. Turns are in order and disjoint."""
    if not turns:
        return np.zeros(len(offsets), np.bool_)
    places = np.asarray(offsets, np.int64).reshape(-1, 2)
    begins, ends = np.asarray(turns, np.int64).T
    turn = np.searchsorted(begins, places[:, 0], side="right") - 1
    return (turn >= 0) & (places[:, 1] <= ends[turn]) & (places[:, 0] < ends[turn])


def _sample(ids: list[int], supervised: np.ndarray | None, where: str) -> Sample:
    mask = np.ones(len(ids), np.bool_) if supervised is None else supervised
    mask[:1] = False
    return Sample(np.asarray(ids, np.int32), mask, where)
