"""Where the assistant speaks in a rendered conversation.

Templates strip think blocks from history, add empty ones, trim contents and group tool results, so the turns are
never rendered one by one. Instead, the strings that open and close an assistant turn are learnt from small probe
conversations, and the turns are read in the one full render: its n-th opening belongs to the n-th assistant message.
A content may hold the same strings ("<|im_start|>assistant" typed by a user). Such a conversation is rendered a
second time with a private-use character inside each of those strings, and inside what a content ends with and the
template may complete to one ("<|im_end|" before a ">"), so that only the template's own remain whole;
the second render counts only if, without the marks, it equals the first.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

Render = Callable[..., str]  # (messages, tools, add_generation_prompt) -> text

# Words that no template contains, so that their place in a probe's render is beyond doubt.
QUESTIONS, ANSWERS, REASONS = ("Qzuav", "Qzubv"), ("Axuav", "Axubv"), ("Rwuav", "Rwubv")
MARKS = ("\ue000", "\ue001", "\uf8f0", "\uf8f1")


class TemplateError(ValueError):
    """A template, or one conversation under it, whose assistant turns cannot be found exactly."""


@dataclass(frozen=True)
class Template:
    """The strings around an assistant turn.

    header: what precedes every assistant turn. generation: what inference appends before the model speaks, with the
    thinking setting in force; the header, or more. ends: the tokens that close a turn. openers: the tokens that open
    a turn of any role, and are therefore never inside one.
    """

    header: str
    generation: str
    ends: tuple[str, ...]
    openers: tuple[str, ...]


def learn_template(render: Render, added_tokens: Iterable[str], eos_tokens: Iterable[str]) -> Template:
    """Learns the strings around an assistant turn from six probe renders.

    added_tokens: the texts of all tokens that the tokenizer never splits. eos_tokens: those that stop generation.
    Raises TemplateError when the template gives an assistant turn no header or no end of its own.
    """
    added = sorted(set(added_tokens), key=len, reverse=True)
    plain = _probe(ANSWERS)
    thinking = _probe([f"<think>\n{r}\n</think>\n\n{a}" for r, a in zip(REASONS, ANSWERS, strict=True)])
    explicit = _probe(ANSWERS, REASONS)
    renders = [render(messages, None, False) for messages in (plain, thinking, explicit)]
    gaps = [_gap(text, turn) for text in renders for turn in (0, 1)]
    asked = plain[:1]
    closed = _after(render(asked, None, False), QUESTIONS[0])
    prompt = _after(render(asked, None, True), QUESTIONS[0])
    if not prompt.startswith(closed) or not all(gap.startswith(closed) for gap in gaps):
        raise TemplateError("the chat template ends a conversation differently from how it goes on")
    generation = prompt[len(closed) :]
    openings = [gap[len(closed) :] for gap in gaps] + [generation] * bool(generation)
    header = _common(openings, added)
    if len(header.strip()) < 2:
        raise TemplateError("the chat template writes nothing before an assistant turn that could be recognised")
    history, final = _after(renders[0], ANSWERS[0]), _after(renders[0], ANSWERS[1])
    between = history.partition(QUESTIONS[1])[0]
    ends = {_first_end(between, added), _first_end(final, added)} if added else set()
    if not ends or "" in ends:
        ends = {_common([between, final], added).strip()}
    if min(map(len, ends)) < 2:
        raise TemplateError("the chat template writes no end of turn after an assistant turn")
    following = between[max(between.find(end) + len(end) for end in ends if end in between) :]
    openers = [token for token in added if token in header or token in following]
    ends.update(token for token in eos_tokens if len(token) > 1)
    fallback = [text for text in (header.strip(), following.strip()) if len(text) > 1]
    return Template(header, generation or header, tuple(sorted(ends)), tuple(openers or fallback))


def find_turns(
    template: Template, render: Render, messages: Sequence[dict[str, Any]], tools: list[Any] | None, text: str
) -> list[tuple[int, int]]:
    """The extents in text of the assistant turns, in order, as (first character, one past the end-of-turn token).

    text: the render of the conversation. A turn begins right after the generation prompt of inference where the turn
    starts with it, else right after its header. One extent for each message of role assistant.
    Raises TemplateError when the turns do not come out one for one.
    """
    fragile, tails = _fragile(template)
    said = [{key: value for key, value in message.items() if key != "role"} for message in messages]
    mark, marked = "", text
    if _holds_any([said, tools], fragile, tails):
        mark = next((m for m in MARKS if not _holds_any([said, tools, text], (m,))), "")
        if not mark:
            raise TemplateError("the text uses all of the private-use characters that could mark it")
        said, tools = _mark(said, fragile, tails, mark), _mark(tools, fragile, tails, mark)
        marked = render([{"role": m["role"], **rest} for m, rest in zip(messages, said, strict=True)], tools, False)
        if marked.replace(mark, "") != text:
            raise TemplateError("a content holds the template's own tokens in a way that changes how it is rendered")
    turns = []
    place = 0
    expected = sum(message["role"] == "assistant" for message in messages)
    for number in range(1, expected + 1):
        opening = marked.find(template.header, place)
        if opening < 0:
            raise TemplateError(f"{expected} assistant messages, but the chat template opens {number - 1} turns")
        begin = opening + len(template.header)
        closings = [(at, at + len(end)) for end in template.ends if (at := marked.find(end, begin)) >= 0]
        if not closings:
            raise TemplateError(f"the chat template does not close assistant turn {number}")
        closing, place = min(closings)
        if any(marked.find(opener, begin, closing) >= 0 for opener in template.openers):
            raise TemplateError(f"the chat template does not close assistant turn {number} before the next turn")
        if marked.startswith(template.generation, opening):
            begin = opening + len(template.generation)
        turns.append((begin, place))
    if marked.find(template.header, place) >= 0:
        raise TemplateError(f"{expected} assistant messages, but the chat template opens more turns")
    if mark:
        turns = [(begin - marked.count(mark, 0, begin), end - marked.count(mark, 0, end)) for begin, end in turns]
    return turns


def _probe(answers: Sequence[str], reasons: Sequence[str] | None = None) -> list[dict[str, Any]]:
    messages = []
    for turn in (0, 1):
        messages.append({"role": "user", "content": QUESTIONS[turn]})
        extra = {"reasoning_content": reasons[turn]} if reasons else {}
        messages.append({"role": "assistant", "content": answers[turn], **extra})
    return messages


def _gap(text: str, turn: int) -> str:
    """What the template writes between a probe's question and what the assistant says."""
    after = _after(text, QUESTIONS[turn])
    places = [at for word in (ANSWERS[turn], REASONS[turn]) if (at := after.find(word)) >= 0]
    if not places:
        raise TemplateError("the chat template drops an assistant message")
    return after[: min(places)]


