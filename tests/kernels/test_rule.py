"""Every backend against the float64 oracle: output, final state and six gradients, per tensor (bounds in oracle.py)."""

from functools import cache

import inputs
import numpy as np
import oracle
import pytest
from gdkernels import gated_delta_rule

# (T, C, B, Hk, Hv, Dk, Dv): every T around one chunk and past three, every batch, head ratio and head dimension in use.
SIZES = [
    (1, 16, 1, 1, 1, 8, 8),
    (2, 16, 2, 1, 2, 32, 8),
    (3, 16, 4, 2, 6, 8, 32),
    (15, 16, 1, 1, 4, 64, 96),
    (16, 16, 8, 1, 1, 32, 64),
    (17, 16, 2, 2, 2, 96, 32),
    (17, 16, 1, 1, 2, 256, 256),
    (55, 16, 2, 1, 3, 64, 128),
    (1, 64, 2, 1, 2, 128, 192),
    (2, 64, 1, 1, 1, 192, 256),
    (3, 64, 1, 1, 2, 256, 128),
    (63, 64, 1, 1, 2, 128, 64),
    (64, 64, 2, 1, 1, 96, 192),
    (65, 64, 4, 2, 2, 32, 32),
    (65, 64, 8, 1, 4, 8, 8),
    (199, 64, 2, 2, 4, 32, 64),
    (199, 64, 1, 1, 2, 192, 128),
]
CORNER = (55, 16, 2, 1, 2, 32, 32)
LONG = (199, 64, 2, 1, 2, 32, 32)

DOCUMENTS = {
    "inside-chunks": inputs.documents(55, [5, 20], [37]),
    "chunk-edges": inputs.documents(55, [16, 16], [16, 32]),
    "around-edges": inputs.documents(55, [15, 2, 15], [17, 14, 2]),
    "length-one": inputs.documents(55, [1, 1, 1, 13, 1, 30, 1], [1] * 54),
    "last-token": inputs.documents(55, [54], [48]),
    "value-returns": np.array([[1] * 10 + [2] * 10 + [1] * 35, [1] * 7 + [2] + [1] * 47], np.int32),
    "one-document": np.full((2, 55), 9, np.int32),
}

pytestmark = pytest.mark.parametrize("backend", inputs.BACKENDS)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(backend, size):
    check(backend, size)


@pytest.mark.parametrize("size", [CORNER, LONG], ids=["C16", "C64"])
@pytest.mark.parametrize("decay", inputs.DECAYS)
def test_decays(backend, decay, size):
    check(backend, size, decay=decay)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("decay", ["one", "mild", "zero"])
def test_beta(backend, decay, beta):
    check(backend, CORNER, decay=decay, beta=beta)


@pytest.mark.parametrize("beta", [0.0, 0.999, 1.0])
@pytest.mark.parametrize("decay", ["one", "mild"])
def test_equal_keys(backend, decay, beta):
    """Worst case of the triangular system: the powers of A reach 1e18."""
    check(backend, (200, 64, 1, 1, 2, 32, 32), "equal keys", decay=decay, beta=beta)


def test_equal_keys_without_state(backend):
    """The update of a token all but replaces the only direction in use, so the decay has all but no effect.

    dlog_decay is 1e-3 of the terms that cancel in it, whatever the order of summation: it is held to an absolute bound,
    three times the 6.4e-6 of the step-by-step loop in float32; the other tensors keep theirs.
    """
    given, cotangents, want = expected(
        (200, 64, 1, 1, 2, 32, 32), "equal keys, no state", None, decay="one", beta=0.999
    )
    got = oracle.measure(gated_delta_rule, given, **cotangents, backend=backend)
    assert np.abs(got.pop("dlog_decay") - want["dlog_decay"]).max() < 2e-5
    oracle.assert_matches(got, {name: want[name] for name in got})


@pytest.mark.parametrize("keys", ["zero keys", "every third key zero"])
def test_zero_keys(backend, keys):
    check(backend, CORNER, keys)


@pytest.mark.parametrize("change", ["no state", "zero state", "zero dstate_out", "zero dy"])
def test_ends(backend, change):
    check(backend, CORNER, change)


@pytest.mark.parametrize("decay", ["mild", "one", "mixed"])
@pytest.mark.parametrize("layout", DOCUMENTS)
def test_documents(backend, layout, decay):
    check(backend, CORNER, layout=layout, decay=decay)


def check(backend, size, change=None, layout=None, **options):
    chunk_size = size[1]
    given, cotangents, want = expected(size, change, layout, **options)
    extra = {} if layout is None else {"segments": DOCUMENTS[layout]}
    got = oracle.measure(gated_delta_rule, given, **cotangents, backend=backend, chunk_size=chunk_size, **extra)
    oracle.assert_matches(got, want)
    assert got.keys() == want.keys()


@cache
def expected(size, change, layout, **options):
    T, _, B, *dimensions = size
    given, cotangents = inputs.rule_inputs(B, T, *dimensions, **options)
    inputs.change(given, cotangents, change)
    want = oracle.rule(**given, segments=None if layout is None else DOCUMENTS[layout], **cotangents)
    if given["state"] is None:
        del want["dstate"]
    return given, cotangents, want
