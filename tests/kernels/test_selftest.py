"""The self-test accepts what is right, in every dtype, and rejects each single fault by name."""

import inputs
import mlx.core as mx
import pytest
from gdkernels import explain, selftest
from gdkernels.backends import BACKENDS
from gdkernels.chunked import chunked
from gdkernels.reference import reference
from gdkernels.selftest import TENSORS
from gdkernels.sizes import Sizes
from gdkernels.testing import metal
from metal.emulator import emulated
from stubs import raising, scaled, spoilt, stub

# Heads, head dimensions and chunk as small as a kernel might still take them.
SIZES = Sizes(1, 64, 4, 8, 32, 16, mx.bfloat16, 16)


def failed(result):
    return {error.tensor for error in result.errors if not error.passed}


@pytest.mark.parametrize("name", inputs.BACKENDS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_right_backends_pass(name, dtype):
    result = selftest.run(BACKENDS[name], SIZES._replace(dtype=dtype))
    assert result.passed, result.summary()
    assert {error.tensor for error in result.errors} == set(TENSORS)
    assert {error.dtype for error in result.errors} == {"float32", "bfloat16", str(dtype).removeprefix("mlx.core.")}
    assert "float32" in result.summary()


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (3, 9), (4, 16)], ids=str)
@pytest.mark.parametrize("C", [1, 16, 300])
def test_any_sizes_pass(heads, C):
    result = selftest.run(stub(), SIZES._replace(Hk=heads[0], Hv=heads[1], C=C))
    assert result.passed, result.summary()


def test_what_is_compared():
    """B = 2, a ragged last chunk, heads that share a key head, a state and its cotangent, decays of -inf; all heads."""
    seen = []

    def rule(*arguments):
        *arrays, C = arguments
        assert [x.dtype for x in arrays[3:]] == [mx.float32] * 3
        assert C == 16
        seen.append((*arrays[0].shape, *arrays[2].shape[2:], arrays[0].dtype))
        return chunked(*arguments)

    assert selftest.run(stub(rule=rule), SIZES).passed
    few, all_heads = (2, 35, 2, 32, 4, 16), (2, 19, 4, 32, 8, 16)
    assert seen == [(*few, d) for d in [mx.float32] * 2 + [mx.bfloat16] * 2] + [(*all_heads, mx.bfloat16)]
    for case in selftest._cases(stub(), SIZES):
        (_, _, _, log_decay, _, state), (_, d_state) = selftest._inputs(case)
        assert (log_decay == -mx.inf).any(axis=(1, 2)).all()
        assert mx.abs(state).min() > 0 < mx.abs(d_state).min()


@pytest.mark.parametrize("heads", [1, 4, 6])
@pytest.mark.parametrize("case", selftest._cases(stub(), SIZES._replace(Hk=6, Hv=12))[-2:], ids=lambda case: case.name)
def test_the_exact_side_in_parts_is_the_whole(case, heads, monkeypatch):
    monkeypatch.setattr(selftest, "_heads_at_once", lambda case: heads)
    given = selftest._inputs(case)
    whole = selftest._measure(reference, *given, case.sizes.C)
    for part, tensor in zip(selftest._exact(case, *given), whole, strict=True):
        assert selftest._relative_l2(part, tensor) < 2e-3


@pytest.mark.usefixtures("on_a_cpu")  # a GPU is given more before it has done the first
@pytest.mark.parametrize("heads", [(16, 32, 128, 128), (16, 64, 192, 128)], ids=str)
def test_memory_of_the_exact_side(heads):
    cases = selftest._cases(stub(), Sizes(1, 1024, *heads, mx.bfloat16, 64))
    for case in (cases[0], cases[-1]):
        given = selftest._inputs(case)
        mx.eval(given)
        mx.clear_cache()
        mx.reset_peak_memory()
        selftest._exact(case, *given)
        assert mx.get_peak_memory() < 300e6, case.name


@pytest.mark.parametrize("tensor", TENSORS)
def test_one_percent_is_rejected(tensor):
    result = selftest.run(stub(rule=scaled(tensor, 1.01)), SIZES)
    assert not result.passed
    assert failed(result) == {tensor}
    assert result.worst.tensor == tensor
    assert result.worst.error == pytest.approx(0.01, rel=0.01)
    assert all(word in result.summary() for word in (tensor, "1.0e-02", "1 of 8 tensors"))


@pytest.mark.parametrize("tensor", TENSORS)
def test_one_percent_is_rejected_with_the_bounds_of_tf32(tensor, monkeypatch):
    monkeypatch.setattr(selftest, "rounds_to_tf32", lambda: True)
    result = selftest.run(stub(rule=scaled(tensor, 1.01), text=""), SIZES)
    assert failed(result) == {tensor}
    assert {e.bound for e in result.errors} == {5e-3}
    assert selftest.run(stub(text=""), SIZES).passed


