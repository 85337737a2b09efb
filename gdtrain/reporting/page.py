"""report.html: a run on one page that needs nothing else, neither network nor JavaScript."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from gdtrain.reporting.charts import Chart, Line, draw, readable
from gdtrain.reporting.escape import escape
from gdtrain.reporting.history import History, Part, Record, column, number, read_history
from gdtrain.reporting.page_style import POLICY, SCRIPT, STYLE

REFRESH_SECONDS = 30  # while the run goes on
_ROWS = 300  # of the table of validations; a page of 100,000 iterations stays below 300 KB


def render(records: Iterable[Record], config: str, *, name: str = "run", running: bool = True) -> str:
    """The page of a run.

    Args:
        records: of metrics.jsonl, in their order. What a header does not have is left out.
        config: the resolved config, shown as it is.
        name: of the run, the title.
        running: whether a run without an end is still going on; if not, the page says that it broke off.

    Returns:
        HTML. While the run goes on a browser reads it anew every REFRESH_SECONDS.
    """
    history = read_history(records)
    live = running and not history.ended
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">' if live else ""
    marks = [part.iteration for part in history.parts]
    charts = "".join(draw(chart, history.reached, marks) for chart in _charts(history))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{refresh}
<link rel="icon" href="data:,">
<title>{escape(name)}: {escape(_state(history, running))}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(name)}</h1>
{_status(history, running)}
{"".join(f'<p class="note">{escape(note)}</p>' for note in _notes(history))}
</header>
<main>
<section class="tiles" aria-label="Latest figures">{_tiles(history)}</section>
<section class="charts" aria-label="Charts">{charts}</section>
<div class="columns">
<section><h2>Validation</h2>{_table(history)}</section>
<section><h2>Run</h2>{_facts(history.header)}</section>
</div>
<section><h2>Config</h2><pre tabindex="0" aria-label="Config">{escape(config)}</pre></section>
</main>
<footer>Memory is in GB of 10<sup>9</sup> bytes. Peaks count from the start of training.</footer>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _charts(history: History) -> Iterator[Chart]:
    at = [record["iteration"] for record in history.train]

    def line(name: str, colour: str, key: str) -> Line:
        return Line(name, colour, at, column(history.train, key))

    loss = [line("train", "a", "loss")]
    if history.val:
        validated = [record["iteration"] for record in history.val]
        loss.append(Line("validation", "b", validated, column(history.val, "loss")))
    best = history.best
    marked = None if best is None else (best["iteration"], best["loss"])
    yield Chart("loss", "Loss", "", loss, readable, zero=False, log_from=10, best=marked)
    memory = [
        line(name, colour, f"{name}_memory_gb") for name, colour in (("peak", "a"), ("active", "b"), ("cache", "c"))
    ]
    yield Chart("memory", "Memory", "GB", memory, gigabytes)
    yield Chart("speed", "Tokens per second", "", [line("tokens/s", "a", "tokens_per_second")], readable)
    yield Chart("rate", "Learning rate", "", [line("rate", "a", "learning_rate")], readable)
    yield Chart("norm", "Gradient norm", "", [line("norm", "a", "grad_norm")], readable, log_from=50)


def gigabytes(value: float) -> str:
    """As on the console."""
    return f"{value:.{2 if value >= 1 else 3}f}"


def _state(history: History, running: bool) -> str:
    reached, planned = f"{history.reached:,}", "" if history.planned is None else f" of {history.planned:,}"
    if history.stop is not None:
        return f"stopped at iteration {reached}{planned}"
    if history.ended:
        return f"finished, {reached} iterations"
    return f"{'running' if running else 'broken off'}, {reached}{planned} iterations"


def _status(history: History, running: bool) -> str:
    kind = "stopped" if history.stop else "finished" if history.ended else "running" if running else "broken"
    text = f'<p class="status {kind}"><i></i>{escape(_state(history, running))}</p>'
    if history.stop is not None:
        text += f'<p class="reason">{escape(history.stop.get("reason") or "no reason was recorded")}</p>'
    elif kind == "broken":
        text += (
            '<p class="reason">The process ended without a word. '
            "<code>gdtrain finetune CONFIG --resume</code> goes on from its last checkpoint.</p>"
        )
    if history.planned:
        done = min(history.reached, history.planned)
        text += f'<progress max="{history.planned}" value="{done}" aria-label="Iterations">{done}</progress>'
    return text


def _notes(history: History) -> Iterator[str]:
    yield from map(_resumed, history.parts)
    for name, records in (("train", history.train), ("validation", history.val)):
        if lost := sum("loss" in record and number(record, "loss") is None for record in records):
            yield f"{lost:,} {name} {'loss is' if lost == 1 else 'losses are'} not finite and left out of the chart"


def _resumed(part: Part) -> str:
    text = f"resumed at iteration {part.iteration:,}"
    if part.replaced:
        text += f"; {part.replaced:,} {'record' if part.replaced == 1 else 'records'} after it no longer count"
    changes = (f"{key} {_plain(now)} instead of {_plain(before)}" for key, (before, now) in part.changes.items())
    return "; ".join([text, *changes])


def _tiles(history: History) -> str:
    def latest(key: str, records: list[Record]) -> str:
        found = (value for record in reversed(records) if (value := number(record, key)) is not None)
        return next(map(readable, found), "–")

    # A peak only ever grows within a part, but begins anew with the next.
    peaks = [p for records in (history.train, history.val) for p in column(records, "peak_memory_gb") if p is not None]
    tiles = [("Train loss", latest("loss", history.train))]
    if history.val:
        tiles.append(("Val loss", latest("loss", history.val)))
    tiles += [
        ("Peak memory", f"{gigabytes(max(peaks))} GB" if peaks else "–"),
        ("Tokens/s", latest("tokens_per_second", history.train)),
    ]
    return "".join(f"<div><span>{name}</span><strong>{value}</strong></div>" for name, value in tiles)


def _table(history: History) -> str:
    """Iter, Val loss, Peak mem, as on the console; of very many the first, the best and the newest."""
    if not history.val:
        return '<p class="none">none yet</p>'
    best, records = history.best, history.val
    kept = records if len(records) <= _ROWS else [records[0], *records[-_ROWS + 1 :]]
    if best is not None and best not in kept:
        kept = [kept[0], best, *kept[1:]]
    rows = "".join(_row(record, record is best) for record in kept)
    left = len(records) - len(kept)
    more = f'<p class="none">{left:,} rows are left out; metrics.jsonl has them</p>' if left else ""
    head = '<tr><th scope="col">Iter</th><th scope="col">Val loss</th><th scope="col">Peak mem</th></tr>'
    box = '<div class="box" tabindex="0" role="region" aria-label="Validations">'
    return f"{box}<table><thead>{head}</thead><tbody>{rows}</tbody></table></div>{more}"


def _row(record: Record, best: bool) -> str:
    loss, peak = number(record, "loss"), number(record, "peak_memory_gb")
    cells = (
        f"{record['iteration']:,}",
        ("<small>best</small> " if best else "") + ("not finite" if loss is None else f"{loss:.3f}"),
        "–" if peak is None else f"{gigabytes(peak)} GB",
    )
    return f"<tr{' class=best' if best else ''}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _facts(header: Record) -> str:
    """What the header says, all of it: what has no line of its own comes at the end under its key."""
    facts = list(_known(header))
    facts += [(key, _plain(value)) for key, value in header.items() if key not in _KNOWN and value is not None]
    if not facts:
        return '<p class="none">no header</p>'
    return "<dl>" + "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts) + "</dl>"


def _known(header: Record) -> Iterator[tuple[str, str]]:
    def joined(text: str, *keys: str) -> Iterator[str]:
        if all(header.get(key) is not None for key in keys):
            yield text.format(*(_plain(header[key]) for key in keys))

    def tried(text: Callable[[float], str], key: str) -> Iterator[str]:
        if (value := number(header, key)) is not None:
            yield text(value)

    lines = {
        "Model": joined("{}", "model"),
        "Device": joined("{}", "device"),
        "Versions": chain(joined("gdtrain {}", "gdtrain"), joined("mlx {}", "mlx"), joined("mlx-lm {}", "mlx_lm")),
        "Kernel": chain(joined("{}", "kernel"), joined("{}", "kernel_reason")),
        "Convolution": chain(joined("{}", "convolution"), joined("{}", "convolution_reason")),
        "Compiled": chain(joined("{}", "compiled"), joined("{}", "compile_reason")),
        "GDN layers": joined("{} of {} on the trainable path", "gdn_layers_swapped", "gdn_layers"),
        "Fine-tuning": joined("{}", "fine_tune_type"),
        "Parameters": chain(
            joined("{} trainable", "trainable_parameters"),
            joined("{} in all", "total_parameters"),
        ),
        "Rows": joined("{}", "train_rows"),
        "Supervised tokens": joined("{} in a pass over the rows", "supervised_tokens"),
        "Iterations": joined("{}", "iterations"),
        "Longest batch": chain(
            joined("{} positions", "longest_batch"),
            tried(lambda seconds: f"{seconds:.1f} s", "dry_step_seconds"),
            tried(lambda peak: f"peak {gigabytes(peak)} GB when tried before the run", "dry_step_peak_memory_gb"),
        ),
        "Limits": chain(*(joined(f"{key[:-3].replace('_', ' ')} {{}} GB", key) for key in _LIMITS)),
    }
    for name, texts in lines.items():
        if found := list(texts):
            separator = ": " if name in ("Kernel", "Convolution", "Compiled") else ", "
            yield name, separator.join(found)


_LIMITS = ("memory_limit_gb", "cache_limit_gb", "wired_limit_gb")
_KNOWN = {
    *("kind", "iteration", "model", "device", "gdtrain", "mlx", "mlx_lm", "kernel", "kernel_reason", "convolution"),
    *("convolution_reason", "compiled", "compile_reason", "gdn_layers", "gdn_layers_swapped", "fine_tune_type"),
    *("trainable_parameters", "total_parameters", "train_rows", "supervised_tokens", "iterations", "longest_batch"),
    *("dry_step_seconds", "dry_step_peak_memory_gb", *_LIMITS),
}


def _plain(value: Any) -> str:
    """A value of the header for a person."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:,.0f}" if value.is_integer() else readable(value)
    if isinstance(value, list):
        return " x ".join(map(_plain, value))
    return "unknown" if value is None else str(value)
