"""The command line: arguments in, one call, tables out. Heavy imports happen inside the commands."""

import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from gdtrain.errors import Interrupted, TrainingStopped, UserError

app = typer.Typer(
    help="Fine-tune Qwen3.5 and Qwen3-Next models (Gated DeltaNet hybrids) with LoRA on MLX.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. --set lora_parameters.rank=16."),
]


@app.command()
def finetune(
    config: Annotated[Path, typer.Argument(help="YAML config of the run.", show_default=False)],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in adapter_path.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Try one step on the longest batch, print a forecast, write nothing.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Train, and log validation loss and peak memory.

    Example: gdtrain finetune quickstart --set iters=50
    """
    with _interruptible():
        from gdtrain.commands.finetune import run_finetune

        run_finetune(config, overrides or [], resume=resume, dry_run=dry_run)


@app.command("eval")
def evaluate(
    target: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CONFIG", help="A run directory or a YAML config.", show_default=False)
    ],
    checkpoint: Annotated[str, typer.Option(help="last, best or an iteration.")] = "last",
    split: Annotated[str, typer.Option(help="valid, test or train.")] = "valid",
    no_adapter: Annotated[bool, typer.Option("--no-adapter", help="Evaluate the base model.")] = False,
    compare_base: Annotated[
        bool, typer.Option("--compare-base", help="Evaluate the base model too, and compare row by row.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file as well.")] = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Loss, perplexity, speed and peak memory of a run on one split.

    valid and test take as many batches as val_batches and test_batches say, train takes all rows.

    Example: gdtrain eval runs/quickstart --split test
    """
    with _interruptible():
        from gdtrain.commands.evaluate import run_evaluate

        run_evaluate(
            target,
            checkpoint=checkpoint,
            split=split,
            no_adapter=no_adapter,
            compare_base=compare_base,
            json_file=json_file,
            overrides=overrides or [],
        )


@app.command("bench-shapes")
def bench_shapes(
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|Hk,Hv,Dk,Dv", help="A model or table by name, or sizes; may be repeated."),
    ] = None,
    tokens: Annotated[str | None, typer.Option(metavar="T,T,...", help="Row lengths; else those of the name.")] = None,
    batch: Annotated[str | None, typer.Option(metavar="B,B,...", help="Batch sizes; else those of the name.")] = None,
    backend: Annotated[
        str,
        typer.Option(metavar="all|NAME,...", help="Backends; loop is mlx-lm's own, which all takes as well."),
    ] = "all",
    dtype: Annotated[str, typer.Option(help="Of the activations: bfloat16, float16 or float32.")] = "bfloat16",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file as well.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw time and memory over T into this .svg or .png.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Timed runs; else 20 on a GPU and 5 on a CPU, fewer where one takes seconds.")
    ] = None,
    budget_gb: Annotated[
        float | None, typer.Option(help="Skip what needs more memory; else that of the device or machine.")
    ] = None,
    slow: Annotated[bool, typer.Option("--slow", help="Also run rows that take more than a minute.")] = False,
    debug: Debug = False,
) -> None:
    """Time, peak memory and error of every backend of the rule, and of mlx-lm's loop, on this machine.

    Without --shape: seed-9b, (16, 64, 192, 128) at T = 256 to 2048.

    Example: gdtrain bench-shapes --shape qwen3.5-9b --tokens 512,2048
    """
    with _interruptible():
        from gdtrain.commands.bench_shapes import run_bench_shapes

        run_bench_shapes(
            shape or ["seed-9b"],
            tokens=tokens,
            batch=batch,
            backend=backend,
            dtype=dtype,
            json_file=json_file,
            plot_file=plot_file,
            repeats=repeats,
            budget_gb=budget_gb,
            slow=slow,
        )


@app.command()
def init(
    model: Annotated[str, typer.Argument(help="Folder of the model, its id on the Hub, or tiny.", show_default=False)],
    output: Annotated[Path, typer.Option(help="The new config.")] = Path("config.yaml"),
    data: Annotated[str, typer.Option(help="Folder of the rows, which need not be there yet.")] = "data",
    budget_gb: Annotated[float | None, typer.Option(help="Memory to fill; else that of the device or machine.")] = None,
    debug: Debug = False,
) -> None:
    """Write a commented config for a model, with rows as long and batches as large as this machine's memory holds.

    Example: gdtrain init Qwen/Qwen3.5-0.8B --output my.yaml
    """
    with _interruptible():
        from gdtrain.commands.init import run_init

        run_init(model, output, data=data, budget_gb=budget_gb)


