"""The same input gives the same bits, forward and gradients."""

import inputs
import oracle
import pytest
from gdkernels import gated_delta_rule, gated_delta_update


@pytest.mark.parametrize("backend", inputs.BACKENDS)
@pytest.mark.parametrize("segments", [None, inputs.documents(150, [70, 64], [3])], ids=["one-document", "documents"])
def test_rule(backend, segments):
    given, cotangents = inputs.rule_inputs(2, 150, 2, 4, 64, 64, decay="mixed")
    first, second = (
        oracle.measure(gated_delta_rule, given, **cotangents, backend=backend, segments=segments) for _ in range(2)
    )
    oracle.assert_same_bits(first, second)


@pytest.mark.parametrize("backend", inputs.BACKENDS)
def test_update(backend):
    given, cotangents = inputs.layer_inputs(4, 70, 2, 4, 32, 32)
    first, second = (oracle.measure(gated_delta_update, given, **cotangents, backend=backend) for _ in range(2))
    oracle.assert_same_bits(first, second)
