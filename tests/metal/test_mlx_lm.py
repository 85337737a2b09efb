"""A kernel of others: mlx-lm's gated delta step agrees with its own operations, in both harnesses."""

import mlx.core as mx
import mlx_lm.models.gated_delta as mlx_lm
import pytest
from metal import spaces
from metal.emulator import emulated
from mini import relative_l2


@pytest.fixture(autouse=True)
def _metal_is_available(monkeypatch):
    mx.disable_compile()
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)


def inputs(T, Dk, Dv, dtype, *, vector_gates=False):
    """q, k, v, g, beta and state of two value heads that share a key head."""
    mx.random.seed(0)
    q, k = (mx.random.normal((1, T, 1, Dk)) for _ in range(2))
    q, k = mlx_lm.normalize_qk(q, k, inv_scale=Dk**-0.5, eps=1e-6)
    g = mx.random.uniform(0.5, 1, (1, T, 2, Dk) if vector_gates else (1, T, 2))
    beta, state = mx.random.uniform(0, 1, (1, T, 2)), mx.random.normal((1, 2, Dv, Dk))
    return [x.astype(dtype) for x in (q, k, mx.random.normal((1, T, 2, Dv)))] + [g, beta.astype(dtype), state]


@pytest.mark.parametrize(
    ("kernel", "Dk", "grid", "threadgroup"),
    [
        (lambda: mlx_lm._make_gated_delta_kernel(), 32, (32, 16, 2), (32, 4, 1)),
        (lambda: mlx_lm._make_gated_delta_kernel(vectorized=True), 64, (32, 16, 2), (32, 4, 1)),
        (lambda: mlx_lm._make_gated_delta_kernel_xtree(), 128, (32, 16, 2), (32, 4, 1)),
        (lambda: mlx_lm._make_gated_delta_packed_kernel(), 128, (32, 2, 2), (32, 2, 1)),
    ],
    ids=["scalar", "vector", "tree", "packed"],
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_gated_delta_step(kernel, Dk, grid, threadgroup, dtype, request):
    T, Dv = 5, 16
    arrays = inputs(T, Dk, Dv, dtype, vector_gates="vector" in request.node.callspec.id)
    want = mlx_lm.gated_delta_ops(*arrays)
    with emulated() as launches:
        got = kernel()(
            inputs=[*arrays, T],
            template=[("InT", dtype), ("StT", mx.float32), ("Dk", Dk), ("Dv", Dv), ("Hk", 1), ("Hv", 2)],
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=[(1, T, 2, Dv), (1, 2, Dv, Dk)],
            output_dtypes=[dtype, mx.float32],
        )
    # The sums differ in order; y is rounded to dtype, where an ulp is 2**-8 and most elements agree.
    assert relative_l2(got[0], want[0]) < (1e-6 if dtype == mx.float32 else 2e-3)
    assert relative_l2(got[1], want[1]) < 1e-6
    for launch in launches:
        assert not spaces.check(launch.text, launch.inputs, launch.output_dtypes, launch.template)
