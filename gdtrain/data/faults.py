"""The wording of faults: every fault is counted before the user is told, and the list stays readable."""

from collections.abc import Sequence
from typing import Any, NoReturn

from gdtrain.errors import UserError

SHOWN = 20


class Faults:
    """All that is wrong with the data: how much, and the first SHOWN of it, however much there is."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[str] = []

    def add(self, fault: str) -> None:
        self.count += 1
        if self.count <= SHOWN:
            self.first.append(fault)

    def raise_any(self) -> None:
        """Raises UserError if there are faults."""
        if self.count:
            count = f"{self.count} fault{'s' if self.count > 1 else ''}"
            raise_faults(f"the data cannot be used: {count}", self.first, self.count)


def raise_faults(title: str, faults: Sequence[str], count: int | None = None) -> NoReturn:
    """Raises one UserError: the title, at most 20 faults, one a line, and how many more of `count` there are."""
    lines = [title, *faults[:SHOWN]]
    more = (len(faults) if count is None else count) - SHOWN
    if more > 0:
        lines.append(f"... and {more} more")
    raise UserError("\n".join(lines))


def name_type(value: Any) -> str:
    """The JSON name of a value's type, with its article."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
