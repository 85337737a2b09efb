"""Gates stay in float32 whatever the activations are: in bfloat16 a decay of 0.999 is exactly 1."""

import math

import inputs
import mlx.core as mx
import numpy as np
import oracle
import pytest
from gdkernels import gated_delta_rule, gated_delta_update

T, SHAPE = 512, (1, 512, 1, 2, 32, 32)

pytestmark = pytest.mark.parametrize("backend", inputs.BACKENDS)


@pytest.mark.parametrize(("decay", "left"), [(0.998, 0.359), (0.9985, 0.464), (0.999, 0.599)])
def test_constant_decay(backend, decay, left):
    given, _ = inputs.rule_inputs(*SHAPE, beta=0)
    given = _cast(given, "qkv")
    given["log_decay"] = mx.full(given["log_decay"].shape, math.log(decay))
    given["state"] = mx.ones(given["state"].shape)
    y, state = gated_delta_rule(**given, backend=backend)
    _check(y, state, decay, left)


@pytest.mark.parametrize(("decay", "left"), [(0.998, 0.359), (0.9985, 0.464), (0.999, 0.599)])
def test_constant_decay_through_the_layer(backend, decay, left):
    # softplus(0) = log 2, so A_log alone sets the decay; sigmoid(-100) leaves no update.
    given, _ = inputs.layer_inputs(*SHAPE, a=0, b=-100, dt_bias=0, A_log=math.log(-math.log(decay) / math.log(2)))
    given = _cast(given, "qkvab")
    given["state"] = mx.ones(given["state"].shape)
    y, state = gated_delta_update(**given, backend=backend)
    _check(y, state, decay, left)


@pytest.mark.parametrize(("dtype", "rounding"), [(mx.bfloat16, 2**-8), (mx.float16, 2**-11)], ids=["bf16", "f16"])
def test_half_activations(backend, dtype, rounding):
    """Only the rounding of the half-precision outputs and gradients themselves separates them from float64."""
    given, cotangents = inputs.rule_inputs(2, 39, 1, 2, 32, 32)
    given = _cast(given, "qkv", dtype)
    cotangents["dy"] = _float32(mx.array(cotangents["dy"]).astype(dtype))
    want = oracle.rule(**{name: _float32(x) for name, x in given.items()}, **cotangents)
    got = oracle.measure(gated_delta_rule, given, **cotangents, backend=backend, chunk_size=16)
    rounded = {name: want.pop(name) for name in ("y", "dq", "dk", "dv")}
    oracle.assert_matches(got, want)
    # One rounding at worst everywhere; random roundings come to 0.43 of it.
    oracle.assert_matches(got, rounded, bound=rounding)


def test_dtypes_of_the_rule(backend):
    given, cotangents = inputs.rule_inputs(1, 5, 1, 2, 32, 32)
    _check_dtypes(gated_delta_rule, _cast(given, "qkv"), cotangents, backend)


@pytest.mark.parametrize("bf16", ["qkv", "qkvab", ["q", "k", "v", "a", "b", "dt_bias"]], ids=str)
def test_dtypes_of_the_layer(backend, bf16):
    given, cotangents = inputs.layer_inputs(1, 5, 1, 2, 32, 32)
    _check_dtypes(gated_delta_update, _cast(given, bf16), cotangents, backend)


def _check(y, state, decay, left):
    assert (y.dtype, state.dtype) == (mx.bfloat16, mx.float32)
    assert abs(decay**T - left) < 1e-3
    # The exact power; 512 roundings of a float32 logarithm are worth 3e-5.
    assert np.abs(np.array(state) - decay**T).max() < 1e-3


def _check_dtypes(function, given, cotangents, backend):
    def loss(given):
        y, state = function(**given, backend=backend)
        assert (y.dtype, state.dtype) == (mx.bfloat16, mx.float32)
        return (y * mx.array(cotangents["dy"])).sum() + (state * mx.array(cotangents["dstate_out"])).sum()

    gradients = mx.grad(loss)(given)
    assert {name: x.dtype for name, x in gradients.items()} == {name: x.dtype for name, x in given.items()}


def _cast(given, names, dtype=mx.bfloat16):
    return {name: mx.array(x).astype(dtype if name in names else mx.float32) for name, x in given.items()}


def _float32(x):
    return np.array(x.astype(mx.float32))
