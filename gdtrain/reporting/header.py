"""What a run is: versions, device, kernel and counts, for the head of metrics.jsonl and for the console."""

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import get_total_parameters

from gdtrain.arrays import flat
from gdtrain.model.lora import Adaptation
from gdtrain.session import Session


def describe(session: Session, adaptation: Adaptation, compiled: bool, compile_reason: str) -> dict[str, Any]:
    """The header record of metrics.jsonl."""
    counts = session.data.counts["train"]
    return {
        "gdtrain": version("gdtrain"),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "device": device_name(),
        "model": session.config.model,
        "kernel": session.swapped.choice.backend,
        "kernel_reason": session.swapped.choice.reason,
        "convolution": session.swapped.convolution.backend,
        "convolution_reason": session.swapped.convolution.reason,
        "gdn_layers": session.swapped.expected,
        "gdn_layers_swapped": session.swapped.layers,
        "compiled": compiled,
        "compile_reason": compile_reason,
        "fine_tune_type": adaptation.fine_tune_type,
        "trainable_parameters": count_trainable(session.model),
        "total_parameters": get_total_parameters(session.model),
        "train_rows": counts.rows_kept,
        "supervised_tokens": counts.supervised_tokens,
    }


def header_lines(header: dict[str, Any]) -> Iterator[str]:
    """The same for a person."""
    h = header
    yield f"gdtrain {h['gdtrain']}, mlx {h['mlx']}, mlx-lm {h['mlx_lm']}, {h['device']}"
    yield f"model   {h['model']}: {h['gdn_layers_swapped']} of {h['gdn_layers']} GDN layers on the trainable path"
    yield f"kernel  {h['kernel']}: {h['kernel_reason']}"
    yield f"conv    {h['convolution']}: {h['convolution_reason']}"
    yield f"compile {'on' if h['compiled'] else 'off'}: {h['compile_reason']}"
    share = 100 * h["trainable_parameters"] / h["total_parameters"]
    yield (
        f"train   {h['fine_tune_type']}, {h['trainable_parameters']:,} of {h['total_parameters']:,} parameters "
        f"({share:.2f} %)"
    )


def device_name() -> str:
    """ "cpu" or "gpu", and the processor's name where MLX knows it."""
    kind = "cpu" if mx.default_device() == mx.cpu else "gpu"
    name = mx.device_info().get("device_name")
    return f"{kind} ({name})" if name else kind


def count_trainable(model: nn.Module) -> int:
    return sum(x.size for x in flat(model.trainable_parameters()).values())
