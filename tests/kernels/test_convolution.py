"""The causal convolution and its SiLU, in MLX operations and as emulated kernels, against float64."""

import warnings

import emulation
import mlx.core as mx
import numpy as np
import pytest
from gdkernels import causal_convolution, explain_convolution
from gdkernels.convolution import selftest
from gdkernels.convolution.kernel import kernel
from gdkernels.convolution.operations import operations
from gdkernels.testing import metal
from metal.emulator import emulated

# (B, T, channels, taps): T below the taps, around one strip, several; channels of two threadgroups.
SIZES = [(1, 1, 5, 4), (2, 3, 7, 4), (1, 32, 130, 4), (2, 33, 9, 4), (1, 67, 3, 4), (2, 35, 5, 2), (1, 34, 5, 1)]
# float32 sums of four products; a unit of what is stored, at most half of it wrong.
BOUNDS = {mx.float32: 1e-6, mx.bfloat16: 2**-8, mx.float16: 2**-11}


def draw(B, T, channels, taps, seed=0):
    """x, weight, positions, dy: documents of random lengths."""
    rng = np.random.default_rng([seed, B, T, channels, taps])
    starts = rng.random((B, T)) < 0.2
    starts[:, 0] = True
    first = np.maximum.accumulate(np.where(starts, np.arange(T), 0), axis=1)
    x, dy = rng.standard_normal((2, B, T, channels))
    return x, rng.standard_normal((channels, taps, 1)), (np.arange(T) - first).astype(np.int32), dy


def exact(x, weight, positions, dy):
    """y, dx, dweight in float64, token by token."""
    B, T, _ = x.shape
    taps = weight.shape[1]
    y, dx, dweight = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weight)
    for b in range(B):
        for t in range(T):
            reached = range(min(taps - 1, t if positions is None else positions[b, t]) + 1)
            c = sum(weight[:, taps - 1 - back, 0] * x[b, t - back] for back in reached)
            p = np.exp(-np.logaddexp(0, -c))
            y[b, t] = c * p
            dc = dy[b, t] * p * (1 + c * (1 - p))
            for back in reached:
                dx[b, t - back] += weight[:, taps - 1 - back, 0] * dc
                dweight[:, taps - 1 - back, 0] += x[b, t - back] * dc
    return {"y": y, "dx": dx, "dweight": dweight}


def measure(form, x, weight, positions, dy, dtype=mx.float32):
    arrays = [mx.array(x.astype(np.float32)).astype(dtype), mx.array(weight.astype(np.float32))]
    where = None if positions is None else mx.array(positions)
    cotangent = mx.array(dy.astype(np.float32)).astype(dtype)
    (y,), (dx, dweight) = mx.vjp(lambda x, w: form(x, w, where), arrays, [cotangent])
    assert (y.dtype, dx.dtype, dweight.dtype) == (dtype, dtype, mx.float32)
    return {name: np.array(z.astype(mx.float32)) for name, z in {"y": y, "dx": dx, "dweight": dweight}.items()}


def emulate(*arguments, seed=1, **options):
    with emulated(seed=seed):
        return measure(kernel, *arguments, **options)


def assert_near(got, want, bounds):
    for name, value in want.items():
        error = np.linalg.norm(got[name] - value) / np.linalg.norm(value)
        assert error <= bounds[name], f"{name}: {error:.1e}"


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("run", [lambda *a: measure(operations, *a), emulate], ids=["operations", "kernel"])
def test_against_float64(run, size, documents):
    x, weight, positions, dy = draw(*size)
    given = (x, weight, positions if documents else None, dy)
    assert_near(run(*given), exact(*given), dict.fromkeys(("y", "dx", "dweight"), BOUNDS[mx.float32]))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("run", [lambda *a, **o: measure(operations, *a, **o), emulate], ids=["operations", "kernel"])
def test_rounded_once(run, dtype):
    x, weight, positions, dy = draw(2, 37, 6, 4)
    x, dy = (np.array(mx.array(z.astype(np.float32)).astype(dtype).astype(mx.float32), np.float64) for z in (x, dy))
    want = exact(x, weight.astype(np.float32).astype(np.float64), positions, dy)
    bounds = {"y": BOUNDS[dtype], "dx": BOUNDS[dtype], "dweight": 1e-6}
    got = run(x, weight, positions, dy, dtype=dtype)
    if run is not emulate:  # automatic differentiation rounds the gradient of every tap
        bounds["dx"] *= 4
    assert_near(got, want, bounds)


@pytest.mark.parametrize("T", [1, 2, 3, 4, 9])
def test_is_mlx_s_with_its_gradients(T):
    def plain(x, weight, positions):
        c = mx.conv1d(mx.pad(x, [(0, 0), (3, 0), (0, 0)]), weight, groups=6)
        return c * mx.sigmoid(c)

    x, weight, _, dy = draw(2, T, 6, 4)
    want = measure(plain, x, weight, None, dy)
    assert_near(measure(causal_convolution, x, weight, None, dy), want, dict.fromkeys(want, 1e-6))


