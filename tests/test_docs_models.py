"""docs/models.md: every cell rests on tests that exist."""

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest
from mini import FAMILIES
from quantised import MODES

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))
NOTES = dict(re.findall(r"^(\d+)\. `(tests/\S+::\w+)`", TEXT, re.MULTILINE))
WITHOUT_TESTS = ("not yet", "not tried")


def rows():
    """[family, precision, train, eval, fuse, export] of the first table."""
    lines = [line for line in TEXT.split("## ")[0].splitlines() if line.startswith("| qwen")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@lru_cache
def functions(file):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("file", "name"), NAMED, ids="::".join)
def test_a_named_test_exists(file, name):
    assert name.startswith("test_")
    assert name in functions(file)


def test_every_cell_has_tests_or_says_so():
    assert [len(row) for row in rows()] == [6] * len(rows())
    used = set()
    for row in rows():
        for cell in row[2:]:
            numbers = re.findall(r"\[(\d+)\]", cell)
            assert bool(numbers) != (cell in WITHOUT_TESTS), cell
            used |= set(numbers)
    assert used == NOTES.keys()  # none that is not there, none that nothing rests on
    assert list(map(int, NOTES)) == list(range(1, len(NOTES) + 1))


def test_every_family_in_every_precision():
    shown = {family: " ".join(row[1] for row in rows() if row[0] == family) for family in FAMILIES}
    precisions = {"float32", "bfloat16", *(mode.split()[0] for mode in MODES)}
    assert all(precision in text for text in shown.values() for precision in precisions)
