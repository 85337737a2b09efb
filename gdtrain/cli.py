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
    debug: Debug = False,
) -> None:
    """Train, and log validation loss and peak memory.

    Example: gdtrain finetune configs/quickstart.yaml --set iters=50
    """
    with _interruptible():
        from gdtrain.commands.finetune import run_finetune

        run_finetune(config, overrides or [])


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
