"""Records to token ids and to which of them are learnt."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import numpy as np

from gdtrain.data.schema import Record
from gdtrain.data.template import Template, TemplateError, find_turns, learn_template
from gdtrain.errors import UserError

# Records are tokenised together, which takes several cores, until they have so many characters or are so many: their
# tokens take some 150 bytes each while they are on their way from the Rust tokenizer.
CHARACTERS, RECORDS = 1 << 18, 1000


@dataclass(frozen=True, eq=False, slots=True)
class Sample:
    """A tokenised record. ids: int32 (n,). supervised: bool (n,), true where ids[i] is a training target; never at 0,
    which nothing predicts. where: the record's place, such as "train.jsonl:7". Beside its arrays, 5 bytes a token, a
    sample takes about 400 bytes."""

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
    (sample,) = encode_all(
        [record], tokenizer, mask_prompt=mask_prompt, supervise=supervise, enable_thinking=enable_thinking
    )
    if isinstance(sample, UserError):
        raise sample
    return sample


def encode_all(
    records: Iterable[Record],
    tokenizer: Any,
    *,
    mask_prompt: bool,
    supervise: Literal["all", "last"] = "all",
    enable_thinking: bool | None = None,
) -> Iterator[Sample | UserError]:
    """What `encode` returns or raises for each of the records, in their order, in less time."""
    encoder = _Encoder(tokenizer, mask_prompt, supervise, enable_thinking)
    group: list[_Rendered | UserError] = []
    characters = 0
    for record in records:
        item = encoder.render(record)
        group.append(item)
        characters += 0 if isinstance(item, UserError) else len(item.text)
        if characters >= CHARACTERS or len(group) >= RECORDS:
            yield from encoder.tokenise(group)
            group, characters = [], 0
    yield from encoder.tokenise(group)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A record as text. turns: the extents of the targets, None if all of it is. ids: of the text, where only the
    tokenizer's own method gives them."""

    where: str
    text: str
    is_chat: bool
    turns: list[tuple[int, int]] | None = None
    ids: list[int] | None = None


class _Encoder:
    def __init__(self, tokenizer: Any, mask_prompt: bool, supervise: str, enable_thinking: bool | None) -> None:
        self._tokenizer, self._mask_prompt, self._supervise = tokenizer, mask_prompt, supervise
        self._inner = tokenizer if callable(tokenizer) else tokenizer._tokenizer  # mlx-lm's wrapper is not callable
        self._enable_thinking = enable_thinking
        self._render = _renderer(tokenizer, enable_thinking)
        self._own_chat, self._own_encode = (_is_own(self._inner, name) for name in ("apply_chat_template", "encode"))

    def render(self, record: Record) -> _Rendered | UserError:
        try:
            return self._text(record) if record.text is not None else self._conversation(record)
        except TemplateError as error:
            return UserError(f"{record.where}: {error}")

    def tokenise(self, group: Sequence[_Rendered | UserError]) -> Iterator[Sample | UserError]:
        """The samples of a group, in its order."""
        samples: dict[int, Sample | UserError] = {}
        for is_chat in (False, True):
            places = [i for i, item in enumerate(group) if isinstance(item, _Rendered) and item.is_chat == is_chat]
            if places:
                samples |= zip(places, self._samples([cast(_Rendered, group[i]) for i in places]), strict=True)
        for i, item in enumerate(group):
            yield item if isinstance(item, UserError) else samples[i]

    def _text(self, record: Record) -> _Rendered:
        if self._mask_prompt:
            raise TemplateError("mask_prompt needs a prompt, and a text record has none")
        text = str(record.text)
        ids = list(self._tokenizer.encode(text)) if self._own_encode else None
        return _Rendered(record.where, text, is_chat=False, ids=ids)

    def _conversation(self, record: Record) -> _Rendered:
        if not getattr(self._tokenizer, "has_chat_template", self._tokenizer.chat_template is not None):
            raise TemplateError("the tokenizer has no chat template; without one only text records are accepted")
        messages, tools = record.messages, record.tools
        text, turns = self._render(messages, tools), None
        ids = list(self._render(messages, tools, tokenize=True)) if self._own_chat else None
        if self._mask_prompt:
            turns = find_turns(self._known().template, self._render, messages, tools, text)
            turns = turns[-1:] if self._supervise == "last" else turns
        return _Rendered(record.where, text, is_chat=True, turns=turns, ids=ids)

    def _samples(self, group: Sequence[_Rendered]) -> Iterator[Sample | UserError]:
        """Of records that are all chats, or none."""
        is_chat, texts = group[0].is_chat, [item.text for item in group]
        # What apply_chat_template and encode do with one text, done with many.
        encoded = self._inner(texts, add_special_tokens=not is_chat)
        placed = encoded.encodings
        if self._mask_prompt and (untrimmed := self._known().untrimmed) is not None:
            placed = untrimmed.encode_batch(texts, add_special_tokens=False)
        for i, item in enumerate(group):
            ids = list(encoded["input_ids"][i]) if item.ids is None else item.ids
            if not is_chat and (not ids or ids[-1] != self._tokenizer.eos_token_id):
                ids.append(self._tokenizer.eos_token_id)
            if item.turns is None:
                yield _sample(ids, None, item.where)
            elif placed[i].ids == ids:
                yield _sample(ids, _inside(placed[i].offsets, item.turns), item.where)
            else:
                yield UserError(
                    f"{item.where}: the tokenizer gives other ids for the rendered conversation than"
                    " apply_chat_template, so the assistant's tokens cannot be told; accepted are mask_prompt: false,"
                    " or a tokenizer without that fault"
                )

    def _known(self) -> "_Known":
        return _known(self._tokenizer, self._inner, self._render, self._enable_thinking)


def _is_own(tokenizer: Any, method: str) -> bool:
    """Whether its class has the method from elsewhere than transformers, so that it may do anything."""
    return not getattr(type(tokenizer), method).__module__.startswith("transformers.")


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
    """untrimmed: the Rust tokenizer with whole offsets, None if the tokenizer's own are whole."""

    template: Template
    untrimmed: Any


_KNOWN: WeakKeyDictionary[Any, dict[tuple[str, bool | None], _Known]] = WeakKeyDictionary()


def _known(tokenizer: Any, fast: Any, render: Callable[..., Any], enable_thinking: bool | None) -> _Known:
    """What was learnt about this tokenizer's template under this setting, kept as long as the tokenizer."""
    cache = _KNOWN.setdefault(tokenizer, {})
    key = (str(tokenizer.chat_template), enable_thinking)
    if key not in cache:
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
    """The same tokenizer with offsets that cover all of the text, if its own leave out the space before a word."""
    from tokenizers import Tokenizer

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: False if key == "trim_offsets" else walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else value

    state = json.loads(backend.to_str())
    whole = walk(state["post_processor"])  # a decoder may have the key too, which then means nothing here
    if whole == state["post_processor"]:
        return None
    return Tokenizer.from_str(json.dumps(state | {"post_processor": whole}, ensure_ascii=False))


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