FAULTS = {
    "dropped dstate": (scaled("dstate", 0), {"dstate"}),
    "NaN": (scaled("dbeta", mx.nan), {"dbeta"}),
    "one NaN": (
        spoilt(lambda x: x | {n: mx.where(mx.arange(t.size).reshape(t.shape) == 7, mx.nan, t) for n, t in x.items()}),
        set(TENSORS),
    ),
    "outputs stay zero": (scaled("y", 0), {"y"}),
    "gradients stop at the start of a document": (
        lambda q, k, v, g, beta, state, C: chunked(q, k, v, mx.where(g == -mx.inf, -80.0, g), beta, state, C),
        set(),
    ),
    "a document leaks": (
        lambda q, k, v, g, beta, state, C: chunked(q, k, v, mx.where(g == -mx.inf, -0.1, g), beta, state, C),
        set(TENSORS),
    ),
    "gates in bfloat16": (
        lambda q, k, v, g, beta, state, C: chunked(
            q, k, v, mx.log(mx.exp(g).astype(mx.bfloat16).astype(mx.float32)), beta, state, C
        ),
        {"y", "state_out", "dstate", "dv", "dk", "dq", "dlog_decay", "dbeta"},
    ),
    "final state's cotangent forgotten": (
        lambda *x: (lambda y, state: (y, mx.stop_gradient(state)))(*chunked(*x)),
        set(TENSORS) - {"y", "state_out", "dq"},
    ),
    "the first row for both": (
        lambda q, k, v, g, beta, state, C: chunked(
            *(mx.broadcast_to(x[:1], x.shape) for x in (q, k, v, g, beta, state)), C
        ),
        set(TENSORS),
    ),
    "no update across chunks": (
        lambda q, k, v, g, beta, state, C: chunked(
            q, k, v, mx.where(mx.arange(g.shape[1])[None, :, None] % C == 0, -mx.inf, g), beta, state, C
        ),
        set(TENSORS),
    ),
    "transposed final state": (lambda *x: (lambda y, s: (y, s.swapaxes(-1, -2)))(*chunked(*x)), None),
    "raises": (raising, None),
    "one output": (lambda *x: chunked(*x)[:1], None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_rejected(fault):
    rule, tensors = FAULTS[fault]
    result = selftest.run(stub(rule=rule), SIZES)
    if fault == "gradients stop at the start of a document":
        assert result.passed  # exp(-80) is 0 to float32: the control of the two after it
        return
    assert not result.passed
    assert result.summary()
    if tensors is None:
        assert result.exception
    else:
        assert failed(result) == tensors


def test_an_exception_is_the_result():
    result = selftest.run(stub(rule=raising), SIZES)
    assert "RuntimeError: Unable to build metal library" in result.summary()
    assert "simd_sum" in result.exception
    assert "\n" not in result.summary()


def test_an_interruption_is_not_a_result():
    def rule(*arrays):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        selftest.run(stub(rule=rule), SIZES)


def test_a_backend_for_its_own_heads_only():
    """As `native`: few heads are refused, all are not; and one that refuses its own sizes cannot pass."""
    few = stub(refusal=lambda sizes: None if (sizes.Hk, sizes.Hv) == (4, 8) else "heads")
    result = selftest.run(few, SIZES)
    assert result.passed
    assert {error.case for error in result.errors} == {"all heads"}
    result = selftest.run(stub(refusal=lambda sizes: "too short" if sizes.T < 40 else None), SIZES)
    assert not result.passed
    assert "too short" in result.summary()


def test_other_dtypes_do_not_stand_in():
    """One that refuses bfloat16 is not trusted with it because float32 passed."""
    float32_only = stub(refusal=lambda sizes: None if sizes.dtype == mx.float32 else "dtype")
    assert not selftest.run(float32_only, SIZES).passed
    assert selftest.run(float32_only, SIZES._replace(dtype=mx.float32)).passed


@pytest.mark.parametrize("name", ["fused", "recurrent"])
def test_kernels_pass_emulated(name):
    with emulated(sanitize=False) as launches:
        result = selftest.run(BACKENDS[name], SIZES)
    assert result.passed, result.summary()
    assert launches


SPOILT = {
    "decays 1 % off": lambda header: header.replace("metal::precise::exp(x)", "0.99f * metal::precise::exp(x)"),
    "does not compile": lambda header: header + "an error;",
}


@pytest.mark.parametrize("fault", SPOILT)
@pytest.mark.parametrize("name", ["fused", "recurrent"])
def test_spoilt_kernel_is_rejected(name, fault, monkeypatch):
    """The real texts with a fault: the self-test fails, and `auto` goes on to what is right."""
    with emulated(sanitize=False), metal(selftest=True):
        kernel = mx.fast.metal_kernel
        spoilt_kernel = lambda header, **options: kernel(header=SPOILT[fault](header), **options)  # noqa: E731
        monkeypatch.setattr(mx.fast, "metal_kernel", spoilt_kernel)
        result = selftest.run(BACKENDS[name], SIZES)
        assert not result.passed
        assert bool(result.exception) == (fault == "does not compile")
        monkeypatch.setattr("gdkernels.dispatch.AUTO_ON_GPU", (name, "chunked"))
        with pytest.warns(RuntimeWarning, match=f"{name} failed its self-test"):
            choice = explain(*SIZES[:-1], chunk_size=SIZES.C)
    assert choice.backend == "chunked"


def test_same_result_every_time():
    first, second = (selftest.run(stub(), SIZES) for _ in range(2))
    assert first.errors == second.errors
