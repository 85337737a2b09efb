"""Which backend is chosen on a GPU, played on a CPU: `metal(selftest=True)` and kernels that are MLX operations."""

import warnings

import inputs
import mlx.core as mx
import oracle
import pytest
from gdkernels import dispatch, explain, gated_delta_rule, native, verdicts
from gdkernels.backends import BACKENDS
from gdkernels.chunked import chunked
from gdkernels.portable import machine
from gdkernels.sizes import Sizes
from gdkernels.testing import metal
from stubs import counted, raising, scaled, stub

pytestmark = pytest.mark.usefixtures("on_a_cpu")

HEADS = (2, 4, 32, 16)
SHAPE = (2, 39, *HEADS)


@pytest.fixture
def gpu(monkeypatch):
    """gpu(fused=..., recurrent=...): those kernels on a machine that counts as Metal; others refuse."""

    def play(**backends):
        for name in inputs.GPU_BACKENDS:
            backend = backends.get(name) or stub(name, refusal=lambda sizes: "not played")
            monkeypatch.setitem(BACKENDS, name, backend)

    with metal(selftest=True):
        yield play


def explained(backend="auto", chunk_size=16, **changes):
    sizes = dict(zip(("Hk", "Hv", "Dk", "Dv"), HEADS, strict=True)) | changes
    return explain(2, 39, **sizes, dtype=mx.float32, backend=backend, chunk_size=chunk_size)


def run(backend="auto", chunk_size=16):
    given, cotangents = inputs.rule_inputs(*SHAPE)
    return oracle.measure(gated_delta_rule, given, **cotangents, backend=backend, chunk_size=chunk_size)


# On a CPU


def test_cpu_takes_chunked_untested(monkeypatch):
    def forbidden(*arguments):
        raise AssertionError("a self-test ran")

    monkeypatch.setattr(verdicts.selftest, "run", forbidden)
    choice = explained()
    assert choice.backend == "chunked"
    assert choice.reason == "CPU device; exact gradients for any shape, chunk by chunk in parallel"
    assert explained("replay").reason == "asked for"
    run()


@pytest.mark.parametrize("backend", inputs.GPU_BACKENDS)
def test_cpu_refuses_kernels(backend):
    with pytest.raises(ValueError, match=f"backend '{backend}' is not available here: refused: .*GPU|Metal") as caught:
        explained(backend)
    assert str(caught.value).endswith("; available: auto, chunked, replay, reference")


# On what counts as Metal


def test_first_that_passes(gpu):
    rule, lengths = counted()
    gpu(fused=stub(rule=rule), recurrent=stub("recurrent", raising))
    choice = explained()
    assert choice.backend == "fused"
    assert choice.reason.startswith("Metal device; self-test ")
    assert "e-0" in choice.reason
    assert len(lengths) == 5  # the cases of the self-test
    assert explained() == choice
    oracle.assert_matches(run(), run("chunked"))
    assert lengths[5:] == [39]


def test_refusal_is_named(gpu):
    gpu(fused=stub(refusal=lambda sizes: f"Dk = {sizes.Dk}"), recurrent=stub("recurrent"))
    choice = explained()
    assert choice.backend == "recurrent"
    assert "fused refused: Dk = 32" in choice.reason
    with pytest.raises(ValueError, match="'fused' is not available here: refused: Dk = 32; available: auto, recurrent"):
        explained("fused")


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (scaled("dk", 1.01), ("dk", "1.0e-02")),
        (scaled("dstate", 0), ("dstate",)),
        (scaled("y", mx.nan), ("y", "inf")),
        (raising, ("Unable to build metal library", "simd_sum")),
    ],
)
def test_failed_selftest_is_a_warning_and_the_next_is_taken(rule, words, gpu):
    gpu(fused=stub(rule=rule), recurrent=stub("recurrent"))
    with pytest.warns(RuntimeWarning, match="fused failed its self-test") as caught:
        choice = explained()
    assert choice.backend == "recurrent"
    assert all(word in text for word in words for text in (str(caught[0].message), choice.reason))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert explained() == choice  # once for a process
        oracle.assert_matches(run(), run("chunked"))
        with pytest.raises(ValueError, match="'fused' is not available here: failed its self-test") as error:
            run("fused")
    assert all(word in str(error.value) for word in words)


