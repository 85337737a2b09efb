"""gdtrain report: the page of a run, anew."""

from pathlib import Path

from rich.console import Console

from gdtrain.errors import UserError
from gdtrain.reporting.report_file import write_report
from gdtrain.run_directory import METRICS_FILE
from gdtrain.run_lock import check_unlocked


def run_report(run: Path) -> None:
    """Write RUN/report.html and print its path.

    Raises:
        UserError: there is no such run directory, no metrics in it, or the page cannot be written.
    """
    if not run.is_dir():
        raise UserError(
            f"{run}: {'not a directory' if run.exists() else 'no such directory'}; accepted: a run directory"
        )
    if not (run / METRICS_FILE).is_file():
        raise UserError(f"{run} has no {METRICS_FILE}; accepted: the adapter_path of a run that has begun to train")
    console = Console(highlight=False)
    console.print(str(write_report(run, running=_goes_on(run))), markup=False, soft_wrap=True)


def _goes_on(run: Path) -> bool:
    try:
        check_unlocked(run)
    except UserError:
        return True
    return False
