"""Memory over a run: resident size stays flat, a step's buffers grow with its length and no faster, and limits."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import mini
import mlx.core as mx
import pytest
from gdkernels.testing import metal

from gdtrain.errors import UserError
from gdtrain.memory import clear_cache_above, is_out_of_memory, limits_in_effect, set_limits
from gdtrain.training.recompute import recomputed_blocks
from gdtrain.training.step import build_step

# ---- resident memory ------------------------------------------------------------------------------------------------

# Prints the resident size, or its highest value so far where there is no /proc, in bytes after every iteration of a run
# with rows of random lengths. With a third argument every iteration leaves a loss behind that is not evaluated.
PROGRAM = """
import json, resource, sys
from pathlib import Path
import mlx.core as mx
import numpy as np
import mini
from gdtrain.commands.finetune import run_finetune
from gdtrain.reporting.console import RunConsole
from gdtrain.training import loop

folder, iterations = Path(sys.argv[1]), int(sys.argv[2])
mini.write_checkpoint(folder / "model", num_hidden_layers=2, full_attention_interval=2, hidden_size=32)
(folder / "data").mkdir()
lengths = np.random.default_rng(0).integers(2, 96, 100)
lines = [json.dumps({"text": "x" * int(length)}) for length in lengths]
(folder / "data" / "train.jsonl").write_text("\\n".join(lines))
config = {"model": folder / "model", "data": folder / "data", "adapter_path": folder / "run", "iters": iterations,
          "batch_size": 2, "save_every": 50, "steps_per_report": 10, "chunk_size": 32}
(folder / "c.yaml").write_text("".join(f"{key}: {value}\\n" for key, value in config.items()))

def resident():
    if Path("/proc/self/statm").exists():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

sizes, kept, accumulate = [], [], loop.accumulate

def leak(step, batch, window):
    kept.append(step(batch)[0])
    return accumulate(step, batch, window)

if len(sys.argv) > 3:
    loop.accumulate = leak
RunConsole.advance = lambda self, iteration: sizes.append(resident())
run_finetune(folder / "c.yaml", [])
print("sizes", *sizes)
"""
WARM_UP = 40
# Measured on Linux: 0.0 to 0.2 MB from iteration 40 to 200, and 1 MB for every iteration that leaks.
GROWTH = 4e6


def growth(folder, iterations, *leak):
    """Bytes from the end of the warm-up to the highest value after it."""
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(iterations), *leak],
        env=os.environ | {"MLX_DISABLE_COMPILE": "1", "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("sizes "))
    sizes = [int(size) for size in line.split()[1:]]
    assert len(sizes) == iterations
    return max(sizes[WARM_UP:]) - sizes[WARM_UP - 1]


def test_resident_memory_stays_flat(tmp_path):
    assert growth(tmp_path, 200) < GROWTH


def test_a_leak_would_be_seen(tmp_path):
    assert growth(tmp_path, 60, "leak") > 2 * GROWTH


# ---- buffers --------------------------------------------------------------------------------------------------------

# Metal's limit on an M-series machine: "[metal::malloc] Resource limit (499000) exceeded".
RESOURCES = 499_000
# The largest shapes that are configured here: 27B, whose 64 blocks are 48 of GDN and 16 of attention.
HEADS = {"linear_num_key_heads": 16, "linear_num_value_heads": 48}
HEADS |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}


def arrays_of_step(kernel, blocks, T, *, recompute=True, **sizes):
    """(arrays that exist before a step is evaluated, operations in its graph) with LoRA on every projection.

    What exists is alive until the end: parameters, the batch and constants made while the graph is built. Operations
    bound what can come on top. Counted allocations of MLX on a CPU: at most 60 at a time above what exists, because an
    array is freed after its last use (4 to 16 blocks, T 64 to 1024, chunks of 64, with and without recomputation).
    """
    model = mini.trainable(kernel=kernel, num_hidden_layers=blocks, max_position_embeddings=8192, **sizes)
    text = io.StringIO()
    with recomputed_blocks(model.layers, recompute):
        loss, gradients = build_step(model, compiled=False)(mini.batch(mini.samples(T + 1), max_tokens=8192))
        mx.export_to_dot(text, loss, gradients)
    existing = set(re.findall(r'rank=source; "(\w+)"', text.getvalue()))
    return len(existing), text.getvalue().count("shape=rectangle")


def test_arrays_of_the_chunked_form_grow_linearly():
    """Today 16,400 exist for 64 blocks at T = 4096."""
    lengths = (896, 1152, 1408)  # MLX splits an array of fewer chunks by one operation
    at = {(blocks, T): arrays_of_step("chunked", blocks, T) for blocks in (4, 8) for T in lengths}
    for kind in (0, 1):
        first, second = (at[4, T][kind] - at[4, T - 256][kind] for T in lengths[1:])
        assert second <= 1.01 * first
        four, eight = (at[blocks, lengths[2]][kind] - at[blocks, lengths[0]][kind] for blocks in (4, 8))
        assert eight <= 2.01 * four
    # Two straight lines: what 64 blocks have at T = 4096.
    per_block = {T: (at[8, T][0] - at[4, T][0]) / 4 for T in lengths[1:]}
    block = per_block[1152] + (4096 - 1152) / 256 * (per_block[1408] - per_block[1152])
    existing = at[4, 1152][0] - 4 * per_block[1152] + 64 * block
    assert existing < 25_000 < RESOURCES / 10


def test_recomputation_is_what_makes_operations_and_frees_them():
    """With it the graph is larger, but what exists beforehand is all that is alive for the whole step."""
    kept, recomputed = (arrays_of_step("chunked", 4, 256, recompute=recompute) for recompute in (False, True))
    assert kept[1] < recomputed[1] < 2 * kept[1]


@pytest.mark.parametrize("kernel", ["fused", "recurrent"])
def test_arrays_with_gpu_kernels(kernel, monkeypatch):
    """Nothing is evaluated: the kernels are stubs of the right shapes. More for every span of a kernel
    and of attention; today 15,000 and 167,000 for 64 blocks at T = 4096, and attention has larger spans on a GPU."""
    zeros = {dtype: mx.zeros((), dtype) for dtype in (mx.float32, mx.bfloat16, mx.int32)}

    def kernels(*_, **__):
        return lambda *, output_shapes, output_dtypes, **_: [
            mx.broadcast_to(zeros[dtype], shape) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]

    monkeypatch.setattr(mx.fast, "metal_kernel", kernels)
    with metal():
        at = {T: [arrays_of_step(kernel, blocks, T, **HEADS) for blocks in (4, 8)] for T in (1024, 4096)}
    for T, (four, eight) in at.items():
        existing, operations = (a + 60 * (b - a) / 4 for a, b in zip(four, eight, strict=True))
        assert existing < 25_000, T
        assert operations < 240_000 < RESOURCES / 2, T


# ---- limits ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """What is set: (function, bytes); nothing reaches MLX."""
    made = []
    for name in ("set_memory_limit", "set_cache_limit", "set_wired_limit"):
        monkeypatch.setattr(mx, name, lambda size, name=name: made.append((name, size)))
    return made


@pytest.fixture
def on_metal(monkeypatch):
    """A device that recommends 20 GB, and refuses more as Metal does."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 20_000_000_000})
    accepted = []

    def set_wired_limit(size):
        if size > 20_000_000_000:
            raise ValueError(
                "[metal::set_wired_limit] Setting a wired limit larger than the maximum ... is not allowed."
            )
        accepted.append(size)
        return 0

    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    return accepted


