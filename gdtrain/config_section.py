"""What every section of a config is made of: strict fields, numbers as people write them, rules over several keys."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class Contradiction(NamedTuple):
    """Values that are each fine but not together. The first key is the one to point at."""

    keys: tuple[str, ...]
    message: str


class Contradictions(ValueError):
    """All contradictions of one section, so that they are reported together."""

    def __init__(self, found: list[Contradiction]) -> None:
        super().__init__("\n".join(f"{item.keys[0]}: {item.message}" for item in found))
        self.found = found


def show(value: object) -> str:
    """`value` as a user would write it in YAML, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _number(value: object) -> float | int:
    """Accept 3, 1e-5 and their quoted forms; never a boolean, never infinity."""
    if isinstance(value, str):
        try:
            value = float(value) if re.search(r"[.eEn]", value) else int(value)
        except ValueError:
            raise ValueError(f"must be a number, not {show(value)}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be a number, not {show(value)}")
    if (isinstance(value, float) and not math.isfinite(value)) or abs(value) > 1e300:
        raise ValueError(f"must be a finite number, not {show(value)}")
    return value


def whole_number(value: object) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError(f"must be a whole number, not {show(value)}")
    return int(number)


def _all_or_some(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError(f"must be -1 (all) or at least 1, not {value}")
    return value


def size_in_bytes(value: object) -> int:
    """Bytes from 2000000000, '2GB' or '2G', as mlx-lm reads them (decimal units)."""
    match = (
        re.fullmatch(r"(\d+(?:\.\d+)?)\s*(MB?|GB?)", value.strip(), re.IGNORECASE) if isinstance(value, str) else None
    )
    if match:
        return int(float(match[1]) * {"M": 10**6, "G": 10**9}[match[2][0].upper()])
    try:
        return whole_number(value)
    except ValueError:
        raise ValueError(f"must be a number of bytes or a size such as 500MB or 2GB, not {show(value)}") from None


Number = Annotated[float, BeforeValidator(_number)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0)]
NonNegative = Annotated[float, BeforeValidator(_number), Field(ge=0)]
Count = Annotated[int, BeforeValidator(whole_number), Field(ge=1)]
CountOrAll = Annotated[int, BeforeValidator(whole_number), AfterValidator(_all_or_some)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A mapping of the file: unknown keys are refused, null means "not set", nothing is coerced silently."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_set(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None or key not in cls.model_fields}

    @model_validator(mode="after")
    def _no_contradictions(self) -> Section:
        if found := list(self.contradictions()):
            raise Contradictions(found)
        return self

    def contradictions(self) -> Iterator[Contradiction]:
        """Rules over several keys; each section adds its own."""
        return iter(())

    def was_set(self, key: str) -> bool:
        """Whether `key` (`iters`, `lora_parameters.rank`) was given, rather than left at its default."""
        name, _, rest = key.partition(".")
        return name in self.model_fields_set and (not rest or getattr(self, name).was_set(rest))
