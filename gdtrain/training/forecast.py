"""What a run will be, told by `gdtrain finetune --dry-run` after its one step."""

import math
from collections.abc import Iterator

from gdtrain.config import RunConfig
from gdtrain.data.batches import RunBatches
from gdtrain.model.adapter import ADAPTER_FILE
from gdtrain.run_directory import CONFIG_FILE, METRICS_FILE, list_checkpoints, run_directory
from gdtrain.training.dry_step import DryStep


def forecast(config: RunConfig, batches: RunBatches, iterations: int, tried: DryStep) -> Iterator[str]:
    """Lines about the run that this config would be."""
    rows = len(batches.samples)
    used = sum(len(sample.ids) - 1 for sample in batches.samples)
    supervised = sum(int(sample.supervised[1:].sum()) for sample in batches.samples)
    yield f"data: {rows:,} rows, {used:,} positions, {supervised:,} supervised tokens"
    updates = math.ceil(iterations / config.grad_accumulation_steps)
    epochs = iterations / batches.per_epoch
    yield f"run: {iterations:,} iterations of {config.batch_size} rows, {updates:,} updates, {epochs:.2g} epochs"
    # Every epoch has the same positions, padding included; the mean batch has this share of the longest one's.
    share = used / (1 - batches.padding_share) / batches.per_epoch / (tried.rows * tried.positions)
    longest, likely = (duration(iterations * tried.seconds * part) for part in (1, min(share, 1)))
    yield f"estimate: {likely} if time goes with positions, {longest} if every batch took as long as the longest"
    yield "estimate without validation and saving; a first step may be slower than the others"
    folder = run_directory(config.adapter_path)
    if any((folder / name).exists() for name in (CONFIG_FILE, METRICS_FILE, ADAPTER_FILE)) or list_checkpoints(folder):
        yield f"{folder} holds an earlier run or adapter, which a run would move aside"
    yield "dry run: nothing is written"


def duration(seconds: float) -> str:
    """About so long, for a person: "12 s", "3 min", "2 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