def test_what_has_failed_is_not_offered(gpu):
    gpu(fused=stub(rule=raising), recurrent=stub("recurrent"))
    with pytest.raises(ValueError, match="'native' is not available here: refused: not played; available: auto, fused"):
        explained("native")  # nothing is known of `fused`, and nothing runs only to say so
    with pytest.warns(RuntimeWarning):
        explained()
    with pytest.raises(ValueError, match="refused: not played; available: auto, recurrent, chunked"):
        explained("native")
    with metal(), pytest.raises(ValueError, match="available: auto, fused, recurrent"):
        explained("native")  # kernels under test are trusted


def test_warning_points_at_the_caller(gpu):
    for call, file in ((explained, __file__), (run, oracle.__file__)):
        gpu(fused=stub(rule=raising, text=file))
        dispatch._warned.clear()
        with pytest.warns(RuntimeWarning) as caught:
            call()
        assert caught[0].filename == file


def test_all_kernels_fail(gpu):
    gpu(fused=stub(rule=raising), recurrent=stub("recurrent", scaled("dq", 1.01)))
    with pytest.warns(RuntimeWarning) as caught:
        choice = explained()
    assert [str(w.message).split()[1] for w in caught] == ["fused", "recurrent"]
    assert choice.backend == "chunked"
    assert choice.reason.endswith("exact gradients for any shape, chunk by chunk in parallel")
    order = [choice.reason.index(words) for words in ("Metal device", "fused failed", "recurrent failed")]
    assert order == sorted(order)


def test_forced_kernel(gpu):
    gpu(fused=stub(), recurrent=stub("recurrent"))
    choice = explained("recurrent")
    assert choice.backend == "recurrent"
    assert choice.reason.startswith("asked for; Metal device; self-test ")
    assert explained("replay").reason == "asked for; Metal device"


def test_native_is_never_chosen(gpu):
    gpu(native=stub("native"))
    assert explained().backend == "chunked"
    assert explained("native").backend == "native"


def test_a_result_holds_for_its_sizes(gpu):
    """Another head dimension, dtype or chunk is another kernel; another T or B is not."""
    rule, lengths = counted()
    gpu(fused=stub(rule=rule))
    explained()
    for same in ({}, {}):
        explained(**same)
    explain(1, 2048, *HEADS, mx.float32, chunk_size=16)
    assert len(lengths) == 5
    for count, other in enumerate(({"Dk": 16}, {"Hv": 6}, {"chunk_size": 8}), start=2):
        explained(**other)
        assert len(lengths) == 5 * count
    explain(1, 2048, *HEADS, mx.bfloat16, chunk_size=16)
    assert len(lengths) == 5 * 5


def test_kernels_under_test_are_trusted(gpu):
    """metal() alone: the test is the check."""
    gpu(fused=stub(rule=scaled("dk", 1.01)))
    with metal():
        assert explained().backend == "fused"
        assert "left out" in explained().reason
        assert not oracle.differences(run(), run("chunked")).keys() - {"dk"}
    with pytest.warns(RuntimeWarning):
        assert explained().backend == "chunked"


@pytest.mark.parametrize(
    ("architecture", "setting", "rounds"),
    [("applegpu_g16s", None, False), ("applegpu_g17s", None, True), ("applegpu_g17s", "0", False)],
)
def test_device_is_named(architecture, setting, rounds, gpu, monkeypatch):
    monkeypatch.setattr(machine, "architecture", lambda: architecture)
    monkeypatch.setattr("gdkernels.choice.architecture", lambda: architecture)
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    if setting is not None:
        monkeypatch.setenv("MLX_ENABLE_TF32", setting)
    gpu(fused=stub())
    assert explained().reason.startswith(f"Metal device {architecture}")
    assert ("MLX_ENABLE_TF32=0" in explained("chunked").reason) == rounds
    assert "MLX_ENABLE_TF32=0" not in explained().reason  # its kernels multiply in float32


# The first call comes while a function is traced

