"""Records of runs, as metrics.jsonl has them."""

import json
import math
from pathlib import Path
from typing import Any

Record = dict[str, Any]

CONFIG = "model: tiny\nlora_parameters:\n  rank: 8\n"


def header(kind: str = "header", **values: Any) -> Record:
    base = {
        "kind": kind,
        "iteration": 0,
        "gdtrain": "0.1.0",
        "mlx": "0.32.4",
        "mlx_lm": "0.32.2",
        "device": "gpu (Some Chip)",
        "model": "some/model",
        "kernel": "fused",
        "kernel_reason": "self-test 3e-7",
        "convolution": "kernel",
        "convolution_reason": "self-test 1e-7",
        "gdn_layers": 24,
        "gdn_layers_swapped": 24,
        "compiled": False,
        "compile_reason": "slower on this device",
        "fine_tune_type": "lora",
        "trainable_parameters": 60608,
        "total_parameters": 990560,
        "train_rows": 3588,
        "supervised_tokens": 51649,
        "iterations": 100,
        "memory_limit_gb": None,
        "longest_batch": [4, 127],
        "dry_step_seconds": 0.57,
        "dry_step_peak_memory_gb": 0.0371,
    }
    return base | values


def train(iteration: int, **values: Any) -> Record:
    base = {
        "kind": "train",
        "iteration": iteration,
        "loss": 1 + 2 * math.exp(-iteration / 30),
        "learning_rate": 1e-5 * min(1, iteration / 20),
        "grad_norm": 1.5,
        "supervised_tokens": 500,
        "tokens_per_second": 1800.0 + iteration % 7,
        "iterations_per_second": 2.5,
        "peak_memory_gb": 21.5,
        "active_memory_gb": 14.2,
        "cache_memory_gb": 3.1,
    }
    return base | values


def val(iteration: int, loss: float | None, **values: Any) -> Record:
    base = {"kind": "val", "iteration": iteration, "supervised_tokens": 1006, "seconds": 2.9, "peak_memory_gb": 21.5}
    return base | {"loss": loss} | values


def stop(iteration: int, reason: str) -> Record:
    return {"kind": "stop", "iteration": iteration, "reason": reason}


def run(reached: int = 100, *, iterations: int = 100) -> list[Record]:
    """A train record every 5 iterations, a validation every 20, the best at 60."""
    records = [header(iterations=iterations), val(0, 3.2)]
    for n in range(5, reached + 1, 5):
        records.append(train(n))
        if n % 20 == 0:
            records.append(val(n, 1.5 + abs(n - 60) / 50))
    return records


def long_run(iterations: int = 100_000) -> list[Record]:
    """A record for every iteration, with one outlier each way."""
    noise = [1 + 0.2 * math.sin(n * n) for n in range(iterations + 1)]
    records = [header(iterations=iterations)]
    for n in range(1, iterations + 1):
        loss = (0.05 + 3 * math.exp(-10 * n / iterations)) * noise[n]
        loss = {54_321: 7.77, 54_400: 0.0123}.get(n, loss)
        rates = {"tokens_per_second": 1800 * noise[n], "grad_norm": noise[n], "cache_memory_gb": 3 * noise[n]}
        records.append(train(n, loss=loss, **rates))
        if n % 100 == 0:
            records.append(val(n, 0.06 + 3 * math.exp(-10 * n / iterations)))
    return records


def write(folder: Path, records: list[Record], rest: bytes = b"") -> Path:
    """A run directory; rest: what comes after the last line."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_bytes(lines.encode() + rest)
    (folder / "config.yaml").write_text(CONFIG)
    return folder
