"""How far reading and tokenising are: a bar on a terminal, elsewhere one line when many rows are done."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

MANY = 10_000  # Rows; fewer take some seconds at most.
Item = TypeVar("Item")
Item_co = TypeVar("Item_co", covariant=True)


class Rows(Protocol[Item_co]):
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Item_co]: ...


@contextmanager
def tokenising(
    rows: Rows[Item], split: str, say: Callable[[str], None], console: Console | None = None
) -> Iterator[Iterable[Item]]:
    """The rows, to be gone through once while the context is open; the bar is gone when it closes."""
    console = console or Console(stderr=True)
    began = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (len(rows) and console.is_terminal)) as bar:
        task = bar.add_task(f"tokenising {split}", total=len(rows))
        yield _counted(rows, lambda done: bar.update(task, completed=done))
    if len(rows) >= MANY and not console.is_terminal:
        say(f"{split}: {len(rows):,} rows tokenised in {time.perf_counter() - began:.0f} s")


@contextmanager
def checking(rows: Iterable[Item], name: str, console: Console | None = None) -> Iterator[Iterable[Item]]:
    """The same for rows that are being read for the first time, so that nobody knows how many there are."""
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), TextColumn("{task.completed:,.0f} rows"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"checking {name}", total=None)
        yield _counted(rows, lambda done: bar.update(task, completed=done))


def _counted(rows: Iterable[Item], done: Callable[[int], None]) -> Iterator[Item]:
    number = 0
    for number, row in enumerate(rows, start=1):
        yield row
        if number % 100 == 0:
            done(number)
    done(number)
