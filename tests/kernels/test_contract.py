"""What the entry points accept and refuse, how a backend is chosen, and how the rule behaves under MLX transforms."""

import gdkernels
import inputs
import mlx.core as mx
import oracle
import pytest
from gdkernels import explain, gated_delta_rule, gated_delta_update
from gdkernels.sizes import Sizes

B, T, Hk, Hv, Dk, Dv = SHAPE = (2, 5, 2, 4, 8, 6)
QK, V, GATE, STATE = (B, T, Hk, Dk), (B, T, Hv, Dv), (B, T, Hv), (B, Hv, Dv, Dk)


def zeros(*shape, dtype=mx.float32):
    return mx.zeros(shape, dtype)


RULE = {
    "q": zeros(*QK),
    "k": zeros(*QK),
    "v": zeros(*V),
    "log_decay": zeros(*GATE),
    "beta": zeros(*GATE),
    "state": zeros(*STATE),
    "segments": zeros(B, T, dtype=mx.int32),
}
LAYER = {name: RULE[name] for name in ("q", "k", "v", "state", "segments")} | {
    "a": zeros(*GATE),
    "b": zeros(*GATE),
    "A_log": zeros(Hv),
    "dt_bias": zeros(Hv),
    "mask": zeros(B, T, dtype=mx.bool_),
}


@pytest.mark.parametrize("name", RULE)
def test_rule_refuses_wrong_shapes(name):
    _refused_shape(gated_delta_rule, RULE, name)


@pytest.mark.parametrize("name", LAYER)
def test_update_refuses_wrong_shapes(name):
    _refused_shape(gated_delta_update, LAYER, name)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("q", mx.int32),
        ("log_decay", mx.bfloat16),
        ("beta", mx.float16),
        ("state", mx.bfloat16),
        ("segments", mx.float32),
    ],
)
def test_rule_refuses_wrong_dtypes(name, dtype):
    with pytest.raises(ValueError, match=_type_name(dtype)) as caught:
        gated_delta_rule(**RULE | {name: RULE[name].astype(dtype)})
    assert name in str(caught.value)
    assert _type_name(RULE[name].dtype) in str(caught.value)


@pytest.mark.parametrize(("name", "dtype"), [("mask", mx.int32), ("segments", mx.float32), ("state", mx.bfloat16)])
def test_update_refuses_wrong_dtypes(name, dtype):
    with pytest.raises(ValueError, match=_type_name(dtype)) as caught:
        gated_delta_update(**LAYER | {name: LAYER[name].astype(dtype)})
    assert name in str(caught.value)


def test_value_heads_not_a_multiple_of_key_heads():
    with pytest.raises(ValueError, match=r"\b5\b.*\b2\b|\b2\b.*\b5\b"):
        gated_delta_rule(
            zeros(1, 3, 2, 8), zeros(1, 3, 2, 8), zeros(1, 3, 5, 8), zeros(1, 3, 5), zeros(1, 3, 5), backend="reference"
        )
    with pytest.raises(ValueError, match=r"\b5\b.*\b2\b|\b2\b.*\b5\b"):
        gated_delta_update(
            zeros(1, 3, 2, 8), zeros(1, 3, 2, 8), zeros(1, 3, 5, 8), zeros(1, 3, 5), zeros(1, 3, 5), zeros(5), zeros(5)
        )


def test_every_backend_is_under_test():
    """Here those that run on any machine; those with GPU kernels have tests of their own, and refuse a CPU."""
    assert set(gdkernels.BACKENDS) == {*inputs.BACKENDS, *inputs.GPU_BACKENDS}
    for name, backend in gdkernels.BACKENDS.items():
        assert backend.name == name
        assert backend.has_kernels == (name in inputs.GPU_BACKENDS)
        if mx.default_device() == mx.cpu:
            assert (backend.refusal(Sizes(*SHAPE, mx.float32, 64)) is None) == (name in inputs.BACKENDS)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("backend", ["auto", *inputs.BACKENDS])
def test_explain(backend, dtype):
    choice = explain(*SHAPE, dtype, backend=backend)
    assert choice.backend in inputs.BACKENDS
    assert backend in ("auto", choice.backend)
    assert choice.reason.strip()


@pytest.mark.parametrize("name", ["B", "T", "Hk", "Hv", "Dk", "Dv", "chunk_size"])
@pytest.mark.parametrize(
    ("value", "words"), [(0, "at least 1, not 0"), (-2, "at least 1, not -2"), (2.0, "an int, not 2")]
)
def test_explain_refuses_sizes(name, value, words):
    sizes = dict(zip(("B", "T", "Hk", "Hv", "Dk", "Dv"), SHAPE, strict=True))
    with pytest.raises(ValueError, match=f"^{name} must be {words}"):
        explain(**sizes | {name: value})


def test_explain_refuses_heads_and_dtype():
    with pytest.raises(ValueError, match="multiple of key heads: Hv = 5, Hk = 2"):
        explain(1, 3, 2, 5, 8, 8)
    for dtype, shown in ((mx.int32, "int32"), ("float32", "float32"), (None, "None")):
        with pytest.raises(ValueError, match=f"dtype must be float32, bfloat16 or float16, not .*{shown}"):
            explain(*SHAPE, dtype)


