"""What a person sees of a run: the header, a progress bar on a terminal, and the table of validations."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gdtrain.model.lora import Target

_ROW = "{:>6} | {:>8} | {:>9}"


class RunConsole:
    """Prints a run. On a terminal with a progress bar below the table, elsewhere with a line for every train report."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._progress: Progress | None = None
        self._rows = 0

    def line(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def targets(self, targets: list[Target]) -> None:
        """One row per adapted projection, or in full fine-tuning per parameter of a block; shapes are (out, in)."""
        table = Table("trained in each block", "blocks", "shape", "parameters", box=None, pad_edge=False)
        table.columns[0].overflow = "fold"
        for column in table.columns[1:]:
            column.justify = "right"
        for target in targets:
            shape = "x".join(map(str, target.shape))
            table.add_row(target.name, f"{target.blocks}", shape, f"{target.parameters:,}")
        self.console.print(table)

    @contextmanager
    def training(self, iterations: int, done: int) -> Iterator[None]:
        """Show the progress bar while the context is open. done: iterations of before, of a resumed run."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        with self._progress:
            self._train = self._progress.add_task("training", total=iterations, completed=done)
            self._validation = self._progress.add_task("validating", visible=False)
            yield

    def advance(self, iteration: int) -> None:
        if self._progress:
            self._progress.update(self._train, completed=iteration)

    def validating(self, done: int, total: int) -> None:
        if self._progress:
            self._progress.update(self._validation, completed=done, total=total, visible=done < total)

    def train_report(self, iteration: int, loss: float, tokens_per_second: float) -> None:
        text = f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s"
        if self._progress and self.console.is_terminal:
            self._progress.update(self._train, description=text)
        else:
            self.line(f"iteration {iteration}: train {text}")

    def validation(self, iteration: int, loss: float, peak_gb: float) -> None:
        """A row of the table; the head comes with the first."""
        if not self._rows:
            self.line(_ROW.format("Iter", "Val loss", "Peak mem"))
        self._rows += 1
        self.line(_ROW.format(iteration, f"{loss:.3f}", f"{peak_gb:.{2 if peak_gb >= 1 else 3}f} GB"))