@app.command()
def check(
    config: Annotated[Path, typer.Argument(help="YAML config of the run.", show_default=False)],
    show: Annotated[int, typer.Option(min=0, metavar="N", help="How many samples to show.")] = 3,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Check config and data without loading weights: counts, lengths, and samples with supervised tokens marked.

    Example: gdtrain check quickstart --show 5
    """
    with _interruptible():
        from gdtrain.commands.check import run_check

        run_check(config, overrides or [], show=show)


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(help="YAML config of a run.", show_default=False)],
    max_seq: Annotated[bool, typer.Option("--max-seq", help="Find the longest max_seq_length that fits.")] = False,
    max_batch: Annotated[bool, typer.Option("--max-batch", help="Find the largest batch_size that fits.")] = False,
    budget_gb: Annotated[
        float | None, typer.Option(help="GB of 1e9 bytes; else what the device or machine has.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the forecast to this file as well.")] = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Forecast the peak memory of a run from its model's config.json alone, by part.

    Nothing is loaded. The data need not exist, and the model may be a config.json or a folder with nothing else in it.

    --set kernel=fused plans for a GPU where there is none.

    Exit code 0 if the run fits the budget, tightly or not, and 1 if it will not fit.

    Example: gdtrain plan quickstart --max-seq
    """
    with _interruptible():
        from gdtrain.commands.plan import run_plan

        fits = run_plan(
            config,
            overrides or [],
            max_seq=max_seq,
            max_batch=max_batch,
            budget_gb=budget_gb,
            json_file=json_file,
        )
    if not fits:
        raise typer.Exit(1)


@app.command()
def generate(
    target: Annotated[
        str,
        typer.Argument(metavar="RUN_OR_MODEL", help="A run directory, or a model as in a config.", show_default=False),
    ],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What the user says; - is standard input.")] = "-",
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message before it.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Stop after so many.")] = 256,
    temp: Annotated[float, typer.Option(help="Temperature; 0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of the draws, where --temp is above 0.")] = None,
    no_adapter: Annotated[bool, typer.Option("--no-adapter", help="The base model of the run.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="The base model, then the adapter.")] = False,
    checkpoint: Annotated[str, typer.Option(help="last, best or an iteration.")] = "last",
    base: Annotated[str | None, typer.Option("--model", help="Base, if not the one that the run names.")] = None,
    enable_thinking: Annotated[
        bool | None,
        typer.Option("--enable-thinking/--no-thinking", help="Told to the chat template; else as in the run."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is, without the chat template.")] = False,
    debug: Debug = False,
) -> None:
    """Write text with a run's adapter, token by token.

    Figures go to standard error. Ctrl-C ends the text: exit code 130.

    Example: gdtrain generate runs/quickstart --prompt "def f(x): return x" --compare
    """
    with _interruptible():
        from gdtrain.commands.generate import run_generate

        run_generate(
            target,
            prompt=prompt,
            system=system,
            max_tokens=max_tokens,
            temp=temp,
            seed=seed,
            no_adapter=no_adapter,
            compare=compare,
            checkpoint=checkpoint,
            base=base,
            enable_thinking=enable_thinking,
            raw=raw,
        )


@app.command()
def fuse(
    run: Annotated[Path, typer.Argument(help="A run directory.", show_default=False)],
    output: Annotated[Path, typer.Option(help="Folder of the new model: new or empty.", show_default=False)],
    checkpoint: Annotated[str, typer.Option(help="last, best or an iteration.")] = "last",
    base: Annotated[str | None, typer.Option("--model", help="Base, if not the one that the run names.")] = None,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Write a quantised base unquantised, and lose nothing.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Merge a run's adapter into its base: a model of its own, in the base's layout.

    What the adapter does not touch (vision, multi-token prediction) is copied byte for byte.

    Example: gdtrain fuse runs/quickstart --output fused
    """
    with _interruptible():
        from gdtrain.commands.fuse import run_fuse

        run_fuse(run, output, checkpoint=checkpoint, base=base, dequantize=dequantize)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run directory.", show_default=False)],
    form: Annotated[str, typer.Option("--format", metavar="peft|mlx-lm", help="Library that is to load it.")],
    output: Annotated[Path, typer.Option(help="Folder of the adapter: new or empty.", show_default=False)],
    checkpoint: Annotated[str, typer.Option(help="last, best or an iteration.")] = "last",
    base: Annotated[
        str | None, typer.Option("--model", help="Base to name, if not the one that the run names.")
    ] = None,
    push_to: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload the folder to the Hugging Face Hub as well.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a run's adapter for Hugging Face peft, or for mlx-lm without the files of the run.

    Example: gdtrain export runs/quickstart --format peft --output adapter
    """
    with _interruptible():
        from gdtrain.commands.export import run_export

        run_export(run, output, form=form, checkpoint=checkpoint, base=base, push_to=push_to)


@app.command()
def doctor(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this file as well.")] = None,
    debug: Debug = False,
) -> None:
    """Show machine, versions and device, and test every backend of the rule on it, gradients included.

    Exit code 0 if the backend that a run would take is right, 2 if it is not.

    Example: gdtrain doctor --json doctor.json
    """
    with _interruptible():
        from gdtrain.commands.doctor import run_doctor

        run_doctor(json_file=json_file)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)],
    debug: Debug = False,
) -> None:
    """Write report.html of a run anew: loss, memory and speed over its iterations, on one page that needs no network.

    A run writes it itself as it goes.

    Example: gdtrain report runs/quickstart
    """
    with _interruptible():
        from gdtrain.commands.report import run_report

        run_report(run)


def main() -> NoReturn:
    """Run the command line; exit code 0, 2 (the user can mend it), 3 (the training stopped itself) or 130."""
    debug = "--debug" in sys.argv
    try:
        from gdtrain.versions import check_versions

        check_versions()
        app(standalone_mode=True)
    except UserError as error:
        _fail(error, 2, debug)
    except TrainingStopped as error:
        _fail(error, 3, debug)
    except Interrupted as error:
        _fail(error, 130, debug)
    sys.exit(0)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Within it SIGTERM is what Ctrl-C is, unless the process was started to ignore it."""
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(str(error) or "interrupted") from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt("terminated")


def _fail(error: BaseException, code: int, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exception(error)
    print(f"gdtrain: {error}", file=sys.stderr)
    sys.exit(code)
