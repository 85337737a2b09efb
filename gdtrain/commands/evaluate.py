"""gdtrain eval: the loss of a run, or of the model of a config, on one split."""

from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
from rich.console import Console
from rich.progress import Progress

from gdtrain.comparison import Comparison
from gdtrain.config import RunConfig
from gdtrain.config_file import load_config, shipped_config
from gdtrain.data.sources import SPLITS
from gdtrain.errors import UserError
from gdtrain.evaluation import Evaluation, evaluate_split
from gdtrain.memory import set_limits
from gdtrain.model.adapter import ADAPTER_FILE, check_adapter_file, load_adapter
from gdtrain.model.swap import check_kernel
from gdtrain.output_file import check_output, finite, write_json
from gdtrain.run_directory import CONFIG_FILE, find_adapter, run_directory
from gdtrain.session import Session, open_data, open_session


def run_evaluate(
    target: Path,
    *,
    checkpoint: str,
    split: str,
    no_adapter: bool,
    compare_base: bool,
    json_file: Path | None,
    overrides: list[str],
) -> None:
    """Evaluate and print; raises UserError, which is for cli.py."""
    console = Console(highlight=False)
    if split not in SPLITS:
        raise UserError(f"--split: {split!r}; accepted: {', '.join(SPLITS)}")
    if no_adapter and (compare_base or checkpoint != "last"):
        raise UserError(f"--{'compare-base' if compare_base else 'checkpoint'} and --no-adapter exclude each other")
    check_output("--json", json_file)
    config, run = _open(target, overrides)
    check_kernel(config.kernel)
    adapter = None if no_adapter else find_adapter(run, checkpoint)
    if adapter is not None:
        check_adapter_file(adapter / ADAPTER_FILE)
    notes = set_limits(config.memory_limit_gb, config.cache_limit_gb, config.wired_limit_gb)
    data = open_data(config, [split], notes.append)
    session = open_session(config, data, notes.append)
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)

    base = _evaluate(session, split, console, "evaluating the base", one_by_one=True) if compare_base else None
    if adapter is not None:
        load_adapter(session.model, adapter)
    result = _evaluate(session, split, console, "evaluating", one_by_one=compare_base)
    figures = {
        "split": split,
        "adapter": None if adapter is None else str(adapter),
        "kernel": session.swapped.choice.backend,
        **{key: value for key, value in asdict(result).items() if key != "row_losses"},
        "rows_in_split": len(data.samples[split]),
        "perplexity": finite(result.perplexity),
        "peak_memory_gb": mx.get_peak_memory() / 1e9,
    }
    for name, value in figures.items():
        console.print(f"{name.replace('_', ' '):>18}  {_shown(value)}", markup=False, soft_wrap=True)
    if base is not None:
        comparison = Comparison(data.samples[split], base, result)
        for line in ("", *comparison.lines()):
            console.print(line, markup=False, soft_wrap=True)
        figures |= {"base_loss": base.loss, "base_perplexity": finite(base.perplexity), "records": comparison.records()}
    if json_file is not None:
        write_json("--json", json_file, figures)


def _evaluate(session: Session, split: str, console: Console, what: str, *, one_by_one: bool) -> Evaluation:
    config = session.config
    limit = {"valid": config.val_batches, "test": config.test_batches, "train": -1}[split]
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return evaluate_split(session, split, limit, one_by_one=one_by_one, progress=progress)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else "none" if value is None else str(value)


def _open(target: Path, overrides: list[str]) -> tuple[RunConfig, Path]:
    """The config, and the run directory that holds its adapter."""
    if not target.exists() and shipped_config(target) is None:
        raise UserError(f"{target} does not exist; accepted: a run directory or a YAML config")
    if not target.is_dir():
        config = load_config(target, overrides)
        return config, run_directory(config.adapter_path)
    if not (target / CONFIG_FILE).is_file():
        raise UserError(f"{target} is no run directory: it has no {CONFIG_FILE}")
    return load_config(target / CONFIG_FILE, overrides), target