def _after(text: str, word: str) -> str:
    if text.count(word) != 1:
        raise TemplateError("the chat template drops or repeats a message")
    return text.partition(word)[2]


def _common(texts: Sequence[str], added: list[str]) -> str:
    """The longest common beginning that cuts through no added token."""
    low, high = min(texts), max(texts)
    length = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    cut = True
    while cut:
        cut = False
        for token in added:
            for text in (low, high):
                at = text.find(token, max(0, length - len(token) + 1))
                if 0 <= at < length < at + len(token):
                    length, cut = at, True
    return low[:length]


def _first_end(text: str, added: list[str]) -> str:
    found = [(text.find(token), token) for token in added if token in text]
    return min(found)[1] if found else ""


@cache
def _fragile(template: Template) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The strings that must stay whole, and what a content may end with that the template may complete to one."""
    fragile = tuple(sorted({*template.ends, *template.openers, template.header.strip()}))
    return fragile, tuple(sorted({token[:n] for token in fragile for n in range(2, len(token))}))


def _holds_any(value: Any, needles: tuple[str, ...], tails: tuple[str, ...] = ()) -> bool:
    """Whether a string in the value has a needle in it or ends with a tail."""
    if isinstance(value, str):
        return value.endswith(tails) or any(needle in value for needle in needles)
    if isinstance(value, dict):
        return any(_holds_any(item, needles, tails) for pair in value.items() for item in pair)
    return isinstance(value, list | tuple) and any(_holds_any(item, needles, tails) for item in value)


def _mark(value: Any, needles: tuple[str, ...], tails: tuple[str, ...], mark: str) -> Any:
    """The value with the mark after the first character of every needle in it and of a tail at its end, in keys too."""
    if isinstance(value, str):
        for needle in needles:
            value = value.replace(needle, needle[0] + mark + needle[1:])
        if value.endswith(tails):
            at = len(value) - max(len(tail) for tail in tails if value.endswith(tail))
            value = value[: at + 1] + mark + value[at + 1 :]
        return value
    if isinstance(value, dict):
        return {_mark(key, needles, tails, mark): _mark(item, needles, tails, mark) for key, item in value.items()}
    return [_mark(item, needles, tails, mark) for item in value] if isinstance(value, list | tuple) else value