def test_limits_are_gb_of_1e9_bytes(calls):
    notes = set_limits(8, 0.5, None)
    assert calls == [("set_memory_limit", 8_000_000_000), ("set_cache_limit", 500_000_000)]
    assert len(notes) == 1
    assert "not enforced" in notes[0]


def test_no_limits_set_nothing(calls):
    assert set_limits(None, None, None) == []
    assert calls == []


def test_zero_is_a_limit(calls, on_metal):
    set_limits(None, 0, 0)
    assert calls == [("set_cache_limit", 0)]
    assert on_metal == [0]


def test_limits_hold_for_the_process():
    before = mx.set_memory_limit(10**9)
    try:
        set_limits(2, None, None)
        assert mx.set_memory_limit(10**9) == 2 * 10**9
    finally:
        mx.set_memory_limit(before)


def test_a_wired_limit_without_metal_is_said(calls):
    assert set_limits(None, None, 4) == ["wired_limit_gb has no effect here: there is no Metal device"]
    assert calls == []


@pytest.mark.parametrize("key", ["memory_limit_gb", "cache_limit_gb", "wired_limit_gb"])
def test_bytes_are_not_gb(key, calls):
    """8 GB in bytes would pass for no limit at all, 64 GB in bytes for more than MLX can hold."""
    keys = {"memory_limit_gb": "memory_gb", "cache_limit_gb": "cache_gb", "wired_limit_gb": "wired_gb"}
    for value in (8e9, 64e9):
        limits = dict.fromkeys(keys.values()) | {keys[key]: value}
        with pytest.raises(UserError, match=rf"^{key}: .* more than any machine has; accepted: GB of 1e9 bytes"):
            set_limits(**limits)
    assert calls == []


def test_wired_limit_on_metal(calls, on_metal):
    assert set_limits(None, None, 16) == []
    assert on_metal == [16_000_000_000]
    assert limits_in_effect(None, None, 16)["wired_limit_gb"] == 16


def test_wired_limit_is_the_recommended_one_on_metal(on_metal):
    assert set_limits(None, None, None) == []
    assert on_metal == [20_000_000_000]
    expected = {"memory_limit_gb": None, "cache_limit_gb": None, "wired_limit_gb": 20.0}
    assert limits_in_effect(None, None, None) == expected


def test_wired_limit_above_the_device_is_a_user_error(on_metal):
    with pytest.raises(UserError) as refused:
        set_limits(None, None, 30)
    message = str(refused.value)
    assert message.startswith("wired_limit_gb: 30 is more than this device accepts; accepted: up to 20.0")
    assert "iogpu.wired_limit_mb=28611" in message  # 30e9 bytes in MiB, rounded up
    assert on_metal == []


def test_limits_in_effect_without_metal():
    expected = {"memory_limit_gb": 8, "cache_limit_gb": None, "wired_limit_gb": None}
    assert limits_in_effect(8, None, None) == expected


@pytest.mark.parametrize(
    "text",
    [
        "[metal::malloc] Attempting to allocate 12884901888 bytes which is greater than the maximum allowed",
        "[metal::malloc] Resource limit (499000) exceeded.",
        "[METAL] Command buffer execution failed: Insufficient Memory (kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "[malloc] Unable to allocate 99 bytes.",
        "cudaMallocAsync(&data, size, stream) failed: out of memory",
    ],
)
def test_out_of_memory_is_recognised(text):
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(ValueError(text))


def test_other_failures_are_not_out_of_memory():
    assert not is_out_of_memory(RuntimeError("[matmul] Last dimension of first input does not match"))


def test_the_cache_is_cleared_above_its_threshold(monkeypatch):
    cleared = []
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 1000)
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(1))
    clear_cache_above(1000)
    assert cleared == []
    clear_cache_above(999)
    assert cleared == [1]
