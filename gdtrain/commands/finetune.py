"""gdtrain finetune: from a config to a run directory. Faults are found in the order of their cost: in the config, the
data, the model; only then is anything written."""

from contextlib import ExitStack
from pathlib import Path

from gdtrain.config import RunConfig
from gdtrain.config_file import dump_yaml, load_config
from gdtrain.data.stdlib import STDLIB
from gdtrain.errors import UserError
from gdtrain.evaluation import evaluate_split
from gdtrain.memory import limits_in_effect, set_limits
from gdtrain.model.adapter import load_adapter
from gdtrain.model.load import find_model
from gdtrain.model.tiny_path import TINY
from gdtrain.reporting.console import RunConsole
from gdtrain.reporting.header import describe, header_lines
from gdtrain.run_directory import make_run_directory, run_directory
from gdtrain.run_lock import run_lock
from gdtrain.session import Session, adapt_as, open_data, open_session
from gdtrain.training.dry_step import dry_step
from gdtrain.training.fingerprint import take_fingerprint
from gdtrain.training.forecast import forecast
from gdtrain.training.loop import train
from gdtrain.training.resume import check_contents, check_resumable, find_resume, resumed_lines
from gdtrain.training.run_plan import check_places, notes, plan_run
from gdtrain.training.step import build_step, compile_policy


def run_finetune(config_file: Path, overrides: list[str], *, resume: bool = False, dry_run: bool = False) -> None:
    """Train, or with dry_run try one step and write nothing; raises UserError, TrainingStopped or Interrupted, which
    are for cli.py."""
    console = RunConsole()
    config = load_config(config_file, overrides)
    folder = run_directory(config.adapter_path)
    if resume and (dry_run or not config.train):
        raise UserError("--resume goes on with a run; accepted: train: true, and no --dry-run")
    if dry_run and not config.train:
        raise UserError("--dry-run tries a training step, and train: false leaves none; accepted: train: true")
    check_places(config, resume=resume)
    console.line("# resolved config\n" + dump_yaml(with_absolute_paths(config)))
    limits = set_limits(config.memory_limit_gb, config.cache_limit_gb, config.wired_limit_gb)
    for note in (*limits, *notes(config, resume=resume)):
        console.line(f"note: {note}")

    if config.train:
        session = _train(config, folder, console, resume=resume, dry_run=dry_run)
    else:  # as in mlx-lm: the test loss of the adapter in adapter_path
        session = open_session(config, open_data(config, ["test"], console.line), console.line)
        load_adapter(session.model, folder)
    if config.test and not dry_run:
        _test(session, console)


def _train(config: RunConfig, folder: Path, console: RunConsole, *, resume: bool, dry_run: bool) -> Session:
    with ExitStack() as stack:
        checkpoint = None
        if resume:  # locked before it is looked at: another run may be about to end
            check_resumable(folder)
            stack.enter_context(run_lock(folder, console.line))
            checkpoint = find_resume(folder, config, console.line)
        data = open_data(config, ["train", "valid", *(["test"] if config.test else [])], console.line)
        batches, iterations = plan_run(config, data, console.line)
        session = open_session(config, data, console.line)
        fingerprint = take_fingerprint(session, find_model(config.model).folder)
        if checkpoint is not None:
            check_contents(checkpoint, fingerprint, iterations)
        adaptation = adapt_as(config, session.model, load_file=checkpoint is None)
        for note in adaptation.notes:
            console.line(note)
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
        if checkpoint is None:
            stack.enter_context(run_lock(folder, console.line))
        if moved := make_run_directory(folder, dump_yaml(with_absolute_paths(config)), resume=resume):
            console.line(f"{folder} held an earlier run or adapter; it is now in {moved}")
        if checkpoint is not None:
            for line in resumed_lines(checkpoint, fingerprint, iterations):
                console.line(line)
        train(
            session,
            adaptation,
            batches,
            step,
            iterations=iterations,
            header=header | tried.record(),
            fingerprint=fingerprint,
            resume=checkpoint,
            console=console,
        )
    console.line(f"saved: {folder}")
    return session


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Paths of what is read made absolute, so that the saved config finds it from every directory."""
    named = {key: getattr(config, key) for key in ("model", "data", "resume_adapter_file")}
    paths = {key: Path(name).expanduser() for key, name in named.items() if name and name not in (TINY, STDLIB)}
    return config.model_copy(update={key: str(path.resolve()) for key, path in paths.items() if path.exists()})


def _test(session: Session, console: RunConsole) -> None:
    result = evaluate_split(session, "test", session.config.test_batches)
    console.line(f"test loss {result.loss:.3f}, perplexity {result.perplexity:.2f}, {result.rows:,} rows")
