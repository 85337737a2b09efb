"""What the emulated kernels of any GPU backend must do. A size is (T, chunk_size, B, Hk, Hv, Dk, Dv)."""

from functools import cache

import inputs
import mlx.core as mx
import numpy as np
import oracle
import pytest
from gdkernels.portable import program
from metal import spaces
from metal.emulator import MetalFault, emulated

CHANGES = ("equal keys", "zero keys", "zero state", "zero dstate_out", "zero dy")
# Half a unit in the last place of what is stored, relative, at most.
ROUNDING = {mx.float32: None, mx.bfloat16: 2**-8, mx.float16: 2**-11}
_STORED = ("y", "dq", "dk", "dv")


@cache
def expected(size, change=None, **options):
    """(inputs, cotangents, what the oracle makes of them); shared, not to be written to."""
    T, _, B, *dimensions = size
    given, cotangents = inputs.rule_inputs(B, T, *dimensions, **options)
    inputs.change(given, cotangents, change)
    return given, cotangents, oracle.rule(**given, **cotangents)


def run(rule, size, given, cotangents, seed=1):
    with emulated(seed=seed):
        return oracle.measure(rule, given, **cotangents, chunk_size=size[1])


def launches_of(rule, size, dtype=mx.float32):
    """All launches of forward and backward."""
    given, cotangents, _ = expected(size)
    with emulated() as launches:
        oracle.measure(rule, _with_activations(given, dtype), **cotangents, chunk_size=size[1])
    return launches


def check(rule, size, change=None, **options):
    given, cotangents, want = expected(size, change, **options)
    got = run(rule, size, given, cotangents)
    oracle.assert_matches(got, want)
    assert got.keys() == want.keys()


def check_activations(rule, size, dtype):
    """q, k and v of the dtype: what is float32 keeps its bound, the rest is rounded when it is stored."""
    given, cotangents, _ = expected(size)
    given = _with_activations(given, dtype)
    rounded = {name: _float32(x) if name in "qkv" else x for name, x in given.items()}
    cotangents = cotangents | {"dy": _float32(mx.array(cotangents["dy"]).astype(dtype))}
    got, want = run(rule, size, given, cotangents), oracle.rule(**rounded, **cotangents)
    oracle.assert_matches(got, {name: want[name] for name in _STORED}, bound=ROUNDING[dtype])
    oracle.assert_matches(got, {name: x for name, x in want.items() if name not in _STORED})


def check_order_of_threads(rule, size):
    """The same bits again, and in any order of lanes, SIMD groups and threadgroups."""
    given, cotangents, _ = expected(size, decay="mixed")
    first = run(rule, size, given, cotangents)
    for seed in (1, 2, 3):
        oracle.assert_same_bits(run(rule, size, given, cotangents, seed=seed), first)


def check_documents(rule, size, start):
    """A decay of -inf at a document's first token: what is before it changes no bit behind it, and the reverse."""
    given, cotangents, _ = expected(size)
    given = {name: x.copy() for name, x in given.items()}
    given["log_decay"][:, start] = -np.inf
    first = run(rule, size, given, cotangents)
    other, other_cotangents = inputs.rule_inputs(size[2], size[0], *size[3:], seed=1)
    mixed = {name: x.copy() for name, x in given.items()}
    for name in ("q", "k", "v", "log_decay", "beta"):
        mixed[name][:, :start] = other[name][:, :start]
    second = run(rule, size, mixed | {"state": other["state"]}, cotangents)
    dy = cotangents["dy"].copy()
    dy[:, start:] = other_cotangents["dy"][:, start:]
    third = run(rule, size, given, {"dy": dy, "dstate_out": other_cotangents["dstate_out"]})
    assert not np.array_equal(first["y"][:, :start], second["y"][:, :start])
    assert not np.array_equal(first["dv"][:, start:], third["dv"][:, start:])
    for name in ("y", "dq", "dk", "dv", "dlog_decay", "dbeta"):
        assert np.array_equal(first[name][:, start:], second[name][:, start:]), name
        assert np.array_equal(first[name][:, :start], third[name][:, :start]), name
    assert np.array_equal(first["state_out"], second["state_out"])
    assert np.array_equal(first["dstate"], third["dstate"])


def check_rows_alone(rule, size):
    """Every row of a batch gets what it gets alone."""
    given, cotangents, _ = expected(size)
    together = run(rule, size, given, cotangents)
    for row in range(size[2]):
        alone = run(rule, size, *({name: x[row : row + 1] for name, x in xs.items()} for xs in (given, cotangents)))
        oracle.assert_same_bits(alone, {name: x[row : row + 1] for name, x in together.items()})


def check_spaces(launches):
    for launch in launches:
        found = spaces.check(launch.text, launch.inputs, launch.output_dtypes, launch.template)
        assert not found, f"{launch.text.name}: {found}"


def assert_rejected(monkeypatch, fault, checked):
    """`checked` fails by the comparison, or by the emulator, once a text is broken.

    `fault`: name of the program, what stands in its header or body, what is put in its place.
    """
    name, text, instead = fault
    broken = []

    def breaking(make):
        def made(of, *arguments):
            whole = make(of, *arguments)
            if of.name != name or text not in whole:
                return whole
            broken.append(of)
            return whole.replace(text, instead)

        return made

    for maker in ("header_text", "body_text"):
        monkeypatch.setattr(program, maker, breaking(getattr(program, maker)))
    with pytest.raises((MetalFault, AssertionError)) as rejected:
        checked()
    assert broken, f"{text!r} is nowhere in {name}"
    assert "does not compile" not in str(rejected.value)


def _with_activations(given, dtype):
    return given | {name: mx.array(given[name]).astype(dtype) for name in "qkv"}


def _float32(x):
    return np.array(x.astype(mx.float32))