@pytest.mark.parametrize("chunk_size", [0, -1, 1.5])
def test_rule_refuses_chunk_size(chunk_size):
    with pytest.raises(ValueError, match="chunk_size must be"):
        gated_delta_rule(**RULE, chunk_size=chunk_size)


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("backend", ["native", "no-such-backend", "", "Chunked"])
def test_unavailable_backend(backend):
    """`native` has no kernel for these head dimensions, on Metal either."""
    calls = [
        lambda: explain(*SHAPE, mx.float32, backend=backend),
        lambda: gated_delta_rule(**RULE, backend=backend),
        lambda: gated_delta_update(**LAYER, backend=backend),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="chunked") as caught:
            call()
        assert all(name in str(caught.value) for name in (backend, "reference", "replay", "chunked"))


@pytest.mark.parametrize("backend", inputs.BACKENDS)
def test_auto_is_the_explained_backend(backend):
    given, cotangents = inputs.rule_inputs(1, 20, 1, 2, 32, 32)
    if explain(1, 20, 1, 2, 32, 32, mx.float32).backend == backend:
        forced = oracle.measure(gated_delta_rule, given, **cotangents, backend=backend)
        oracle.assert_same_bits(oracle.measure(gated_delta_rule, given, **cotangents), forced)


@pytest.mark.parametrize("backend", inputs.BACKENDS)
def test_non_contiguous_inputs(backend):
    """Transposed q, k and state, v cut out of a wider projection, every second log_decay, one beta broadcast."""
    given, cotangents = inputs.rule_inputs(2, 39, 2, 4, 32, 32)
    given["beta"][:] = given["beta"][:, :, :1]
    plain = oracle.measure(gated_delta_rule, given, **cotangents, backend=backend, chunk_size=16)
    strided = {name: mx.array(x) for name, x in given.items()}
    for name in ("q", "k", "state"):
        strided[name] = mx.contiguous(strided[name].transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    wide = mx.contiguous(mx.concatenate([strided["q"], strided["v"], strided["k"]], axis=2))
    strided["v"] = wide[:, :, 2:6]
    strided["log_decay"] = mx.contiguous(mx.repeat(strided["log_decay"], 2, axis=1))[:, ::2]
    strided["beta"] = mx.broadcast_to(mx.contiguous(strided["beta"][:, :, :1]), given["beta"].shape)
    mx.eval(strided)
    got = oracle.measure(gated_delta_rule, strided, **cotangents, backend=backend, chunk_size=16)
    oracle.assert_matches(got, plain)


@pytest.mark.parametrize("backend", inputs.BACKENDS)
def test_checkpoint(backend):
    given, cotangents = inputs.rule_inputs(2, 39, 1, 2, 32, 32)

    def rule(*arrays):
        return gated_delta_rule(*arrays, backend=backend, chunk_size=16)

    def positional(function):
        return lambda **arrays: function(*arrays.values())

    plain = oracle.measure(positional(rule), given, **cotangents)
    oracle.assert_same_bits(oracle.measure(positional(mx.checkpoint(rule)), given, **cotangents), plain)


@pytest.mark.parametrize("wrap", [lambda rule: rule, mx.checkpoint], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("backend", inputs.BACKENDS)
def test_compile(backend, wrap):
    """Two chunks in a row as short as it may be: on the CPU each fused operation goes through a C++ compiler."""
    of_gpu = backend in inputs.GPU_BACKENDS
    given, cotangents = inputs.rule_inputs(*((2, 18, 1, 2, 32, 32) if of_gpu else (2, 6, 1, 2, 8, 8)))
    cotangents = {name: mx.array(x) for name, x in cotangents.items()}
    names = list(given)

    @wrap
    def rule(*arrays):
        return gated_delta_rule(*arrays, backend=backend, chunk_size=16 if of_gpu else 4)

    def loss(*arrays):
        y, state = rule(*arrays)
        return (y * cotangents["dy"]).sum() + (state * cotangents["dstate_out"]).sum()

    step = mx.value_and_grad(loss, argnums=range(len(names)))
    arrays = [mx.array(x) for x in given.values()]
    value, gradients = step(*arrays)
    mx.eval(value, gradients)
    mx.enable_compile()
    try:
        compiled_value, compiled_gradients = mx.compile(step)(*arrays)
        mx.eval(compiled_value, compiled_gradients)
    finally:
        mx.disable_compile()
    want = dict(zip(names, gradients, strict=True)) | {"loss": value}
    got = dict(zip(names, compiled_gradients, strict=True)) | {"loss": compiled_value}
    oracle.assert_matches(got, want)


def _refused_shape(function, accepted, name):
    """The message names both shapes. B, T, Hk, Dk come from q and Hv, Dv from v: wrong there, others may be blamed."""
    right = accepted[name].shape
    own = {"q": (0, 1, 2, 3), "v": (2, 3)}.get(name, ())
    longer = [tuple(n + (i == axis) for i, n in enumerate(right)) for axis in range(len(right))]
    for wrong in [right[:-1], (*right, 1), *longer]:
        changed = accepted | {name: zeros(*wrong, dtype=accepted[name].dtype)}
        with pytest.raises(ValueError, match=r"shape|must") as caught:
            function(**changed, backend="reference")
        if wrong not in [longer[axis] for axis in own]:
            assert name in str(caught.value)
            assert str(wrong) in str(caught.value)
        if not own:
            assert str(right) in str(caught.value)


def _type_name(dtype):
    return str(dtype).removeprefix("mlx.core.")
