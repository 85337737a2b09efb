"""The items of a JSON file that holds a list, one at a time: the file may be larger than memory."""

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from gdtrain.data.faults import name_type

BLOCK = 1 << 17
_SPACE = " \t\n\r"
# json.loads tells an unfinished text at its very end, but for a string that does not end.
_MARGIN, _UNFINISHED = 16, "Unterminated string"
_AFTER = tuple(_SPACE + ",]}")
_DECODER = json.JSONDecoder()


class JsonListError(ValueError):
    """What is wrong, and in which line, if that can be said."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


def read_json_list(file: BinaryIO, block: int = BLOCK) -> Iterator[Any]:
    """The items in their order. In memory are one item and at most twice as much of the text as it has.

    Raises JsonListError where the file is no list in JSON; UnicodeDecodeError, RecursionError.
    """
    text = _Text(file, block)
    if text.next() != "[":
        value = text.value()
        text.end()
        raise JsonListError(f"{name_type(value)} instead of a list")
    text.skip("[", "value")
    if text.next() == "]":
        text.skip("]", "value")
    else:
        yield text.value()
        while text.next() == ",":
            text.skip(",", "',' delimiter")
            yield text.value()
        text.skip("]", "',' delimiter")
    text.end()


class _Text:
    """The part of a text that is in memory, and the place in it."""

    def __init__(self, file: BinaryIO, block: int) -> None:
        self._file, self._block = file, block
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._lines, self._ended = "", 0, 1, False

    def next(self) -> str:
        """The next character that is no space, "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read()

    def skip(self, character: str, expected: str) -> None:
        if self.next() != character:
            raise self._error(f"Expecting {expected}", self._at)
        self._at += 1

    def value(self) -> Any:
        """The value that begins here."""
        self.next()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                unfinished = error.pos > len(self._text) - _MARGIN or error.msg.startswith(_UNFINISHED)
                if self._ended or not unfinished:
                    raise self._error(error.msg, error.pos) from error
            else:
                # A number may go on where the text in memory ends: 1, 1. and 1.5e are beginnings of 1.5e7.
                if self._ended or end + _MARGIN < len(self._text) or self._text[end : end + 1] in _AFTER:
                    self._at = end
                    return value
            self._read()

    def end(self) -> None:
        if self.next():
            raise self._error("Extra data", self._at)

    def _read(self) -> None:
        """As much again as is left, so that a long value is not begun anew for every block."""
        self._lines += self._text.count("\n", 0, self._at)
        rest = self._text[self._at :]
        read = self._file.read(max(self._block, len(rest)))
        self._ended = not read
        self._text, self._at = rest + self._decoder.decode(read, final=self._ended), 0

    def _error(self, reason: str, at: int) -> JsonListError:
        return JsonListError(f"not valid JSON: {reason}", self._lines + self._text.count("\n", 0, at))
