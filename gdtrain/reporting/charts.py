"""Line charts over the iterations, as HTML: lines are inline SVG that takes any width, labels are text beside it.

The SVG is stretched to its box: its strokes do not scale, a dot is a stroke of no length with a round cap, and labels
stay as large as the text of the page on a phone and on a desk. Nothing here needs JavaScript; the values that the
page's read-out shows are in data attributes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gdtrain.reporting.escape import escape
from gdtrain.reporting.scales import Scale, choose, iterations, scientific
from gdtrain.reporting.thinning import Thinned, thin

SIDE = 1000  # of the viewBox, both ways
COLUMNS = 480  # drawn apart from each other; a chart is 300 to 1,000 pixels wide
_DOTS = 30  # up to so many points of a line are marked one by one


@dataclass(frozen=True)
class Line:
    """name: in the legend. colour: a, b or c of the page's. iterations: ascending, each with its value, None for a gap.
    dotted: its points are always marked."""

    name: str
    colour: str
    iterations: Sequence[int]
    values: Sequence[float | None]
    dotted: bool = False


@dataclass(frozen=True)
class Chart:
    """text: a value as the legend and the read-out have it, without a space. zero, log_from: those of `choose`. best: a
    point to mark, of the last line."""

    key: str
    title: str
    unit: str
    lines: Sequence[Line]
    text: Callable[[float], str]
    zero: bool = True
    log_from: float = float("inf")
    best: tuple[int, float] | None = None


def draw(chart: Chart, last: int, marks: Sequence[int] = ()) -> str:
    """A <figure>.

    Args:
        last: the iteration at the right end.
        marks: iterations at which a part of the run begins.
    """
    lines = [
        _Drawn(line, thin(line.iterations, line.values, last, COLUMNS), f"{chart.key}-{i}")
        for i, line in enumerate(chart.lines)
    ]
    values = [value for line in lines for _, value in line.valued]
    if not values:
        return f'<figure class="chart" id="{chart.key}">{_caption(chart, [])}<p class="none">no values yet</p></figure>'
    x, y = iterations(last), choose(values, zero=chart.zero, log_from=chart.log_from)
    notes = ["log scale"] * y.log + ["means, extremes faint"] * any(line.thinned.means for line in lines)
    rows = "".join(
        f'<span style="top:{100 - 100 * y.place(tick):.4g}%">{label}</span>'
        for tick, label in zip(y.ticks, y.labels(), strict=True)
    )
    columns = "".join(
        f'<span{_aligned(x.place(tick))} style="left:{100 * x.place(tick):.4g}%">{label}</span>'
        for tick, label in zip(x.ticks, x.labels(), strict=True)
    )
    drawn = "".join(_draw_line(line, chart.text, x, y) for line in lines)
    return (
        f'<figure class="chart" id="{chart.key}">{_caption(chart, lines, *notes)}'
        f'<div class="plot" data-last="{max(1, last)}"><div class="ys" aria-hidden="true">{rows}</div>'
        f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" role="img" aria-labelledby="{chart.key}-title">'
        f'<title id="{chart.key}-title">{escape(_summary(chart, lines))}</title>'
        f"{_grid(x, y, marks)}{drawn}{_draw_best(chart, x, y)}</svg>"
        f'<div class="over"></div><div class="xs" aria-hidden="true">{columns}</div></div></figure>'
    )


def readable(value: float) -> str:
    """Four digits: 7.571, 0.03755, 12,345, 1.84e-3."""
    if value != 0 and abs(value) < 0.01:
        return scientific(value, 4)
    if abs(value) >= 1e9:
        return scientific(value, 4)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}"


@dataclass(frozen=True)
class _Drawn:
    """output: the id of the element with its latest value."""

    line: Line
    thinned: Thinned
    output: str

    @property
    def valued(self) -> list[tuple[int, float]]:
        return [(n, value) for n, value in self.thinned.points if value is not None]


def _caption(chart: Chart, lines: Sequence[_Drawn], *notes: str) -> str:
    entries = "".join(
        f'<li class="{drawn.line.colour}"><i></i>{escape(drawn.line.name)} '
        f'<b id="{drawn.output}">{escape(chart.text(drawn.valued[-1][1]) if drawn.valued else "none")}</b></li>'
        for drawn in lines
    )
    if chart.best is not None:
        n, value = chart.best
        entries += (
            f'<li class="best {chart.lines[-1].colour}"><i></i>best <b>{escape(chart.text(value))}</b> at {n:,}</li>'
        )
    small = ", ".join(filter(None, (chart.unit, *notes)))
    return (
        f"<figcaption><h3>{escape(chart.title)}{f' <small>{escape(small)}</small>' if small else ''}</h3>"
        f'<ul class="legend">{entries}</ul><output class="at" aria-hidden="true"></output></figcaption>'
    )


def _summary(chart: Chart, lines: Sequence[_Drawn]) -> str:
    """For those who do not see it."""
    parts = []
    for drawn in lines:
        if drawn.valued:
            (n, first), (m, latest) = drawn.valued[0], drawn.valued[-1]
            parts.append(f"{drawn.line.name} {chart.text(first)} at iteration {n:,}, {chart.text(latest)} at {m:,}")
    return f"{chart.title} over iterations: {'; '.join(parts)}"


def _grid(x: Scale, y: Scale, marks: Sequence[int]) -> str:
    rows = "".join(f"M0 {SIDE - round(SIDE * y.place(tick))}H{SIDE}" for tick in y.ticks)
    columns = "".join(f"M{round(SIDE * x.place(mark))} 0V{SIDE}" for mark in marks)
    return f'<path class="grid" d="{rows}"/>' + (f'<path class="mark" d="{columns}"/>' if columns else "")


def _draw_line(drawn: _Drawn, text: Callable[[float], str], x: Scale, y: Scale) -> str:
    pieces: list[list[str]] = [[]]
    for n, value in drawn.thinned.points:
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append(_at(x.place(n), y.place(value)))
    pieces = [piece for piece in pieces if piece]
    if not pieces:
        return ""
    colour, valued, means = drawn.line.colour, drawn.valued, drawn.thinned.means
    path = "".join(f"M{piece[0]}" + ("L" + " ".join(piece[1:]) if piece[1:] else "h0") for piece in pieces)
    data = f'data-x="{" ".join(str(n) for n, _ in valued)}" data-y="{" ".join(text(value) for _, value in valued)}"'
    behind = " behind" if means else ""
    paths = f'<path class="line {colour}{behind}" data-out="{drawn.output}" {data} d="{path}"/>'
    if means:
        paths += f'<path class="line {colour}" d="M{" ".join(_at(x.place(n), y.place(mean)) for n, mean in means)}"/>'
    elif drawn.line.dotted or len(valued) <= _DOTS:
        dots = "".join(f"M{point}h0" for piece in pieces for point in piece)
        paths += f'<path class="dots {colour}" d="{dots}"/>'
    return paths


def _draw_best(chart: Chart, x: Scale, y: Scale) -> str:
    if chart.best is None:
        return ""
    n, value = chart.best
    dot = f"M{_at(x.place(n), y.place(value))}h0"
    return f'<path class="ring {chart.lines[-1].colour}" d="{dot}"/><path class="hole" d="{dot}"/>'


def _at(x: float, y: float) -> str:
    return f"{round(SIDE * x)} {SIDE - round(SIDE * y)}"


def _aligned(place: float) -> str:
    """A label at an end of the axis stays within the chart."""
    return ' class="first"' if place < 0.05 else ' class="last"' if place > 0.95 else ""
