"""The wording of faults: every fault is collected before the user is told, and the list stays readable."""

from typing import Any, NoReturn

from gdtrain.errors import UserError

SHOWN = 20


def raise_faults(title: str, faults: list[str]) -> NoReturn:
    """Raises one UserError: the title, at most 20 faults, one a line, and how many more there are."""
    lines = [title, *faults[:SHOWN]]
    if len(faults) > SHOWN:
        lines.append(f"... and {len(faults) - SHOWN} more")
    raise UserError("\n".join(lines))


def name_type(value: Any) -> str:
    """The JSON name of a value's type, with its article."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