@pytest.mark.parametrize("run", [lambda *a: measure(operations, *a), emulate], ids=["operations", "kernel"])
def test_documents_share_no_bit(run):
    x, weight, positions, dy = draw(1, 40, 4, 4)
    start = int(np.flatnonzero(positions[0] == 0)[-1])
    other, _, _, other_dy = draw(1, 40, 4, 4, seed=1)
    first = run(x, weight, positions, dy)
    other[:, start:], other_dy[:, start:] = x[:, start:], dy[:, start:]
    second = run(other, weight, positions, other_dy)
    for name in ("y", "dx"):
        assert np.array_equal(first[name][:, start:], second[name][:, start:]), name
        assert not np.array_equal(first[name][:, :start], second[name][:, :start]), name


def test_large_inputs():
    """No overflow in the sigmoid, either side."""
    x, weight, positions, dy = draw(1, 20, 3, 4)
    got = emulate(300 * x, weight, positions, dy)
    assert_near(got, exact(300 * x, weight, positions, dy), dict.fromkeys(got, 1e-5))


def test_same_bits_in_any_order_of_threads():
    given = draw(2, 70, 40, 4)
    first = emulate(*given)
    for seed in (2, 3):
        got = emulate(*given, seed=seed)
        assert all(np.array_equal(got[name], first[name]) for name in first)


def test_address_spaces():
    with emulated() as launches:
        measure(kernel, *draw(1, 40, 5, 4), dtype=mx.bfloat16)
    assert [launch.text.name.rsplit("_", 1)[0] for launch in launches] == ["gd_convolution", "gd_convolution_backward"]
    emulation.check_spaces(launches)


@pytest.mark.parametrize(
    "fault",
    [
        ("gd_convolution", "s < first", "s < first - 1"),
        ("gd_convolution", "min(first + STRIP, tokens)", "first + STRIP"),
        ("gd_convolution_backward", "last + TAPS - 1", "last"),
        ("gd_convolution_backward", "for (int i = 1; i < TAPS; i++) {", "for (int i = 2; i < TAPS; i++) {"),
        ("gd_convolution_backward", "1.0f + c * (1.0f - p)", "1.0f"),
        ("gd_convolution", "TAPS - 1 - i <= back", "TAPS - 2 - i <= back"),
    ],
    ids=str,
)
def test_faults_are_found(fault, monkeypatch):
    given = draw(2, 100, 3, 4)

    def checked():
        assert_near(emulate(*given), exact(*given), dict.fromkeys(("y", "dx", "dweight"), 1e-6))

    emulation.assert_rejected(monkeypatch, fault, checked)


# Which of the two runs


def test_on_a_cpu():
    choice = explain_convolution(mx.bfloat16, mx.bfloat16, 4)
    assert (choice.backend, choice.reason) == ("operations", "CPU device")


def test_kernels_that_pass():
    x, weight, positions, _ = draw(1, 40, 5, 4)
    arrays = [mx.array(z.astype(np.float32)) for z in (x, weight)]
    with metal(selftest=True), emulated() as launches:
        choice = explain_convolution(mx.float32, mx.float32, 4)
        assert choice.backend == "kernel"
        assert choice.reason.startswith("Metal device; self-test ")
        tested = len(launches)
        mx.eval(causal_convolution(*arrays, mx.array(positions)))
        assert len(launches) == tested + 1


@pytest.mark.parametrize(("broken", "words"), [(lambda *a: operations(*a) * 1.01, "1.0e-02"), (None, "TypeError")])
def test_kernels_that_fail_are_told(broken, words, monkeypatch):
    monkeypatch.setattr(selftest, "kernel", broken)
    with metal(selftest=True):
        with pytest.warns(RuntimeWarning, match=words):
            choice = explain_convolution(mx.float32, mx.float32, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert explain_convolution(mx.float32, mx.float32, 4) == choice
    assert choice.backend == "operations"
    assert words in choice.reason


@pytest.mark.parametrize(
    ("x", "weight", "positions", "words"),
    [
        (mx.zeros((2, 3)), mx.zeros((3, 4, 1)), None, "x is"),
        (mx.zeros((1, 2, 3), mx.int32), mx.zeros((3, 4, 1)), None, "x is"),
        (mx.zeros((1, 2, 3)), mx.zeros((4, 4, 1)), None, "weight is"),
        (mx.zeros((1, 2, 3)), mx.zeros((3, 1, 4)), None, "weight is"),
        (mx.zeros((1, 2, 3)), mx.zeros((3, 4, 1)), mx.zeros((1, 3), mx.int32), "positions are"),
        (mx.zeros((1, 2, 3)), mx.zeros((3, 4, 1)), mx.zeros((1, 2)), "positions are"),
    ],
)
def test_wrong_arguments(x, weight, positions, words):
    with pytest.raises(ValueError, match=f"{words}.*accepted"):
        causal_convolution(x, weight, positions)
