"""The command line: arguments in, one call, tables out. Heavy imports happen inside the commands."""

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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Try one step on the longest batch, print a forecast, write nothing.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Train, and log validation loss and peak memory.

    Example: gdtrain finetune configs/quickstart.yaml --set iters=50
    """
    with _interruptible():
        from gdtrain.commands.finetune import run_finetune

        run_finetune(config, overrides or [], dry_run=dry_run)


@app.command("eval")
def evaluate(
    target: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CONFIG", help="A run directory or a YAML config.", show_default=False)
    ],
    checkpoint: Annotated[str, typer.Option(help="last, best or an iteration.")] = "last",
    split: Annotated[str, typer.Option(help="valid, test or train.")] = "valid",
    no_adapter: Annotated[bool, typer.Option("--no-adapter", help="Evaluate the base model.")] = False,
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
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(str(error) or "interrupted") from error


def _fail(error: BaseException, code: int, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exception(error)
    print(f"gdtrain: {error}", file=sys.stderr)
    sys.exit(code)
