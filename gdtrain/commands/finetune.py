"""gdtrain finetune: from a config to a run directory. Faults are found in the order of their cost: in the config, the
data, the model; only then is anything written."""

from pathlib import Path

from gdtrain.config import RunConfig
from gdtrain.config_file import dump_yaml, load_config
from gdtrain.data.stdlib import STDLIB
from gdtrain.errors import UserError
from gdtrain.evaluation import evaluate
from gdtrain.memory import limits_in_effect, set_limits
from gdtrain.model.adapter import ADAPTER_FILE, check_adapter_file, load_adapter
from gdtrain.model.swap import check_kernel
from gdtrain.model.tiny_path import TINY
from gdtrain.reporting.console import RunConsole
from gdtrain.reporting.header import describe, header_lines
from gdtrain.session import Session, adapt_as, open_data, open_session
from gdtrain.training.dry_step import dry_step
from gdtrain.training.forecast import forecast
from gdtrain.training.loop import train
from gdtrain.training.run_directory import check_run_directory, make_run_directory, run_directory
from gdtrain.training.run_plan import notes, plan_run
from gdtrain.training.step import build_step, compile_policy


def run_finetune(config_file: Path, overrides: list[str], *, dry_run: bool = False) -> None:
    """Train, or with dry_run try one step and write nothing; raises UserError, TrainingStopped or Interrupted, which
    are for cli.py."""
    console = RunConsole()
    config = load_config(config_file, overrides)
    folder = run_directory(config.adapter_path)
    check_kernel(config.kernel)
    if config.train:
        check_run_directory(folder)
        if config.resume_adapter_file is not None:
            check_adapter_file(Path(config.resume_adapter_file).expanduser())
    elif dry_run:
        raise UserError("--dry-run tries a training step, and train: false leaves none; accepted: train: true")
    elif config.test:
        check_adapter_file(folder / ADAPTER_FILE)
    else:
        raise UserError("train: false and test: false leave nothing to do")
    console.line("# resolved config\n" + dump_yaml(with_absolute_paths(config)))
    limits = set_limits(config.memory_limit_gb, config.cache_limit_gb, config.wired_limit_gb)
    for note in (*limits, *notes(config)):
        console.line(f"note: {note}")

    if config.train:
        session = _train(config, folder, console, dry_run)
    else:  # as in mlx-lm: the test loss of the adapter in adapter_path
        session = open_session(config, open_data(config, ["test"], console.line))
        load_adapter(session.model, folder)
    if config.test and not dry_run:
        _test(session, console)


def _train(config: RunConfig, folder: Path, console: RunConsole, dry_run: bool) -> Session:
    data = open_data(config, ["train", "valid", *(["test"] if config.test else [])], console.line)
    batches, iterations = plan_run(config, data, console.line)
    session = open_session(config, data)
    adaptation = adapt_as(config, session.model)
    policy = compile_policy(config.compile)
    limits = limits_in_effect(config.memory_limit_gb, config.cache_limit_gb, config.wired_limit_gb)
    header = describe(session, adaptation, policy.compiled, policy.reason) | {"iterations": iterations} | limits
    console.line("")
    for line in header_lines(header):
        console.line(line)
    if shown := [f"{key} {gb:g}" for key, gb in limits.items() if gb is not None]:
        console.line(f"limits  {', '.join(shown)}")
    console.targets(adaptation.targets)
    console.line("")

    step = build_step(session.model, compiled=policy.compiled)
    tried = dry_step(session, step, batches.collate(batches.longest(iterations)))
    console.line(tried.line())
    if dry_run:
        for line in forecast(config, batches, iterations, tried):
            console.line(line)
        return session
    if moved := make_run_directory(folder, dump_yaml(with_absolute_paths(config))):
        console.line(f"{folder} held an earlier run or adapter; it is now in {moved}")
    header |= tried.record()
    train(session, adaptation, batches, step, iterations=iterations, header=header, console=console)
    console.line(f"saved: {folder}")
    return session


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Local paths made absolute, so that the saved config means the same from every directory."""
    named = {key: getattr(config, key) for key in ("model", "data", "resume_adapter_file")}
    paths = {key: Path(name).expanduser() for key, name in named.items() if name and name not in (TINY, STDLIB)}
    return config.model_copy(update={key: str(path.resolve()) for key, path in paths.items() if path.exists()})


def _test(session: Session, console: RunConsole) -> None:
    config = session.config
    result = evaluate(
        session.model,
        session.data.samples["test"],
        batch_size=config.batch_size,
        max_seq_length=config.max_seq_length,
        batches=config.test_batches,
        cache_threshold=config.clear_cache_threshold,
    )
    console.line(f"test loss {result.loss:.3f}, perplexity {result.perplexity:.2f}, {result.rows:,} rows")
