"""The float64 recurrence of the benchmarks against automatic differentiation of the specification."""

import mlx.core as mx
import numpy as np
from float64_rule import INPUTS, float64_rule
from gdkernels import gated_delta_rule


def test_against_the_reference():
    B, T, Hk, Hv, Dk, Dv = 2, 7, 2, 6, 8, 4
    rng = np.random.default_rng(0)
    k = rng.standard_normal((B, T, Hk, Dk))
    arrays = [
        rng.standard_normal((B, T, Hk, Dk)) / 3,
        k / np.linalg.norm(k, axis=-1, keepdims=True),
        rng.standard_normal((B, T, Hv, Dv)),
        -rng.random((B, T, Hv)),
        rng.random((B, T, Hv)),
        rng.standard_normal((B, Hv, Dv, Dk)),
        rng.standard_normal((B, T, Hv, Dv)),
        rng.standard_normal((B, Hv, Dv, Dk)),
    ]
    exact = float64_rule(np, *arrays)
    *primals, dy, dstate = (mx.array(x.astype(np.float32)) for x in arrays)
    outputs, gradients = mx.vjp(lambda *x: list(gated_delta_rule(*x, backend="reference")), primals, [dy, dstate])
    found = dict(zip(["y", "state", *("d" + name for name in INPUTS)], [*outputs, *gradients], strict=True))
    assert list(found) == list(exact)
    for name, x in found.items():
        assert exact[name].dtype == np.float64
        assert np.linalg.norm(np.array(x) - exact[name]) < 2e-6 * np.linalg.norm(exact[name]), name
