"""Each row of a batch has the outputs and gradients that it has alone.

A released MLX read the update of a scatter-add with a wrong batch stride, which gave right gradients to row 0 only.
"""

import inputs
import numpy as np
import oracle
import pytest
from gdkernels import gated_delta_rule, gated_delta_update

LENGTHS = (5, 17, 33, 64)

pytestmark = pytest.mark.parametrize("backend", inputs.BACKENDS)


@pytest.mark.parametrize("B", [2, 4, 8])
def test_rows_alone(backend, B):
    given, cotangents = inputs.rule_inputs(B, 39, 1, 2, 32, 32)
    batch = oracle.measure(gated_delta_rule, given, **cotangents, backend=backend, chunk_size=16)
    for row in range(B):
        alone = oracle.measure(
            gated_delta_rule, _row(given, row), **_row(cotangents, row), backend=backend, chunk_size=16
        )
        oracle.assert_matches(_row(batch, row), alone)


def test_ragged_rows(backend):
    """Right-padded to 64: padding gets nothing, rows get their own, and the shared weights get the sum over rows."""
    given, cotangents = inputs.layer_inputs(4, 64, 1, 2, 32, 32)
    given["state"] = None
    mask = np.arange(64) < np.array(LENGTHS)[:, None]
    batch = oracle.measure(gated_delta_update, given, **cotangents, backend=backend, chunk_size=16, mask=mask)
    shared = {"dA_log": 0.0, "ddt_bias": 0.0}
    for row, length in enumerate(LENGTHS):
        cut = {name: x if x is None or x.ndim == 1 else x[row : row + 1, :length] for name, x in given.items()}
        ends = {"dy": cotangents["dy"][row : row + 1, :length], "dstate_out": cotangents["dstate_out"][row : row + 1]}
        alone = oracle.measure(gated_delta_update, cut, **ends, backend=backend, chunk_size=16)
        shared = {name: total + alone.pop(name) for name, total in shared.items()}
        found = {
            name: x if name == "state_out" else x[:, :length] for name, x in _row(batch, row).items() if name in alone
        }
        oracle.assert_matches(found, alone)
        padding = [batch["d" + name][row, length:] for name in ("q", "k", "v", "a", "b")]
        assert not any(x.any() for x in padding)
    oracle.assert_matches(batch, shared)


def _row(arrays, row):
    return {name: x[row : row + 1] for name, x in arrays.items()}
