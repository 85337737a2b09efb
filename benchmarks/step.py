"""Where a training step's time and memory go: the whole step, and each of its parts alone, on random weights.

    python benchmarks/step.py --tokens 2048,4096 --json benchmarks/step-h200.json
    python benchmarks/step.py --shape mini --tokens 512 --dtype float32

The model is a Qwen3.5 of the shape asked for, LoRA of rank 8 on q_proj, v_proj, in_proj_qkv and out_proj, with
gradient checkpointing, one row of T tokens, every one supervised. The step is the one of `gdtrain finetune`: loss and
gradients are evaluated, then an update by Adam. Times are medians in ms.

A part is timed alone, with the next run always waiting: forward, and forward + backward with gradients for its input
and its LoRA. Under checkpointing a step runs the forward of a block, and later its forward + backward; the parts of the
table are multiplied so, and what they leave of the measured step is in the row "rest". "host" is the time that Python
and MLX take to lay out loss and gradients.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx_lm.models import qwen3_5

from gdtrain.bench.machine import describe_machine
from gdtrain.bench.measure import pipelined_ms
from gdtrain.data.batches import Batch, collate
from gdtrain.data.conversation import Sample
from gdtrain.head_loss import summed_cross_entropy
from gdtrain.loss import supervised_positions
from gdtrain.model.head import find_head
from gdtrain.model.lora import adapt
from gdtrain.model.swap import swap_linear_attention
from gdtrain.reporting.header import device_name
from gdtrain.training.recompute import recomputed_blocks
from gdtrain.training.step import Window, accumulate, build_step

KEYS = ["q_proj", "v_proj", "in_proj_qkv", "out_proj"]
_QWEN35_9B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248320,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
# The mini model of the tests.
_MINI = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
SHAPES = {"9b-8-blocks": _QWEN35_9B, "mini": _MINI}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="9b-8-blocks")
    parser.add_argument("--tokens", default="2048,4096", help="T,T,...")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--parts", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action="store_true", help="mx.compile the step")
    parser.add_argument("--memory-limit-gb", type=float, help="of MLX; it then runs ahead of the device less")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    if args.memory_limit_gb is not None:
        mx.set_memory_limit(int(1e9 * args.memory_limit_gb))
    config = model_config(args.shape)
    model = build_model(config, getattr(mx, args.dtype))
    swapped = swap_linear_attention(model, config, kernel=args.kernel)
    adapt(model, keys=KEYS)
    mx.eval(model.parameters())
    choice = {"backend": swapped.choice.backend, "reason": swapped.choice.reason}
    settings = {"shape": args.shape, "dtype": args.dtype, "compiled": args.compile, "kernel": choice}
    settings |= {"convolution": swapped.convolution.backend, "memory_limit_gb": args.memory_limit_gb}
    rows: list[dict[str, Any]] = []
    report = {"what": "a training step", **settings, **describe_machine(device_name()), "config": config, "rows": rows}
    for T in map(int, args.tokens.split(",")):
        rows.append(measure_step(model, config, T, args))
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def model_config(shape: str) -> dict[str, Any]:
    """config.json of one of SHAPES."""
    return {"model_type": "qwen3_5", "full_attention_interval": 4, **SHAPES[shape]}


def build_model(config: dict[str, Any], dtype: mx.Dtype) -> nn.Module:
    """A Qwen3.5 of random weights; A_log stays float32."""
    mx.random.seed(0)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    for block in model.layers:
        if "linear_attn" in block:
            block.linear_attn.A_log = block.linear_attn.A_log.astype(mx.float32)
    mx.eval(model.parameters())
    return model


def measure_step(model: nn.Module, config: dict[str, Any], T: int, args: argparse.Namespace) -> dict[str, Any]:
    """tokens/s, ms and peak of whole steps at T, and ms of the parts; prints them."""
    batch = random_batch(config["vocab_size"], T)
    with recomputed_blocks(model.layers):
        row = {"tokens": T, **time_steps(model, batch, args)}
    whole = f"T {T}: {row['ms']:.1f} ms, {row['tokens_per_second']:,.0f} tokens/s, peak {row['peak_gb']:.2f} GB"
    print(f"{whole}, host {row['host_ms']:.1f} ms, first step {row['first_seconds']:.1f} s", flush=True)
    if args.parts:
        row["parts"] = time_parts(model, batch, row["ms"])
        for name, part in row["parts"].items():
            print(f"  {name:>12}" + "".join(f"  {key} {value:8.3f}" for key, value in part.items()), flush=True)
    return row


def random_batch(vocabulary: int, T: int) -> Batch:
    """One row of T positions, all supervised."""
    ids = np.random.default_rng(0).integers(0, vocabulary, T + 1).astype(np.int32)
    supervised = np.arange(T + 1) > 0
    return collate([Sample(ids, supervised, "random")], [0], max_tokens=T + 1)


def time_steps(model: nn.Module, batch: Batch, args: argparse.Namespace) -> dict[str, float]:
    """Of steps one after the other, each waiting for its loss, as the training loop does."""
    model.train()
    optimizer = optim.Adam(learning_rate=1e-5)
    step = build_step(model, compiled=args.compile)

    laid_out = 0.0

    def watched(batch: Batch) -> Any:
        nonlocal laid_out
        start = time.perf_counter()
        made = step(batch)
        laid_out = time.perf_counter() - start
        return made

    def run() -> tuple[float, float]:
        """Seconds until loss and gradients are laid out, and until the step is done."""
        start = time.perf_counter()
        window = Window()
        accumulate(watched, batch, window)
        mean, _ = window.mean(None)
        optimizer.update(model, mean)
        del mean
        mx.eval(model.trainable_parameters(), optimizer.state)
        return laid_out, time.perf_counter() - start

    first = run()[1]
    run()
    mx.clear_cache()
    mx.reset_peak_memory()
    times = [run() for _ in range(args.steps)]
    seconds = statistics.median(whole for _, whole in times)
    return {
        "ms": 1e3 * seconds,
        "tokens_per_second": batch.inputs.size / seconds,
        "peak_gb": mx.get_peak_memory() / 1e9,
        "active_gb": mx.get_active_memory() / 1e9,
        "host_ms": 1e3 * statistics.median(host for host, _ in times),
        "first_seconds": first,
        "measurements": len(times),
    }


def time_parts(model: nn.Module, batch: Batch, whole_ms: float) -> dict[str, dict[str, float]]:
    """ms of each part alone, how often a step runs it, and its share of the step."""
    linear = [block for block in model.layers if "linear_attn" in block]
    full = [block for block in model.layers if "linear_attn" not in block]
    B, T = batch.inputs.shape
    hidden = model.layers[0].input_layernorm.weight.shape[0]
    x = mx.random.normal((B, T, hidden)).astype(model.layers[0].input_layernorm.weight.dtype)
    mx.eval(x)
    modules = {"GDN": (linear[0].linear_attn, len(linear)), "attention": (_Causal(full[0].self_attn), len(full))}
    modules["MLP"] = (linear[0].mlp, len(model.layers))
    modules["norm"] = (linear[0].input_layernorm, 2 * len(model.layers))
    parts: dict[str, dict[str, float]] = {}
    for name, (module, count) in modules.items():
        forward, both = time_module(module, x)
        parts[name] = {"forward_ms": forward, "both_ms": both, "times": count, "in_step_ms": count * (forward + both)}
    supervised = supervised_positions(batch)
    loss_ms = time_loss(model, x, supervised)
    parts["loss"] = {"both_ms": loss_ms, "times": 1, "in_step_ms": loss_ms}
    rest = whole_ms - sum(part["in_step_ms"] for part in parts.values())
    parts["rest"] = {"in_step_ms": rest}
    for part in parts.values():
        part["share"] = part["in_step_ms"] / whole_ms
    return parts


class _Causal(nn.Module):
    """Attention with the mask that the model gives it."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def __call__(self, x: mx.array) -> mx.array:
        return self.attention(x, "causal")


def time_module(module: nn.Module, x: mx.array) -> tuple[float, float]:
    """ms of its forward, and of forward + backward with gradients for x and what trains."""
    parameters = module.trainable_parameters()

    def run(parameters: dict, x: mx.array) -> mx.array:
        module.update(parameters)
        return module(x)

    def both() -> Any:
        flat, gradient = mx.value_and_grad(lambda p, x: (run(p, x) * x).astype(mx.float32).sum(), (0, 1))(parameters, x)
        return flat, gradient

    try:
        return pipelined_ms(lambda: run(parameters, x)), pipelined_ms(both)
    finally:
        module.update(parameters)


def time_loss(model: nn.Module, x: mx.array, supervised: Any) -> float:
    """ms of the loss from hidden states, with their gradient."""

    head = find_head(model)

    def loss(x: mx.array) -> mx.array:
        hidden = x.flatten(0, 1)[supervised.positions]
        return summed_cross_entropy(head, hidden, supervised.targets, supervised.counted)

    return pipelined_ms(lambda: mx.value_and_grad(loss)(x))


if __name__ == "__main__":
    main()
