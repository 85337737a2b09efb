"""`gdtrain plan` against measured peaks: models of random weights, a few real steps, and what was forecast for them.

    python benchmarks/plan.py --json benchmarks/plan-cpu.json
    python benchmarks/plan.py --json benchmarks/plan-h200.json       on a GPU: Qwen3.5-9B cut to 8 blocks, bfloat16
    python benchmarks/plan.py --again benchmarks/plan-cpu.json       new forecasts for what was measured

On a CPU: small models of the proportions of Qwen3.5-9B, and SHAPES random ones drawn from the seed in the file. A step
is the one of `gdtrain finetune`, every position supervised, the last good adapter kept. On a CPU the peak of one step
differs from the next, since it depends on how far MLX gets ahead of the computation: measured_gb are MLX's peaks of all
steps but the first, without mx.compile. under is what the forecast is above the highest of them, as a part of it (below
0: an out-of-memory that was not foreseen), over what it is above their median. by_tasks, on a GPU: the forecast if MLX
were ahead of the device by so many tasks (see gdtrain/plan/devices.py).
"""

import argparse
import importlib
import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gdkernels.cores import _cores
from step import KEYS, model_config

from gdtrain.arrays import flat
from gdtrain.bench.machine import describe_machine
from gdtrain.config import RunConfig
from gdtrain.data.batches import Batch, Row, collate
from gdtrain.data.conversation import Sample
from gdtrain.model.lora import adapt
from gdtrain.model.swap import swap_linear_attention
from gdtrain.plan.forecast import Forecast, Planner
from gdtrain.reporting.header import device_name
from gdtrain.training.optimizer import build_optimizer
from gdtrain.training.recompute import recomputed_blocks
from gdtrain.training.step import Window, accumulate, build_step