TRACES = {
    "grad": lambda f: mx.grad(f, argnums=range(6)),
    "checkpoint": lambda f: mx.grad(mx.checkpoint(f), argnums=range(6)),
    "compile": lambda f: mx.compile(mx.grad(f, argnums=range(6))),
    "compiled checkpoint": lambda f: mx.compile(mx.grad(mx.checkpoint(f), argnums=range(6))),
}


@pytest.mark.parametrize("fault", [None, "dk"])
@pytest.mark.parametrize("trace", TRACES)
def test_selftest_within_a_trace(trace, fault, gpu):
    """It evaluates fresh arrays, which MLX allows there; its result and the caller's gradients are as outside."""
    rule, lengths = counted(scaled(fault, 1.01) if fault else chunked)
    gpu(fused=stub(rule=rule))
    given, cotangents = inputs.rule_inputs(1, 6, *HEADS)
    arrays, cotangents = [mx.array(x) for x in given.values()], {n: mx.array(x) for n, x in cotangents.items()}

    def loss(*arrays):
        y, state = gated_delta_rule(*arrays, chunk_size=4)
        return (y * cotangents["dy"]).sum() + (state * cotangents["dstate_out"]).sum()

    mx.enable_compile()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = TRACES[trace](loss)(*arrays)
            mx.eval(got)
    finally:
        mx.disable_compile()
    assert len(lengths) >= 5
    assert (6 in lengths) == (fault is None)
    assert len(caught) == (fault is not None)
    want = oracle.rule(**given, **{name: oracle._numpy(x) for name, x in cotangents.items()})
    names = [f"d{name}" for name in given]
    oracle.assert_matches(
        {name: oracle._numpy(x) for name, x in zip(names, got, strict=True)}, {name: want[name] for name in names}
    )


# native

NATIVE = Sizes(1, 64, 16, 32, 128, 128, mx.float32, 64)
REFUSED = {
    "Metal only": ({}, "cuda", 16, NATIVE),
    "generation": ({}, "metal", None, NATIVE),
    "round the gates to bfloat16": ({}, "metal", 16, NATIVE._replace(dtype=mx.bfloat16)),
    "round the gates to float16": ({}, "metal", 17, NATIVE._replace(dtype=mx.float16)),
    "Dk = 64": ({}, "metal", 16, NATIVE._replace(Dk=64)),
    "Dv = 192": ({}, "metal", 16, NATIVE._replace(Dv=192)),
    "(Hk, Hv) = (8, 16)": ({}, "metal", 16, NATIVE._replace(Hk=8, Hv=16)),
    "(16, 64) on M5": ({}, "metal", 17, NATIVE._replace(Hv=64)),
    "MLX 0.32.3": ({"MLX": "0.32.3"}, "metal", 16, NATIVE),
    "MLX 0.31.10": ({"MLX": "0.31.10.dev1"}, "metal", 16, NATIVE),
}


def play_native(monkeypatch, where, generation, **names):
    monkeypatch.setattr(native, "machine", lambda: where)
    monkeypatch.setattr(native, "apple_generation", lambda: generation)
    for name, value in names.items():
        monkeypatch.setattr(native, name, value)


@pytest.mark.parametrize("reason", REFUSED)
def test_native_refuses(reason, monkeypatch):
    names, where, generation, sizes = REFUSED[reason]
    play_native(monkeypatch, where, generation, **names)
    assert reason in native.refusal(sizes)


@pytest.mark.parametrize("heads", [(16, 16), (16, 32), (16, 48), (16, 64), (24, 24), (32, 32)], ids=str)
def test_native_accepts(heads, monkeypatch):
    play_native(monkeypatch, "metal", 16)
    assert native.refusal(NATIVE._replace(Hk=heads[0], Hv=heads[1])) is None


def test_native_is_called_rightly(monkeypatch):
    """On a CPU it is MLX's step loop, of the same meaning."""
    given, cotangents = inputs.rule_inputs(2, 19, 2, 4, 32, 16, decay="some-zero")
    got = oracle.measure(lambda **x: native.rule(*x.values(), 64), given, **cotangents)
    oracle.assert_matches(got, oracle.rule(**given, **cotangents))
