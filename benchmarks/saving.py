"""What share of a run goes into its files: checkpoints, adapters, metrics.jsonl and report.html.

    python benchmarks/saving.py --json benchmarks/saving-cpu.json
    python benchmarks/saving.py configs/quickstart.yaml --set save_every=10

Runs `gdtrain finetune` on a config into a temporary directory, with a clock around everything that writes: flushing to
the disk and reading weights back included. seconds: of the training loop, from the first record to the last file.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gdtrain.bench.machine import describe_machine
from gdtrain.commands import finetune
from gdtrain.reporting.header import device_name
from gdtrain.reporting.metrics import MetricsFile
from gdtrain.reporting.report_file import LiveReport
from gdtrain.training import run_files

Spent = defaultdict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/quickstart.yaml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of gdtrain finetune")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spent = measure(args.config, [*args.set, f"adapter_path={folder}/run"])
    (total,) = spent.pop("training")
    # A record hands itself to the page, whose time is taken out of it; the last page is written after all records.
    seconds = {name: sum(times) for name, times in spent.items()}
    seconds["records"] -= seconds["page"]
    report = {
        "what": "seconds of a run that go into its files",
        **describe_machine(device_name()),
        "config": str(args.config),
        "set": args.set,
        "seconds": total,
        "writes": {name: len(times) for name, times in spent.items()},
        "write_seconds": seconds,
        "share": sum(seconds.values()) / total,
    }
    text = json.dumps(report, indent=2) + "\n"
    print(text, end="")
    if args.json:
        args.json.write_text(text, encoding="utf-8")


def measure(config: Path, overrides: list[str]) -> Spent:
    """Seconds of each write by kind, and of the loop under "training"."""
    spent: Spent = defaultdict(list)
    places: list[tuple[Any, str, str]] = [
        (finetune, "train", "training"),
        (run_files, "save_checkpoint", "checkpoints"),
        (run_files, "save_adapter", "adapter"),
        (run_files, "write_folder", "best"),
        (MetricsFile, "write", "records"),
        (LiveReport, "log", "page"),
        (LiveReport, "close", "last page"),
    ]
    real = [(place, name, getattr(place, name)) for place, name, _ in places]
    for place, name, kind in places:
        setattr(place, name, clocked(getattr(place, name), spent[kind]))
    try:
        finetune.run_finetune(config, overrides)
    finally:
        for place, name, function in real:
            setattr(place, name, function)
    return spent


def clocked(function: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **keys: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **keys)
        finally:
            times.append(time.perf_counter() - start)

    return call


if __name__ == "__main__":
    main()
