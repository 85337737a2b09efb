"""Corners of the rule that every GPU kernel meets in the same way, emulated, against the float64 oracle."""

import emulation
import inputs
import pytest
import test_fused
import test_recurrent
from gdkernels import BACKENDS

CORNERS = {"fused": test_fused.CORNER, "recurrent": test_recurrent.CORNER}

pytestmark = pytest.mark.parametrize("backend", CORNERS)


def check(backend, change=None, **options):
    emulation.check(BACKENDS[backend].rule, CORNERS[backend], change, **options)


@pytest.mark.parametrize("decay", inputs.DECAYS)
def test_decays(backend, decay):
    check(backend, decay=decay)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("decay", ["one", "mild", "zero"])
def test_beta(backend, decay, beta):
    check(backend, decay=decay, beta=beta)


@pytest.mark.parametrize("change", emulation.CHANGES)
def test_corners(backend, change):
    check(backend, change)
