"""The estimate of memory against what is measured, and the budget."""

import mlx.core as mx
import pytest
from gdkernels import BACKENDS
from gdkernels.dispatch import default_chunk
from gdkernels.sizes import Sizes

from gdtrain.bench.estimate import estimate_bytes, find_budget
from gdtrain.bench.measure import draw_inputs, layer_rule, loop_rule, measure
from gdtrain.bench.shapes import LOOP, Case, Shape

CASES = [
    Case("", Shape(2, 4, 64, 64), 1, 160, "bfloat16"),
    Case("", Shape(2, 2, 64, 64), 3, 64, "float32"),
    Case("", Shape(2, 6, 96, 32), 1, 96, "bfloat16"),
    Case("", Shape(1, 3, 32, 128), 2, 33, "float32"),
]
FACTOR = 1.5  # the contract of the estimate
FIRST, SECOND = Shape(16, 64, 192, 128), Shape(16, 32, 128, 128)
# Peaks in GB of forward + backward, bfloat16, B = 1. NVIDIA H200, MLX 0.32.4 (CUDA), 2026-11-30.
H200 = [
    ("fused", FIRST, 2048, 1.009),
    ("fused", FIRST, 16384, 7.8),
    ("fused", SECOND, 512, 0.115),
    ("fused", SECOND, 2048, 0.434),
    ("fused", SECOND, 4096, 0.93),
    ("recurrent", FIRST, 2048, 5.75),
    ("recurrent", SECOND, 512, 0.364),
    ("recurrent", SECOND, 2048, 1.47),
    ("chunked", SECOND, 2048, 1.10),
]


def runs(backend, case):
    """On the device of this test run. On a CPU: the loop, and what has no kernels."""
    sizes = Sizes(case.B, case.T, *case.shape, getattr(mx, case.dtype), default_chunk())
    return backend == LOOP or BACKENDS[backend].refusal(sizes) is None


MEASURED_HERE = [(backend, case) for backend in (LOOP, *BACKENDS) for case in CASES if runs(backend, case)]


def test_backends_measured_here():
    assert {LOOP, "reference", "replay", "chunked"} <= {backend for backend, _ in MEASURED_HERE}


@pytest.mark.parametrize(("backend", "case"), MEASURED_HERE, ids=str)
def test_within_a_factor(backend, case):
    inputs = draw_inputs(case)
    rule = loop_rule(inputs) if backend == LOOP else layer_rule(inputs, backend)
    # MLX allocates ahead of the computation, now more and now less.
    peaks = [measure(rule, inputs.primals, inputs.cotangents, 1).peak for _ in range(3)]
    assert min(peaks) / FACTOR < estimate_bytes(case, backend) < max(peaks) * FACTOR


@pytest.mark.parametrize(("backend", "shape", "tokens", "peak_gb"), H200)
def test_within_a_factor_on_a_gpu(backend, shape, tokens, peak_gb, monkeypatch):
    """What a GPU would be told, wherever this runs."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    estimate = estimate_bytes(Case("", shape, 1, tokens, "bfloat16"), backend) / 1e9
    assert peak_gb / FACTOR < estimate < peak_gb * FACTOR


@pytest.mark.parametrize("backend", [LOOP, *BACKENDS])
def test_grows(backend):
    """With T, B and the dtype."""
    case = CASES[0]
    first = estimate_bytes(case, backend)
    for larger in (case._replace(T=1000), case._replace(B=4), case._replace(dtype="float32")):
        assert estimate_bytes(larger, backend) > first


def test_loop_at_the_size_that_fails():
    """The published table: out of memory on 36 GB at T = 2048."""
    case = Case("", Shape(16, 64, 192, 128), 1, 2048, "bfloat16")
    assert estimate_bytes(case, LOOP) > 36e9
    assert estimate_bytes(case, "chunked") < 4e9


def test_budget(monkeypatch):
    assert find_budget(2.5) == (2_500_000_000, "--budget-gb")
    info = {"device_name": "a GPU"}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    budget, source = find_budget(None)
    assert "physical" in source
    assert budget > 1e8
    info["total_memory"] = 100_000_000
    assert find_budget(None) == (90_000_000, "90% of the device's memory")
    info["max_recommended_working_set_size"] = 75_000_000
    assert find_budget(None)[0] == 75_000_000
