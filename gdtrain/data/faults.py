"""Many faults, one error: every fault is collected before the user is told, and the list stays readable."""

from typing import NoReturn

from gdtrain.errors import UserError

SHOWN = 20


def raise_faults(title: str, faults: list[str]) -> NoReturn:
    """Raises one UserError: the title, at most 20 faults, one a line, and how many more there are."""
    lines = [title, *faults[:SHOWN]]
    if len(faults) > SHOWN:
        lines.append(f"... and {len(faults) - SHOWN} more")
    raise UserError("\n".join(lines))
