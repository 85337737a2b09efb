"""The layer entry point: eight gradients through the gates, against the oracle and against plain autodiff of mlx-lm."""

import inputs
import mlx.core as mx
import numpy as np
import oracle
import pytest
from gdkernels import gated_delta_rule, gated_delta_update
from mlx_lm.models.gated_delta import gated_delta_update as mlx_lm_update

SHAPE = (2, 39, 1, 2, 32, 32)
CHUNK = 16

GATES = {
    "drawn": {},
    "g-underflows": {"A_log": 12.0},
    "A_log-60": {"A_log": 60.0},
    "g-is-one": {"A_log": -20.0},
    "a+30": {"a": 30.0},
    "a-30": {"a": -30.0},
    "a-both": {"a": np.where(np.arange(39) % 2, 30.0, -30.0)[:, None]},
    "a-both-one-head-underflows": {
        "a": np.where(np.arange(39) % 3, 30.0, -30.0)[:, None],
        "A_log": np.array([12.0, -3.0]),
    },
    "b+30": {"b": 30.0},
    "b-30": {"b": -30.0},
}
MASKS = {
    "right-padded": np.arange(39) < np.array([[39], [20]]),
    "left-padded": np.arange(39) >= np.array([[5], [17]]),
    "holes": np.arange(39) % np.array([[3], [2]]) > 0,
    "row-empty": np.array([[True], [False]]) & np.ones(39, bool),
}

pytestmark = pytest.mark.parametrize("backend", inputs.BACKENDS)


@pytest.mark.parametrize("gates", GATES)
def test_gates(backend, gates):
    given, cotangents = inputs.layer_inputs(*SHAPE, **GATES[gates])
    got = update(backend, given, cotangents)
    oracle.assert_matches(got, represented(oracle.layer(**given, **cotangents), given))


def test_overflowing_A_log(backend):
    """exp(A_log) is infinite in float32: every token drops the state, and no gate's gradient becomes 0 * inf."""
    given, cotangents = inputs.layer_inputs(*SHAPE, A_log=100.0)
    oracle.assert_matches(update(backend, given, cotangents), oracle.layer(**given, **cotangents))


@pytest.mark.parametrize("mask", MASKS)
def test_mask(backend, mask):
    given, cotangents = inputs.layer_inputs(*SHAPE)
    got = update(backend, given, cotangents, mask=MASKS[mask])
    oracle.assert_matches(got, oracle.layer(**given, mask=MASKS[mask], **cotangents))
    for name in ("y", "dq", "dk", "dv", "da", "db"):
        assert not got[name][~MASKS[mask]].any(), name


@pytest.mark.parametrize("mask", MASKS)
def test_mask_with_documents(backend, mask):
    """A document whose first token is masked, as in the rows with holes, starts from nothing all the same."""
    given, cotangents = inputs.layer_inputs(*SHAPE)
    extra = {"mask": MASKS[mask], "segments": inputs.documents(39, [10, 5, 2], [16])}
    got = update(backend, given, cotangents, **extra)
    oracle.assert_matches(got, oracle.layer(**given, **extra, **cotangents))


@pytest.mark.parametrize("T", [1, 2, 3, 4, 63, 64, 65, 130])
def test_agrees_with_autodiff_of_mlx_lm(backend, T):
    agree_with_mlx_lm(backend, (2, T, 1, 2, 32, 32))


def test_agrees_with_autodiff_of_mlx_lm_at_200(backend):
    agree_with_mlx_lm(backend, (1, 200, 1, 3, 64, 64))


def test_absent_state_is_zeros(backend):
    given, cotangents = inputs.layer_inputs(*SHAPE)
    zeros = update(backend, given | {"state": np.zeros_like(given["state"])}, cotangents)
    del zeros["dstate"]
    oracle.assert_same_bits(update(backend, given | {"state": None}, cotangents), zeros)


def test_absent_state_is_zeros_for_the_rule(backend):
    given, cotangents = inputs.rule_inputs(*SHAPE)
    given["state"] = None
    none = oracle.measure(gated_delta_rule, given, **cotangents, backend=backend, chunk_size=CHUNK)
    given["state"] = np.zeros((2, 2, 32, 32), np.float32)
    zeros = oracle.measure(gated_delta_rule, given, **cotangents, backend=backend, chunk_size=CHUNK)
    del zeros["dstate"]
    oracle.assert_same_bits(none, zeros)
    assert not none["dlog_decay"][:, 0].any()  # the first decay multiplies nothing


def update(backend, given, cotangents, **extra):
    return oracle.measure(gated_delta_update, given, **cotangents, backend=backend, chunk_size=CHUNK, **extra)


def represented(want, given):
    """db = beta (1 - beta) dbeta is 0 above b = 17, where 1 - beta is below float32's resolution of beta."""
    return want | {"db": np.where(given["b"] > 17, 0, want["db"])}


def agree_with_mlx_lm(backend, shape):
    given, cotangents = inputs.layer_inputs(*shape)
    given = {name: mx.array(x) for name, x in given.items()}
    want = oracle.measure(mlx_lm_update, given, **cotangents, use_kernel=False)
    got = oracle.measure(gated_delta_update, given, **cotangents, backend=backend)
    oracle.assert_matches(got, want)
