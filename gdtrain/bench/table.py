"""Rows as text: a table of all, and the two published tables with their own columns."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gdtrain.bench.rows import Row
from gdtrain.bench.shapes import BATCH_ROWS, LOOP, SEED_9B


class Table(NamedTuple):
    """A title, the heads of the columns, cells as text, and lines below them."""

    title: str
    heads: list[str]
    cells: list[list[str]]
    footnotes: Sequence[str] = ()


def tables(rows: Sequence[Row], mlx: str, metal: bool) -> Iterator[Table]:
    """The table of each shape, then those of the two presets that repeat a published one.

    Args:
        mlx: version; metal: whether the kernels run on Metal here.
    """
    for shape in dict.fromkeys(row.shape for row in rows):
        yield _all([row for row in rows if row.shape == shape])
    for shape, make in ((SEED_9B, _seed_9b), (BATCH_ROWS, _batch_rows)):
        if mine := [row for row in rows if row.shape == shape]:
            yield make(mine, mlx, "Metal VJP" if metal else "auto")


def plain(table: Table) -> Iterator[str]:
    """Lines of aligned text, for pipes and files: never wrapped."""
    yield table.title
    lines = [table.heads, *table.cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.heads))]
    for line in lines:
        yield "  ".join(
            cell.ljust(width) if is_text(head) else cell.rjust(width)
            for cell, width, head in zip(line, widths, table.heads, strict=True)
        ).rstrip()
    yield from table.footnotes


def is_text(head: str) -> bool:
    """Whether a column is of words (aligned left), not of numbers."""
    return head in ("backend", "path", "note", "MLX")


_HEADS = ["T", "B", "backend", "path", "fwd ms", "fwd+bwd ms", "n", "peak GB", "kB/token", "error", "vs loop", "note"]
_NOTE_WIDTH = 60  # longer ones, such as the reason of a refusal, go below the table, once


def _all(rows: Sequence[Row]) -> Table:
    first = rows[0]
    title = f"{first.shape}: Hk {first.Hk}, Hv {first.Hv}, Dk {first.Dk}, Dv {first.Dv}, {first.dtype}"
    long = [text for text in dict.fromkeys(row.note for row in rows) if len(text) > _NOTE_WIDTH]
    numbers = {text: f"({i})" for i, text in enumerate(long, start=1)}
    footnotes = [f"{number} {text}" for text, number in numbers.items()]
    return Table(title, _HEADS, [_cells(row, numbers.get(row.note, row.note)) for row in rows], footnotes)


def _cells(row: Row, note: str) -> list[str]:
    """The row; `note` is its note, or the number of the footnote that it is."""
    note = note if row.status == "ok" else f"{row.status}: {note}"
    return [
        str(row.tokens),
        str(row.batch),
        row.backend,
        f"{row.path} (auto)" if row.auto and row.backend != "auto" else row.path or "-",
        _ms(row.forward_ms),
        _ms(row.forward_backward_ms),
        "-" if row.repeats is None else str(row.repeats),
        _gb(row.peak_memory_gb),
        "-" if row.bytes_per_token is None else f"{row.bytes_per_token / 1e3:,.1f}",
        "-" if row.error is None else f"{row.error:.1e} {row.error_tensor}",
        "-" if row.speedup is None else f"{row.speedup:,.2f}x",
        note,
    ]


def _seed_9b(rows: Sequence[Row], mlx: str, kernel: str) -> Table:
    """T | use_kernel=False | Python VJP | Metal VJP | Peak mem: "Add Metal VJP kernel for gated_delta_update"."""
    path = _auto_path(rows)
    heads = ["T", "use_kernel=False (ops) fwd+bwd", "Python VJP (replay) fwd+bwd"]
    heads += [f"{kernel} ({path}) fwd+bwd", f"Peak mem ({kernel})"]
    cells = []
    for B, T in _sizes(rows):
        of = {name: _find(rows, B, T, name) for name in (LOOP, "replay", "auto")}
        peak = of["auto"].peak_memory_gb if of["auto"] else None
        cells.append([str(T), *(_time(row) for row in of.values()), "-" if peak is None else f"{peak:.2f} GB"])
    return Table("as in the table of the Metal VJP kernel for gated_delta_update", heads, cells)


def _batch_rows(rows: Sequence[Row], mlx: str, kernel: str) -> Table:
    """MLX | B | fixed branch: "wrong gated-delta grads for batch rows past the first"; the error would show it."""
    heads = ["MLX", "B", LOOP, "list + stack (replay)", f"{kernel} ({_auto_path(rows)})", "worst error of the three"]
    cells = []
    for B, T in _sizes(rows):
        three = [_find(rows, B, T, name) for name in (LOOP, "replay", "auto")]
        errors = [(row.error, row.error_tensor) for row in three if row and row.error is not None]
        worst = "{:.1e} {}".format(*max(errors)) if errors else "-"
        cells.append([mlx, str(B), *map(_time, three), worst])
    return Table("as in the table of the gradients of batch rows past the first", heads, cells)


def _sizes(rows: Sequence[Row]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((row.batch, row.tokens) for row in rows))


def _auto_path(rows: Sequence[Row]) -> str:
    return next((row.path for row in rows if row.auto), "not measured")


def _find(rows: Sequence[Row], B: int, T: int, name: str) -> Row | None:
    """The row of a path, or of whatever `auto` takes."""
    here = [row for row in rows if (row.batch, row.tokens) == (B, T)]
    return next((row for row in here if (row.auto if name == "auto" else row.path == name)), None)


def _time(row: Row | None) -> str:
    if row is None:
        return "-"
    return row.status if row.forward_backward_ms is None else f"{_ms(row.forward_backward_ms)} ms"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _gb(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value >= 1 else f"{value:.4f}"
