"""The oracle against central differences in float64: its gradients owe nothing to any backend."""

import inputs
import numpy as np
import oracle
import pytest

SHAPE = (2, 6, 1, 2, 3, 2)
SEGMENTS = np.array([[4, 4, 7, 4, 4, 4], [1, 1, 1, 1, 2, 2]], np.int32)
MASK = np.array([[1, 1, 1, 1, 0, 1], [1, 0, 1, 1, 1, 0]], bool)


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one-document", "documents"])
def test_rule_gradients(segments):
    given, cotangents = inputs.rule_inputs(*SHAPE)
    _check(oracle.rule, given, cotangents, segments=segments)


@pytest.mark.parametrize(("segments", "mask"), [(None, None), (None, MASK), (SEGMENTS, MASK)])
def test_layer_gradients(segments, mask):
    given, cotangents = inputs.layer_inputs(*SHAPE)
    _check(oracle.layer, given, cotangents, segments=segments, mask=mask)


def test_rel_l2():
    x = np.arange(4.0)
    assert oracle.rel_l2(1.5 * x, x) == 0.5
    assert oracle.rel_l2(np.zeros(4), np.zeros(4)) == 0
    assert oracle.rel_l2(np.full(4, 2.0), np.zeros(4)) == 4
    assert oracle.rel_l2(np.zeros(4), np.full(4, 1e-42)) == 0
    assert oracle.rel_l2(np.array([0, 1, 2, np.nan]), x) == np.inf
    assert oracle.rel_l2(x[:3], x) == np.inf


def _check(function, given, cotangents, **options):
    given = {name: x.astype(np.float64) for name, x in given.items()}

    def loss(changed):
        out = function(**(given | changed), **options, **cotangents)
        return (out["y"] * cotangents["dy"]).sum() + (out["state_out"] * cotangents["dstate_out"]).sum()

    found = function(**given, **options, **cotangents)
    step = 1e-5
    for name, x in given.items():
        numeric = np.zeros(x.shape)
        for i in np.ndindex(x.shape):
            moved = np.zeros(x.shape)
            moved[i] = step
            numeric[i] = (loss({name: x + moved}) - loss({name: x - moved})) / (2 * step)
        # Second-order differences: truncation step**2 = 1e-10, rounding 1e-16 / step = 1e-11.
        assert oracle.rel_l2(found["d" + name], numeric) < 1e-8, name
