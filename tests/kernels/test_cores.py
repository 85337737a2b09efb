"""Heads on several cores of a CPU: the same bits as on one, whatever is traced around them."""

import threading

import inputs
import mlx.core as mx
import oracle
import pytest
from gdkernels import cores, gated_delta_rule

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="only a CPU's heads are cut")


def measure(monkeypatch, count, size=(2, 39, 3, 6, 32, 16)):
    monkeypatch.setattr(cores, "_cores", lambda: count)
    given, cotangents = inputs.rule_inputs(*size)
    return oracle.measure(gated_delta_rule, given, **cotangents, backend="chunked", chunk_size=16)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_same_bits(count, monkeypatch):
    """3 key heads: two groups of 1 and 2, one each, and more cores than heads."""
    oracle.assert_same_bits(measure(monkeypatch, count), measure(monkeypatch, 1))


def test_every_core_is_asked(monkeypatch):
    used = []
    monkeypatch.setattr(cores, "_cores", lambda: 2)
    streams = cores._streams(2, threading.get_ident())
    monkeypatch.setattr(cores, "_streams", lambda count, thread: used.append(count) or streams)
    x = mx.ones((1, 4, 3, 8))
    y = cores.on_cores(lambda arrays: [2 * arrays[0]], [x], [2], [2])[0]
    assert used == [2]
    assert mx.array_equal(y, 2 * x).item()


def test_in_another_thread(monkeypatch):
    """MLX binds a stream to the thread that made it."""
    want, found = measure(monkeypatch, 2), []
    thread = threading.Thread(target=lambda: found.append(measure(monkeypatch, 2)))
    thread.start()
    thread.join()
    oracle.assert_same_bits(found[0], want)


def test_compiled(monkeypatch):
    """Fused operations that feed the heads of several streams: MLX 0.32.4 fails there without the dependency."""
    monkeypatch.setattr(cores, "_cores", lambda: 2)
    given, _ = inputs.rule_inputs(1, 20, 2, 4, 16, 16)
    arrays = [mx.array(x) for x in given.values()]

    def loss(q, k, v, log_decay, beta, state):
        y, end = gated_delta_rule(q, k, 2 * v, log_decay, beta, state, backend="chunked", chunk_size=16)
        return (y * y).sum() + end.sum()

    step = mx.value_and_grad(loss, argnums=range(6))
    plain = step(*arrays)[1]
    mx.eval(plain)
    mx.enable_compile()
    try:
        compiled = mx.compile(step)(*arrays)[1]
        mx.eval(compiled)
    finally:
        mx.disable_compile()
    for one, other in zip(plain, compiled, strict=True):
        assert mx.allclose(one, other, rtol=1e-4, atol=1e-6).item()
