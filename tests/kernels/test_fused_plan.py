"""Threads, threadgroup memory and registers that the fused kernels are planned to take, for all head dimensions."""

from itertools import pairwise

import emulation
import pytest
from fused_plans import M1, M4, STAGES, plan_of
from gdkernels.fused import plan

HEAD_DIMS = [(Dk, Dv) for Dk in (16, 32, 48, 80, 96, 128, 144, 192, 208, 256) for Dv in (16, 48, 64, 96, 128, 176, 256)]


# Name, Apple generation, KB of threadgroup memory.
@pytest.mark.parametrize("C", plan.CHUNKS)
@pytest.mark.parametrize("dtype", list(emulation.ROUNDING), ids=str)
@pytest.mark.parametrize(
    "where", [("metal", M1, 32), ("metal", M4, 32), ("cuda", None, 227), ("cuda", None, 99)], ids=str
)
def test_resources(where, dtype, C, on, monkeypatch):
    """Threads, threadgroup memory and, on Metal, registers of every stage."""
    machine, generation, kilobytes = where
    on(generation)
    monkeypatch.setattr(plan, "shared_bytes", lambda _: kilobytes * 1024)
    for Dk, Dv in HEAD_DIMS:
        for heads in ((1, 1), (16, 32), (16, 64)):
            for exact in (True, False):
                planned = plan_of(machine, (1, C, 1, *heads, Dk, Dv), dtype, exact)
                for name in STAGES:
                    check_stage(planned, name, kilobytes * 1024)
                if machine == "metal":
                    check_registers(planned)


def check_stage(planned, name, limit):
    stage = getattr(planned, name)
    constants = stage.constants
    assert stage.threads == 32 * constants["GROUPS"] <= 1024
    assert 4 * stage.arena <= limit
    places = sorted(
        (constants[f"AT_{piece}"], piece, -(-size // 4))
        for piece, size in bytes_of(planned, constants).items()
        if f"AT_{piece}" in constants and (constants["STAGED"] or piece in ("DECAYS", "A", "TEMPORARY", "SPANNED"))
    )
    for (at, piece, size), (after, other, _) in pairwise(places):
        apart = name != "keys" or {piece, other} in ({"S", "DS"}, {"K", "Q"})  # K and Q take the place of S and DS
        assert at + size <= after or not apart, (piece, other)
    for at, piece, size in places:
        assert at % 4 == 0, piece
        assert at + size <= constants.get("STAGE_FLOATS", stage.arena), piece
    assert constants.get("STAGES", 1) * constants.get("STAGE_FLOATS", 0) * constants["STAGED"] <= stage.arena


def bytes_of(planned, constants):
    """What the texts write to, by the names of plan.py."""
    C, Dv, factor = planned.C, planned.Dv, planned.parts * planned.factor.size
    activations = {name: C * constants.get(f"{name}_LD", 0) * planned.dtype.size for name in ("Q", "K", "V")}
    floats = {
        "DECAYS": 3 * C + C // 8,
        "A": C * constants.get("A_LD", 0),
        "TEMPORARY": C // 2 * constants.get("TEMPORARY_LD", 0),
        "SPANNED": C * constants.get("SPANNED_LD", 0),
        "SCALES": 3 * C,
    }
    factors = {"M": C * C, "P": C * C, "DELTA": C * Dv, "S": Dv * planned.block, "DS": Dv * planned.block}
    return activations | {n: 4 * x for n, x in floats.items()} | {n: factor * x for n, x in factors.items()}


def check_registers(planned):
    """Accumulators of a lane, and the factors that lie beside them, at most 96 floats: see the arrays of the texts."""
    C, block = planned.C, planned.block
    columns = {
        "intra": 2 * C,  # qk, kk
        "pairs": 4 * C + 96,  # through_P, through_A, dP, dA; three left factors and the next three
        "keys": 5 * block + 96,  # dq, dk, dy_S, x_S, delta_dS; the same
        "sweep": planned.Dk + 3 * C,  # S, x, delta, readout
        "delta": 2 * C,  # x, solved
    }
    for name, width in columns.items():
        assert getattr(planned, name).rows * width / 32 <= 96, name


def test_chunks_that_fit_into_registers():
    assert [plan.fitting_chunk("metal", Dk, 64) for Dk in (16, 192, 208, 256)] == [64, 64, 32, 32]
    assert plan.fitting_chunk("cuda", 256, 64) == 64