# The proportions of Qwen3.5-9B.
_SMALL = {
    **model_config("mini"),
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 4096,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 32,
}
_EXPERTS = {
    "model_type": "qwen3_5_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
SEED, SHAPES = 0, 72
STEPS = 4
TASKS = (0, 1, 2, 4, 6, 8, 10)


class Case(NamedTuple):
    """A model by its config.json, how it is quantised, what the run's config says beside that, B and T."""

    name: str
    config: dict[str, Any]
    quantisation: dict[str, Any] | None
    run: dict[str, Any]
    B: int
    T: int


def cpu_cases() -> Iterator[Case]:
    """By hand: the dimensions of a plan one after the other."""

    def case(
        name: str, B: int, T: int, config: dict[str, Any] = _SMALL, *, bits: int | None = None, **run: Any
    ) -> Case:
        quantisation = None if bits is None else {"group_size": 64, "bits": bits}
        return Case(name, config, quantisation, {"dtype": "float32", **run}, B, T)

    some = {"lora_parameters": {"keys": KEYS}}
    for T in (128, 512, 1024):
        yield case("mini", 1, T, model_config("mini"))
    for T in (256, 512):
        yield case("dense", 1, T, **some)
    yield case("dense, batch", 4, 128, **some)
    yield case("dense, all projections", 1, 512)
    yield case("dense, 8 blocks", 1, 256, {**_SMALL, "num_hidden_layers": 8}, **some)
    yield case("experts", 1, 512, {**_SMALL, **_EXPERTS})
    yield case("experts, batch", 2, 256, {**_SMALL, **_EXPERTS}, **some)
    for bits in (4, 8):
        yield case(f"{bits} bits", 1, 512, bits=bits)
    yield case("bfloat16", 1, 256, dtype="bfloat16")


def random_cases(count: int = SHAPES, seed: int = SEED) -> Iterator[Case]:
    """Of all families, kinds of fine-tuning and ways to run them."""
    random = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[random.integers(len(values))]

    for i in range(count):
        family, H, Hk = pick("qwen3_5", "qwen3_5_moe", "qwen3_next"), pick(2, 4, 8), pick(2, 4)
        hidden = pick(64, 128, 192, 256)
        config = {
            **model_config("mini"),
            **({} if family == "qwen3_5" else _EXPERTS),
            "model_type": family,
            "hidden_size": hidden,
            "intermediate_size": hidden * pick(1, 2, 3),
            "moe_intermediate_size": pick(64, 128),
            "num_hidden_layers": pick(4, 5, 6, 8),
            "num_attention_heads": H,
            "num_key_value_heads": pick(1, 2, H),
            "head_dim": pick(16, 32, 64),
            "vocab_size": pick(300, 1000, 4096),
            "linear_num_key_heads": Hk,
            "linear_num_value_heads": Hk * pick(1, 2),
            "linear_key_head_dim": pick(32, 64),
            "linear_value_head_dim": pick(32, 64),
        }
        if family == "qwen3_next":
            config |= _NEXT
        kind = pick("lora", "lora", "lora", "dora", "full")
        bits = None if kind == "full" else pick(None, None, 4, 8)
        run = {
            "fine_tune_type": kind,
            "dtype": pick("float32", "float32", "bfloat16") if (family, bits) == ("qwen3_5", None) else "float32",
            "optimizer": pick("adam", "adamw", "sgd"),
            "grad_checkpoint": pick(True, True, True, False),
            "grad_accumulation_steps": pick(1, 1, 2),
            "packing": pick(False, False, False, True),
            "lora_parameters": {"rank": pick(4, 8, 16), "dropout": pick(0.0, 0.0, 0.1), "keys": pick(None, None, KEYS)},
        }
        if family == "qwen3_next" and run["lora_parameters"]["keys"]:
            run["lora_parameters"]["keys"] = ["q_proj", "v_proj", "in_proj_qkvz", "out_proj"]
        # On a CPU a product of bfloat16 is much slower.
        positions = 256 if run["dtype"] == "bfloat16" else 1024
        T = int(2 ** random.uniform(6, np.log2(positions)))
        B = int(random.integers(1, min(4, positions // T) + 1))
        quantisation = None if bits is None else {"group_size": 64, "bits": bits}
        yield Case(f"random {i}", config, quantisation, run, B, T)


_NEXT = {
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}


def gpu_cases() -> Iterator[Case]:
    run = {"dtype": "bfloat16", "lora_parameters": {"keys": KEYS}}
    for T in (1024, 2048, 4096):
        yield Case("9b-8-blocks", model_config("9b-8-blocks"), None, run, 1, T)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cases whose name begins so")
    parser.add_argument("--seed", type=int, default=SEED, help="of the random cases")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    parser.add_argument("--again", type=Path, help="a result whose forecasts are to be made anew")
    args = parser.parse_args()
    if args.again:
        forecast_again(args.again)
        return
    mx.disable_compile()
    on_cpu = mx.default_device() == mx.cpu
    rows: list[dict[str, Any]] = []
    report = {"what": "peaks of training steps, measured and forecast", **describe_machine(device_name())}
    report |= {"cores": _cores(), "seed": args.seed, "rows": rows}
    for case in [*cpu_cases(), *random_cases(seed=args.seed)] if on_cpu else gpu_cases():
        if args.only and not case.name.startswith(args.only):
            continue
        rows.append(compare(case) | ({} if on_cpu else {"by_tasks": by_tasks(case)}))
        row = rows[-1]
        measured = f"measured {statistics.median(row['measured_gb']):.4f} to {max(row['measured_gb']):.4f} GB"
        forecast = f"forecast {row['forecast_gb']:.4f} GB, {row['under']:+.1%} {row['over']:+.1%}"
        print(f"{case.name}, {case.B} x {case.T}: {measured}, {forecast}", flush=True)
        if args.json:
            write(report, args.json)


def forecast_again(file: Path) -> None:
    """For the cores that the rows were measured on."""
    report = json.loads(file.read_text(encoding="utf-8"))
    report["rows"] = [row | errors(case, row["measured_gb"], report["cores"]) for case, row in measured_cases(report)]
    write(report, file)


def measured_cases(report: dict[str, Any]) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Every row of a result on a CPU with its case."""
    cases = {(c.name, c.B, c.T): c for c in (*cpu_cases(), *random_cases(seed=report["seed"]))}
    return ((cases[row["name"], row["B"], row["T"]], row) for row in report["rows"])


def write(report: dict[str, Any], file: Path) -> None:
    """A row a line."""
    rows = ",\n  ".join(map(json.dumps, report["rows"]))
    head = json.dumps({**report, "rows": []}, indent=1).removesuffix("[]\n}")
    file.write_text(f"{head}[\n  {rows}\n ]\n}}\n", encoding="utf-8")


def compare(case: Case) -> dict[str, Any]:
    """One row of the result. The model is not in it: see `cpu_cases` and `random_cases`."""
    measured = [size / 1e9 for size in measure(case)]
    values = {name: value for name, value in case._asdict().items() if name != "config"}
    return {**values, "measured_gb": measured, **errors(case, measured)}


def errors(case: Case, measured: list[float], cores: int | None = None) -> dict[str, Any]:
    """The forecast and how far it is off; cores: of a CPU, None for those of this machine."""
    planner = make_planner(case)
    if cores is not None:
        planner.cores = cores
    forecast = planner.forecast()
    return {
        "forecast_gb": forecast.total / 1e9,
        "under": forecast.total / 1e9 / max(measured) - 1,
        "over": forecast.total / 1e9 / statistics.median(measured) - 1,
        "parts_gb": {part.name: part.size / 1e9 for part in forecast.parts},
        "peak_of": forecast.moment,
    }


def make_config(case: Case, model: str) -> RunConfig:
    """model: its folder."""
    return RunConfig.model_validate(
        {"model": model, "data": "none", "batch_size": case.B, "max_seq_length": case.T + 1, **case.run}
    )


def make_planner(case: Case) -> Planner:
    """From a config.json, as the command does it."""
    quantisation = {"quantization": case.quantisation} if case.quantisation else {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**case.config, **quantisation}), encoding="utf-8")
        return Planner(make_config(case, folder))


def by_tasks(case: Case) -> dict[int, float]:
    """Forecasts in GB for so many tasks that MLX is ahead of the device."""
    return {tasks: foresee(case, tasks).total / 1e9 for tasks in TASKS}


def foresee(case: Case, tasks: int) -> Forecast:
    planner = make_planner(case)
    planner.device = replace(planner.device, lead=planner.device.lead._replace(tasks=tasks))
    return planner.forecast()


def measure(case: Case) -> list[int]:
    """Bytes at the peaks of the later steps."""
    mx.clear_cache()
    before = mx.get_active_memory()
    config = make_config(case, "none")
    model = build_model(case)
    swap_linear_attention(model, case.config)
    lora = config.lora_parameters
    adapt(model, fine_tune_type=config.fine_tune_type, rank=lora.rank, dropout=lora.dropout, keys=lora.keys)
    mx.eval(model.parameters())
    model.train()
    batch, optimizer = make_batch(case), build_optimizer(config)
    step, full = build_step(model, compiled=False), config.fine_tune_type == "full"
    good = None if full else flat(model.trainable_parameters())
    peaks = []
    with recomputed_blocks(model.layers, config.grad_checkpoint):
        for _ in range(STEPS):
            mx.reset_peak_memory()
            window = Window()
            for _ in range(config.grad_accumulation_steps):
                accumulate(step, batch, window)
            good = None if full else flat(model.trainable_parameters())
            gradient, norm = window.mean(None)
            mx.eval(norm)
            optimizer.update(model, gradient)
            del gradient
            mx.eval(model.trainable_parameters(), optimizer.state)
            mx.clear_cache()
            peaks.append(mx.get_peak_memory())
    del good
    return [peak - before for peak in peaks[1:]]


def build_model(case: Case) -> nn.Module:
    """Of random weights; A_log stays float32."""
    module = importlib.import_module(f"mlx_lm.models.{case.config['model_type']}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(case.config))
    model.set_dtype(getattr(mx, case.run["dtype"]))
    for block in model.layers:
        if "linear_attn" in block:
            block.linear_attn.A_log = block.linear_attn.A_log.astype(mx.float32)
    if case.quantisation:
        nn.quantize(model, **case.quantisation, class_predicate=partial(_divides, case.quantisation["group_size"]))
    mx.eval(model.parameters())
    return model


def _divides(group: int, path: str, module: nn.Module) -> bool:
    """As mlx-lm's converter chooses."""
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % group == 0


def make_batch(case: Case) -> Batch:
    """B rows of T positions, of one document or, packed, of three."""
    random = np.random.default_rng(0)
    ends = [case.T // 4, case.T // 2, case.T] if case.run.get("packing") else [case.T]
    samples: list[Sample] = []
    rows: list[Row] = []
    for _ in range(case.B):
        lengths = np.diff([0, *ends]) + 1
        documents = range(len(samples), len(samples) + len(lengths))
        rows.append(tuple(documents) if len(ends) > 1 else documents[0])
        for length in lengths:
            ids = random.integers(0, case.config["vocab_size"], length).astype(np.int32)
            samples.append(Sample(ids, np.arange(length) > 0, "random"))
    return collate(samples, rows, multiple=1, max_tokens=case.T + 1)


if __name__ == "__main__":
    main()
