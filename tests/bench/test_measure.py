"""Inputs, clock and errors."""

import mlx.core as mx
import numpy as np
import pytest

from gdtrain.bench.measure import (
    LAYER_INPUTS,
    draw_inputs,
    layer_rule,
    loop_rule,
    measure,
    products_are_exact,
    relative_l2,
    results,
    worst_error,
)
from gdtrain.bench.shapes import Case, Shape

CASE = Case("", Shape(1, 2, 16, 8), 2, 9, "float32")


@pytest.fixture(scope="module")
def inputs():
    return draw_inputs(CASE)


def test_inputs(inputs):
    shapes = [x.shape for x in inputs.primals]
    assert shapes == [(2, 9, 1, 16), (2, 9, 1, 16), (2, 9, 2, 8), (2, 9, 2), (2, 9, 2), (2, 2, 8, 16)]
    np.testing.assert_allclose(np.linalg.norm(np.array(inputs.primals[0]), axis=-1), 16**-0.5, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(np.array(inputs.primals[1]), axis=-1), 1, rtol=1e-5)
    again = draw_inputs(CASE)
    assert all(mx.array_equal(x, y) for x, y in zip(inputs.primals, again.primals, strict=True))


def test_rounded_inputs_keep_their_values():
    rounded = draw_inputs(CASE._replace(dtype="bfloat16"))
    wide = rounded.astype(mx.float32)
    assert [x.dtype for x in wide.primals] == [mx.float32] * 6
    assert all(mx.array_equal(x.astype(mx.float32), y) for x, y in zip(rounded.primals, wide.primals, strict=True))
    assert rounded.primals[5].dtype == mx.float32


def test_counts_and_peak(inputs):
    timing = measure(layer_rule(inputs, "chunked"), inputs.primals, inputs.cotangents, 3)
    assert (len(timing.forward_ms), len(timing.both_ms)) == (3, 3)
    assert timing.forward > 0
    assert timing.both > 0
    assert timing.peak > sum(x.nbytes for x in [*inputs.primals, *inputs.cotangents])
    seen = []
    timing = measure(layer_rule(inputs, "chunked"), inputs.primals, inputs.cotangents, lambda ms: seen.append(ms) or 2)
    assert len(timing.both_ms) == 2
    assert seen[0] > 0


def test_loop_and_backends_agree(inputs):
    """float32: the loop of mlx-lm computes the same function of the same inputs, gradients and all."""
    exact = results(layer_rule(inputs, "chunked"), inputs.primals, inputs.cotangents)
    assert list(exact) == ["y", "state", *("d" + name for name in LAYER_INPUTS)]
    for rule in (loop_rule(inputs), layer_rule(inputs, "replay")):
        error, _ = worst_error(results(rule, inputs.primals, inputs.cotangents), exact)
        assert error < 1e-4


def test_broken_rule_is_named(inputs):
    """Negative control: a gate shifted by one token."""
    right = layer_rule(inputs, "chunked")
    exact = results(right, inputs.primals, inputs.cotangents)

    def broken(q, k, v, a, b, state):
        return right(q, k, v, mx.roll(a, 1, axis=1), b, state)

    error, name = worst_error(results(broken, inputs.primals, inputs.cotangents), exact)
    assert error > 1e-2
    assert name in exact


def test_relative_l2():
    x = np.array([3.0, 4.0], np.float32)
    assert relative_l2(x, x) == 0
    assert relative_l2(np.array([3.0, 4.5]), x) == pytest.approx(0.1)
    assert relative_l2(np.array([3.0, np.nan]), x) == float("inf")
    tensors = {"y": x, "dq": x}
    assert worst_error({"y": x, "dq": x * np.inf}, tensors) == (float("inf"), "dq")


def test_products_on_the_cpu_are_exact():
    if mx.default_device() == mx.cpu:
        assert products_are_exact()
