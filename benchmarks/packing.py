"""tokens/s and peak memory of training on short documents, packed against padded to length buckets.

    python benchmarks/packing.py --json benchmarks/packing-h200.json
    python benchmarks/packing.py --shape mini --documents 40 --max-seq-length 256 --median 25 --dtype float32

Both train a Qwen3.5 of random weights on the same documents, lognormal in length, every token supervised: one epoch of
the batches of `gdtrain finetune`, with gradient checkpointing and an update by Adam for each. "padded" has --batch-size
rows as a user would leave it; "padded, wide" so many that its batches have about as many positions as the packed ones.
tokens/s count positions of documents, not padding. Every variant first meets each of its shapes once, untimed; then
they take turns, --rounds epochs each. ratio: how much faster packed is than the variant.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from step import SHAPES, build_model, model_config

from gdtrain.bench.machine import describe_machine
from gdtrain.data.batches import Batch, RunBatches
from gdtrain.data.conversation import Sample
from gdtrain.model.lora import adapt
from gdtrain.model.swap import swap_linear_attention
from gdtrain.reporting.header import device_name
from gdtrain.training.recompute import recomputed_blocks
from gdtrain.training.step import LossAndGradients, Window, accumulate, build_step

PACKED, PADDED, WIDE = "packed", "padded", "padded, wide"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="9b-8-blocks", help="of the model")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--documents", type=int, default=120)
    parser.add_argument("--median", type=float, default=200, help="tokens of a document")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the logarithm of the tokens")
    parser.add_argument("--max-seq-length", type=int, default=2048)
    parser.add_argument("--packed-batch-size", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=4, help="of padded")
    parser.add_argument("--rounds", type=int, default=3, help="timed epochs of each variant")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    config = model_config(args.shape)
    model = build_model(config, getattr(mx, args.dtype))
    swapped = swap_linear_attention(model, config, kernel=args.kernel)
    adapt(model)
    model.train()
    mx.eval(model.parameters())
    step, optimizer = build_step(model, compiled=False), optim.Adam(learning_rate=1e-5)

    variants = plan_variants(draw_documents(config["vocab_size"], args), args)
    times: dict[str, list[float]] = {name: [] for name in variants}
    peaks = {}
    with recomputed_blocks(model.layers):
        for name, batches in variants.items():
            meet_shapes(step, batches)
            mx.clear_cache()
            mx.reset_peak_memory()
            train_epoch(model, step, optimizer, batches, 0)
            peaks[name] = mx.get_peak_memory()
        for number in range(1, args.rounds + 1):
            for name, batches in variants.items():
                times[name].append(train_epoch(model, step, optimizer, batches, number))
    rows = [summarise(name, batches, times[name], peaks[name]) for name, batches in variants.items()]
    for row in rows:
        row["ratio"] = rows[0]["tokens_per_second"] / row["tokens_per_second"]
        print(
            "{variant:>12}  {tokens_per_second:9,.0f} tokens/s  1/{ratio:.2f}  {peak_gb:6.2f} GB  {batches:4} batches "
            "of {batch_size:3}, {shapes} shapes, padding {padding_share:.1%}".format(**row)
        )
    asked = {key: value for key, value in vars(args).items() if key != "json"}
    choice = {"backend": swapped.choice.backend, "reason": swapped.choice.reason}
    what = "training on short documents, one update a batch, packed against padded; an epoch's tokens/s, medians"
    report = {"what": what, **asked, "chosen": choice, **describe_machine(device_name()), "config": config}
    if args.json:
        args.json.write_text(json.dumps(report | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


def draw_documents(vocabulary: int, args: argparse.Namespace) -> list[Sample]:
    """Random tokens of lognormal lengths, all but the first of them supervised."""
    random = np.random.default_rng(0)
    lengths = np.exp(np.log(args.median) + args.sigma * random.standard_normal(args.documents))
    lengths = np.clip(lengths.round(), 2, args.max_seq_length).astype(int)
    ids = (random.integers(0, vocabulary, n).astype(np.int32) for n in lengths)
    return [Sample(x, np.arange(len(x)) > 0, f"document {i}") for i, x in enumerate(ids)]


def plan_variants(documents: list[Sample], args: argparse.Namespace) -> dict[str, RunBatches]:
    def plan(batch_size: int, packing: bool = False) -> RunBatches:
        return RunBatches(documents, batch_size, seed=0, max_tokens=args.max_seq_length, packing=packing)

    packed, narrow = plan(args.packed_batch_size, packing=True), plan(args.batch_size)
    used = sum(len(document.ids) - 1 for document in documents)
    positions_per_row = used / (1 - narrow.padding_share) / len(documents)
    wide = max(1, round(args.packed_batch_size * packed.widths[0] / positions_per_row))
    return {PACKED: packed, PADDED: narrow, WIDE: plan(wide)}


def meet_shapes(step: LossAndGradients, batches: RunBatches) -> None:
    """A first step of a shape may compile or choose a kernel."""
    met = set()
    for rows in batches.epoch(0):
        batch = batches.collate(rows)
        if batch.inputs.shape not in met:
            met.add(batch.inputs.shape)
            mx.eval(step(batch))


def train_epoch(
    model: Any, step: LossAndGradients, optimizer: optim.Optimizer, batches: RunBatches, number: int
) -> float:
    """Seconds of an epoch, each step waiting for its loss as in the training loop, arrays made before."""
    ready: list[Batch] = [batches.collate(rows) for rows in batches.epoch(number)]
    mx.eval([batch.inputs for batch in ready])
    start = time.perf_counter()
    for batch in ready:
        window = Window()
        accumulate(step, batch, window)
        mean, _ = window.mean(None)
        optimizer.update(model, mean)
        del mean
        mx.eval(model.trainable_parameters(), optimizer.state)
    return time.perf_counter() - start


def summarise(name: str, batches: RunBatches, seconds: list[float], peak: int) -> dict[str, Any]:
    used = sum(len(sample.ids) - 1 for sample in batches.samples)
    rates = [used / s for s in seconds]
    made = [batches.collate(rows) for rows in batches.epoch(0)]
    return {
        "variant": name,
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_min": min(rates),
        "tokens_per_second_max": max(rates),
        "measurements": len(rates),
        "peak_gb": peak / 1e9,
        "batches": batches.per_epoch,
        "batch_size": batches.batch_size,
        "shapes": len({batch.inputs.shape for batch in made}),
        "supervised_tokens": sum(batch.supervised_tokens for batch in made),
        "padding_share": batches.padding_share,
    }


if __name__ == "__main__":
    main()
