"""Time and memory over T as a picture; matplotlib is an optional extra."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from gdtrain.bench.rows import Row
from gdtrain.errors import UserError

_SUFFIXES = (".svg", ".png")
_PANELS = (("forward_backward_ms", "forward + backward, ms"), ("peak_memory_gb", "peak memory, GB"))


def check_plot(file: Path) -> None:
    """Before anything is measured; raises UserError."""
    if file.suffix not in _SUFFIXES:
        raise UserError(f"--plot: {file}; accepted: a name that ends in {' or '.join(_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError('--plot needs matplotlib, which is not installed: pip install "gdtrain[plot]"')


def plot(rows: Sequence[Row], file: Path) -> None:
    """Two panels for every shape and B, a line for every backend; rows that were not measured are left out."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    groups = list(dict.fromkeys((row.shape, row.batch) for row in rows))
    backends = list(dict.fromkeys(row.backend for row in rows))
    figure = Figure(figsize=(10, 3.6 * len(groups)), layout="constrained")
    grid = figure.subplots(len(groups), len(_PANELS), squeeze=False)
    for (shape, B), axes in zip(groups, grid, strict=True):
        for axis, (key, label) in zip(axes, _PANELS, strict=True):
            for i, backend in enumerate(backends):
                of = [row for row in rows if (row.shape, row.batch, row.backend) == (shape, B, backend)]
                points = sorted((row.tokens, getattr(row, key)) for row in of if getattr(row, key) is not None)
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", color=f"C{i}", label=backend)
            axis.set(title=f"{shape}, B = {B}", xlabel="T", ylabel=label, xscale="log", yscale="log")
            ticks = sorted({row.tokens for row in rows if (row.shape, row.batch) == (shape, B)})
            axis.set_xticks(ticks, list(map(str, ticks)))
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            if axis.lines:
                axis.legend()
    try:
        figure.savefig(file)
    except OSError as error:
        raise UserError(f"--plot: {file} cannot be written: {error.strerror}") from error
