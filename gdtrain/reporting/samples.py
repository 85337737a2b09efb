"""Samples as text with the supervised tokens marked: by colour, or between two characters that no sample contains."""

import re
from collections.abc import Sequence
from itertools import chain, count, pairwise
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text

from gdtrain.data.conversation import Sample

STYLE = "black on green"
# Of a longer stretch that is all supervised, or all not, so many characters of its beginning and end are shown.
KEPT = 1_000
_MARKS = ("⟦⟧", "⟪⟫", "«»", "{}", "<>", "[]", "()")
# Would move the cursor, colour the text or reverse it; newline and tab are shown as they are.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class Stretch(NamedTuple):
    """Text of consecutive tokens, all of them supervised or none."""

    text: str
    supervised: bool


def spread(count: int, shown: int) -> list[int]:
    """At most `shown` of `count` indices, ascending, evenly from the first to the last."""
    if shown >= count:
        return list(range(count))
    return [i * (count - 1) // max(shown - 1, 1) for i in range(shown)]


def stretches(sample: Sample, tokenizer: Any) -> list[Stretch]:
    """The sample's text in order, special tokens included.

    A stretch is decoded whole, because a character may have several tokens; one that is cut between two stretches is
    U+FFFD in both. Control characters are written as escapes such as \\x1b, and a long stretch loses its middle.
    """
    cuts = [0, *(np.flatnonzero(np.diff(sample.supervised)) + 1).tolist(), len(sample.ids)]
    found = []
    for start, end in pairwise(cuts):
        text = tokenizer.decode(
            sample.ids[start:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if len(text) > 2 * KEPT:
            middle = f"\n[... {len(text) - 2 * KEPT:,} characters are not shown ...]\n"
            text = text[:KEPT] + middle + text[-KEPT:]
        text = _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
        found.append(Stretch(text, bool(sample.supervised[start])))
    return found


def choose_marks(samples: Sequence[Sequence[Stretch]], encoding: str) -> tuple[str, str]:
    """The first of _MARKS, or else words, of this encoding, neither of which stands in any of the samples' texts."""
    texts = [stretch.text for sample in samples for stretch in sample]
    words = (("[supervised" + ":" * n, ":" * n + "supervised]") for n in count(1))
    for opening, closing in chain(_MARKS, words):
        free = not any(mark in text for mark in (opening, closing) for text in texts)
        if free and encodable(opening + closing, encoding) == opening + closing:
            return opening, closing
    raise AssertionError("no text holds words without end")


def marked(sample: Sequence[Stretch], marks: tuple[str, str]) -> str:
    """Supervised text between the two marks, all other text as it is."""
    return "".join(marks[0] + text + marks[1] if supervised else text for text, supervised in sample)


def coloured(sample: Sequence[Stretch]) -> Text:
    """Supervised text in colour, and a supervised newline as ↵ before the newline, which alone could not be seen."""
    text = Text()
    for stretch in sample:
        if stretch.supervised:
            text.append(stretch.text.replace("\n", "↵\n"), style=STYLE)
        else:
            text.append(stretch.text)
    return text


def encodable(text: str, encoding: str) -> str:
    """The text with escapes for what the encoding does not have."""
    return text.encode(encoding, "backslashreplace").decode(encoding)
