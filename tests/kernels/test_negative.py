"""Negative controls: the suite's comparison rejects each broken rule, and names the tensors that the fault reaches."""

import inputs
import mlx.core as mx
import numpy as np
import oracle
import pytest

SHAPE = (2, 20, 1, 2, 8, 8)
SEGMENTS = {False: inputs.documents(20, [], []), True: inputs.documents(20, [7], [16])}


def loop(q, k, v, log_decay, beta, state, segments, fault=None):
    """The recurrence in plain MLX, differentiated automatically, with one switchable fault."""
    if fault == "gradient of row 0 for every row":
        q, k, v, log_decay, beta, state = _row_0_gradient(q, k, v, log_decay, beta, state)
    T, Hk = q.shape[1:3]
    r = v.shape[2] // Hk
    g = mx.exp(log_decay)
    if fault == "gate one token late":
        g = mx.concatenate([mx.ones_like(g[:, :1]), g[:, :-1]], axis=1)
    if fault == "gates in bfloat16":
        g = g.astype(mx.bfloat16).astype(mx.float32)
    if fault == "first gate without gradient":
        g = mx.concatenate([mx.stop_gradient(g[:, :1]), g[:, 1:]], axis=1)
    if fault == "key head gradient from one value head":
        q, k = (mx.concatenate([x, *[mx.stop_gradient(x)] * (r - 1)], axis=2) for x in (q, k))
    else:
        q, k = mx.repeat(q, r, axis=2), mx.repeat(k, r, axis=2)
    ys = []
    for t in range(T):
        if t and fault != "documents leak":
            state = mx.where((segments[:, t] == segments[:, t - 1])[:, None, None, None], state, 0)
        P = g[:, t, :, None, None] * state
        read = (P @ k[:, t, :, :, None])[..., 0]
        if fault == "no delta correction":
            read = mx.zeros_like(read)
        delta = beta[:, t, :, None] * (v[:, t] - read)
        state = P + delta[..., None] * k[:, t, :, None, :]
        ys.append((state @ q[:, t, :, :, None])[..., 0])
    if fault == "final state's cotangent forgotten":
        state = mx.stop_gradient(state)
    return mx.stack(ys, axis=1), state


@mx.custom_function
def _row_0_gradient(*arrays):
    return arrays


@_row_0_gradient.vjp
def _row_0_gradient_vjp(primals, cotangents, outputs):
    return tuple(mx.broadcast_to(c[:1], c.shape) for c in cotangents)


GRADIENTS = {"d" + name for name in oracle.RULE_INPUTS}
FAULTS = {
    "no delta correction": {"y", "state_out"} | GRADIENTS,
    "gate one token late": {"y", "state_out"} | GRADIENTS,
    "gates in bfloat16": {"y", "state_out"} | GRADIENTS,
    "final state's cotangent forgotten": GRADIENTS - {"dq"},
    "gradient of row 0 for every row": GRADIENTS,
    "first gate without gradient": {"dlog_decay"},
    "key head gradient from one value head": {"dq", "dk"},
    "documents leak": {"y", "state_out"} | GRADIENTS,
}


def run(fault, documents):
    """(what the loop gives, what the oracle gives)"""
    given, cotangents = inputs.rule_inputs(*SHAPE)
    segments = SEGMENTS[documents]
    got = oracle.measure(loop, given, segments=segments, fault=fault, **cotangents)
    return got, oracle.rule(**given, segments=segments, **cotangents)


@pytest.mark.parametrize("documents", SEGMENTS)
def test_unbroken_rule_is_accepted(documents):
    oracle.assert_matches(*run(None, documents))


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_rule_is_rejected(fault):
    got, want = run(fault, documents=fault == "documents leak")
    assert oracle.differences(got, want).keys() == FAULTS[fault]
    with pytest.raises(AssertionError):
        oracle.assert_matches(got, want)


@pytest.mark.parametrize("name", ["y", "state_out", *sorted(GRADIENTS)])
@pytest.mark.parametrize("spoil", ["missing", "nan", "one element of a row 1 % off", "shape", "zero"])
def test_comparison_rejects_one_spoilt_tensor(name, spoil):
    given, cotangents = inputs.rule_inputs(*SHAPE)
    want = oracle.rule(**given, **cotangents)
    got, x = dict(want), want[name].copy()
    match spoil:
        case "missing":
            del got[name]
        case "nan":
            x.flat[-1] = np.nan
        case "one element of a row 1 % off":
            x.flat[np.abs(x[-1]).argmax() + x[0].size] *= 1.01
        case "shape":
            x = x[:1]
        case "zero":
            x[:] = 0
    if spoil != "missing":
        got[name] = x
    assert oracle.differences(got, want).keys() == {name}
