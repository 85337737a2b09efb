"""A training step of gdtrain beside one of stock mlx-lm, `mlx_lm.lora`: the same model, row, LoRA and optimizer.

    python benchmarks/stock.py --json benchmarks/stock-cpu.json

The model is the mini model of the tests, random weights, float32, LoRA of rank 8 on q_proj, v_proj, in_proj_qkv and
out_proj of every block, gradient checkpointing, one row of T tokens, Adam. Every variant runs in a process of its own,
because the peak is one of the process, and they take turns. Neither step is compiled: mx.compile does not get through
mlx-lm's loop over 512 tokens in the time of this benchmark. Times are medians; ratios are those of one run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VARIANTS = ("mlx-lm", "gdtrain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--shape", default="mini", help="as of step.py")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=4, help="processes for each variant")
    parser.add_argument("--steps", type=int, default=5, help="timed steps in each process")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    parser.add_argument("--measure", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args)))
        return
    environment = os.environ | {"MLX_DISABLE_COMPILE": "1"}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for _ in range(args.rounds):
        for name in VARIANTS:
            command = [sys.executable, __file__, *sys.argv[1:], "--measure", name]
            done = subprocess.run(command, check=True, capture_output=True, env=environment)
            runs[name].append(json.loads(done.stdout))
    report = summarise(runs, args)
    for row in report["rows"]:
        print("{variant:>8}  {ms:9.1f} ms  {peak_mb:8.1f} MB  loss {loss:.6f}".format(**row))
    print("gdtrain takes 1/{time_ratio:.1f} of the time and 1/{peak_ratio:.1f} of the memory".format(**report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """ms of every timed step, peak in bytes, and the mean loss per token of the first step, of one variant."""
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    from mlx_lm.tuner.trainer import default_loss, grad_checkpoint
    from step import KEYS, SHAPES, build_model, model_config, random_batch

    from gdtrain.model.lora import adapt
    from gdtrain.model.swap import swap_linear_attention
    from gdtrain.training.recompute import recomputed_blocks
    from gdtrain.training.step import Window, accumulate, build_step

    config = model_config(args.shape)
    model = build_model(config, getattr(mx, args.dtype))
    batch = random_batch(SHAPES[args.shape]["vocab_size"], args.tokens)
    ours = args.measure == "gdtrain"
    if ours:
        swap_linear_attention(model, config)
    adapt(model, keys=KEYS)
    model.train()
    optimizer = optim.Adam(learning_rate=1e-5)
    if ours:
        step = build_step(model, compiled=False)
    else:
        grad_checkpoint(model.layers[0])
        loss_and_gradients = nn.value_and_grad(model, default_loss)
        whole = mx.concatenate([batch.inputs, batch.targets[:, -1:]], axis=1)
        lengths = mx.array([[1, args.tokens]])

    def run() -> tuple[float, float]:
        start = time.perf_counter()
        if ours:
            window = Window()
            loss = accumulate(step, batch, window) / batch.supervised_tokens
            gradients, _ = window.mean(None)
        else:
            (mean, _), gradients = loss_and_gradients(model, whole, lengths)
        optimizer.update(model, gradients)
        del gradients
        if ours:
            mx.eval(model.trainable_parameters(), optimizer.state)
        else:
            mx.eval(mean, model.trainable_parameters(), optimizer.state)
            loss = float(mean.item())
        return 1e3 * (time.perf_counter() - start), loss

    with recomputed_blocks(model.layers, ours):
        loss = run()[1]
        mx.clear_cache()
        mx.reset_peak_memory()
        times = [run()[0] for _ in range(args.steps)]
    return {"ms": times, "peak": mx.get_peak_memory(), "loss": loss}


def summarise(runs: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> dict[str, Any]:
    """Medians of all steps, largest peaks, and what gdtrain takes less."""
    from gdtrain.bench.machine import describe_machine
    from gdtrain.reporting.header import device_name

    rows = []
    for name, measured in runs.items():
        times = [ms for run in measured for ms in run["ms"]]
        rows.append(
            {
                "variant": name,
                "ms": statistics.median(times),
                "ms_min": min(times),
                "ms_max": max(times),
                "measurements": len(times),
                "peak_mb": max(run["peak"] for run in measured) / 1e6,
                "loss": measured[0]["loss"],
            }
        )
    stock, ours = rows
    ratios = {key: stock[of] / ours[of] for key, of in (("time_ratio", "ms"), ("peak_ratio", "peak_mb"))}
    settings = {"shape": args.shape, "tokens": args.tokens, "dtype": args.dtype, "compiled": False}
    what = "a training step, one row, LoRA of rank 8, gradient checkpointing, Adam; ratios to stock mlx-lm"
    return {"what": what, **settings, **describe_machine(device_name()), **ratios, "rows": rows}


if __name__ == "__main__":
    main()
