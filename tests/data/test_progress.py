import io

import pytest
from rich.console import Console

from gdtrain.data.progress import MANY, checking, tokenising


def run(count: int, terminal: bool) -> tuple[list[str], str]:
    """What was said and what stands on the console after so many rows."""
    said: list[str] = []
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with tokenising(range(count), "train", said.append, console) as rows:
        assert list(rows) == list(range(count))
    return said, console.file.getvalue()


def test_a_bar_on_a_terminal_only():
    said, shown = run(MANY, terminal=True)
    assert said == []
    assert "tokenising train" in shown
    assert f"{MANY}/{MANY}" in shown
    said, shown = run(MANY, terminal=False)
    assert len(said) == 1
    assert said[0].startswith("train: 10,000 rows tokenised in ")
    assert shown == ""


def test_few_rows_need_no_line():
    assert run(MANY - 1, terminal=False) == ([], "")
    assert run(0, terminal=True)[0] == []


def test_the_bar_ends_with_an_error():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with pytest.raises(ValueError, match="x"), tokenising([1], "train", print, console):
        raise ValueError("x")
    assert console.file.getvalue().count("\x1b[?25h") == 1  # the cursor is back


def test_checking_counts_on_a_terminal_only():
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        with checking(iter(range(12_345)), "train.jsonl", console) as rows:
            assert sum(1 for _ in rows) == 12_345
        assert ("checking train.jsonl 12,345 rows" in console.file.getvalue()) is terminal
