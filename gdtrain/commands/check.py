"""gdtrain check: what a run would learn from, before any weights are read. It says what gdtrain finetune says, and
refuses what that refuses."""

from pathlib import Path

import numpy as np
from rich.text import Text

from gdtrain.config_file import load_config
from gdtrain.data.sources import SPLITS
from gdtrain.memory import set_limits
from gdtrain.reporting.console import RunConsole
from gdtrain.reporting.histogram import histogram
from gdtrain.reporting.samples import STYLE, choose_marks, coloured, encodable, marked, spread, stretches
from gdtrain.session import Data, open_data
from gdtrain.training.run_plan import check_places, notes, plan_run


def run_check(config_file: Path, overrides: list[str], *, show: int) -> None:
    """Check all splits and print; raises UserError, which is for cli.py.

    show: how many samples of the split that the run learns from, or is tested on, are shown.
    """
    console = RunConsole()
    config = load_config(config_file, overrides)
    check_places(config)
    limits = set_limits(config.memory_limit_gb, config.cache_limit_gb, config.wired_limit_gb)
    for note in (*limits, *notes(config)):
        console.line(f"note: {note}")
    needed = "train" if config.train else "test"
    data = open_data(config, [needed, *(split for split in SPLITS if split != needed)], console.line)
    if config.train:
        _, iterations = plan_run(config, data, console.line)
        console.line(f"iterations: {iterations:,}")
    for split in SPLITS:
        if data.samples[split]:
            _show_lengths(data, split, config.max_seq_length, console)
    if show:
        _show_samples(data, needed, show, console)


def _show_lengths(data: Data, split: str, max_seq_length: int, console: RunConsole) -> None:
    lengths = np.array([len(sample.ids) for sample in data.samples[split]])
    console.line(
        f"\n{split}: tokens in a row: {lengths.min():,} to {lengths.max():,}, median {np.median(lengths):,.0f}"
        f" (max_seq_length {max_seq_length:,}), and how many rows"
    )
    for line in histogram(lengths.tolist()):
        console.line(line)


def _show_samples(data: Data, split: str, show: int, console: RunConsole) -> None:
    """Coloured where the console has colours, else between marks and character for character."""
    samples = data.samples[split]
    chosen = [samples[i] for i in spread(len(samples), show)]
    texts = [stretches(sample, data.tokenizer) for sample in chosen]
    has_colours = console.console.color_system is not None and not console.console.no_color
    encoding = console.console.encoding
    marks = ("", "") if has_colours else choose_marks(texts, encoding)
    order = ", evenly from the first to the last" if 1 < len(chosen) < len(samples) else ""
    console.line(f"\nsamples of {split}: {len(chosen):,} of {len(samples):,}{order}")
    if has_colours:
        legend = Text.assemble("supervised tokens are ", ("coloured", STYLE), ", their newlines ", ("↵", STYLE))
        console.console.print(legend)
    else:
        console.line(f"supervised tokens stand between {marks[0]} and {marks[1]}, which the samples do not contain")
    for sample, text in zip(chosen, texts, strict=True):
        console.line(f"\n--- {sample.where}: {len(sample.ids):,} tokens, {sample.supervised.sum():,} supervised")
        if has_colours:
            console.console.print(coloured(text), soft_wrap=True)
        else:
            console.console.file.write(encodable(marked(text, marks), encoding) + "\n")
