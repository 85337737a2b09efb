"""What ruff does not see: lines of kernel texts and C++ are no longer than those of Python."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONGEST = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["line-length"]
FILES = sorted(
    file
    for folder in ("kernels", "tests")
    for file in (ROOT / folder).rglob("*.*")
    if file.suffix in (".h", ".metal", ".cpp")
)


def long_lines(text):
    return [number for number, line in enumerate(text.splitlines(), start=1) if len(line) > LONGEST]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_line_length(file):
    assert long_lines(file.read_text(encoding="utf-8")) == []


def test_long_lines():
    assert {file.suffix for file in FILES} == {".h", ".metal", ".cpp"}
    assert long_lines("x" * LONGEST + "\n" + "x" * (LONGEST + 1)) == [2]
