"""Attention against a float64 oracle, its memory, its documents, and MLX's transforms around it."""

import mini
import mlx.core as mx
import numpy as np
import pytest

from gdtrain.model import attention
from gdtrain.model.attention import causal_attention

SCALE = 0.3

# Relative L2 of y and of the gradients; the scores have a standard deviation of 5. float32: sums of up to 150 products,
# measured 4e-7 and 8e-7. bfloat16, y: MLX's own forward, which rounds the scores to 8 bits where it has no fused
# kernel, measured 8e-3; gradients: p and the gradients of the scores are rounded before they are multiplied, and then
# the result, 2e-3 each, measured 3e-3.
BOUNDS = {"float32": (3e-6, 3e-6), "bfloat16": (2e-2, 5e-3)}
# An H200 multiplies float32 matrices in TF32, 11 bits.
if mx.default_device() == mx.gpu:
    BOUNDS["float32"] = (1e-2, 1e-2)


def draw(T, *, heads=(4, 2), D=16, B=2, dtype="float32", seed=0):
    """q, k, v and the cotangent of y."""
    rng = np.random.default_rng([T, *heads, D, seed])
    size = (5 / (SCALE * D**0.5)) ** 0.5
    sizes = ((heads[0], size), (heads[1], size), (heads[1], 1), (heads[0], 1))
    return [
        mx.array((x * rng.standard_normal((B, h, T, D))).astype(np.float32)).astype(getattr(mx, dtype))
        for h, x in sizes
    ]


def rows_of(*lengths, B=2):
    """Segments: documents of these lengths in row 0, and in the others the same in another order."""
    return mx.array(
        np.stack([np.repeat(np.arange(len(lengths)), np.roll(lengths, i)) for i in range(B)]).astype(np.int32)
    )


def oracle(q, k, v, dy, segments=None):
    """y, dq, dk, dv in float64, with k and v repeated for the heads."""
    q, k, v, dy = (np.array(x.astype(mx.float32), np.float64) for x in (q, k, v, dy))
    (B, H, T, D), Hkv = q.shape, k.shape[1]
    visible = np.tril(np.ones((T, T), bool))
    if segments is not None:
        number = np.array(segments)
        visible = (visible & (number[:, :, None] == number[:, None, :]))[:, None]
    k, v = (np.repeat(x, H // Hkv, axis=1) for x in (k, v))
    scores = np.where(visible, SCALE * q @ k.swapaxes(-1, -2), -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    dp = dy @ v.swapaxes(-1, -2)
    d_scores = SCALE * p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    dk, dv = (x.swapaxes(-1, -2) @ y for x, y in ((d_scores, q), (p, dy)))
    dk, dv = (x.reshape(B, Hkv, H // Hkv, T, D).sum(axis=2) for x in (dk, dv))
    return [p @ v, d_scores @ k, dk, dv]


def run(q, k, v, dy, segments=None, *, queries=None, attend=None):
    """y, dq, dk, dv."""
    attend = attend or (lambda *x: causal_attention(*x, SCALE, segments, queries=queries))
    y, gradients = mx.vjp(attend, [q, k, v], [dy])
    return [*y, *gradients]


def plain(q, k, v):
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE, mask="causal")


def errors(got, want):
    return [mini.relative_l2(x, mx.array(y.astype(np.float32))) for x, y in zip(got, want, strict=True)]


def hold(errors, dtype):
    y, gradient = BOUNDS[dtype]
    return errors[0] <= y and max(errors[1:]) <= gradient


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize(("T", "queries"), [(1, 5), (5, 5), (17, 8), (33, 16), (70, 32), (150, None)])
def test_against_the_oracle(T, queries, heads, dtype):
    inputs = draw(T, heads=heads, dtype=dtype)
    got = run(*inputs, queries=queries)
    assert [x.dtype for x in got] == [getattr(mx, dtype)] * 4
    assert hold(errors(got, oracle(*inputs)), dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("queries", [1, 7, 16, 64, None])
@pytest.mark.parametrize("lengths", [(1, 16, 3, 29, 21), (70,), (1,) * 20, (2, 68)])
def test_documents_against_the_oracle(lengths, queries, dtype):
    segments = rows_of(*lengths)
    inputs = draw(segments.shape[1], dtype=dtype)
    assert hold(errors(run(*inputs, segments, queries=queries), oracle(*inputs, segments)), dtype)


def test_the_bounds_can_fail(monkeypatch):
    """Documents that see each other; and scores rounded to bfloat16, as in MLX's own gradient."""
    segments = rows_of(20, 30)
    inputs = draw(50, dtype="bfloat16")
    assert hold(errors(run(*inputs), oracle(*inputs)), "bfloat16")
    if mx.default_device() == mx.cpu:
        assert not hold(errors(run(*inputs, attend=plain), oracle(*inputs)), "bfloat16")
    assert not hold(errors(run(*inputs), oracle(*inputs, segments)), "bfloat16")
    visible = attention._visible
    monkeypatch.setattr(attention, "_visible", lambda first, last, *_: visible(first, last))
    assert not hold(errors(run(*inputs, segments, queries=16), oracle(*inputs, segments)), "bfloat16")


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("queries", [8, None])
def test_another_document_changes_no_bit(queries, dtype):
    segments = rows_of(20, 30, B=1)
    inputs, others = (draw(50, B=1, dtype=dtype, seed=seed) for seed in (0, 1))
    mixed = [mx.concatenate([x[:, :, :20], y[:, :, 20:]], axis=2) for x, y in zip(others, inputs, strict=True)]
    for got, want in zip(run(*mixed, segments, queries=queries), run(*inputs, segments, queries=queries), strict=True):
        assert mx.array_equal(got[:, :, 20:], want[:, :, 20:])
        assert not mx.array_equal(got[:, :, :20], want[:, :, :20])


def test_the_same_bits_every_time():
    segments = rows_of(40, 60)
    inputs = draw(100, dtype="bfloat16")
    first, second = (run(*inputs, segments, queries=16) for _ in range(2))
    assert all(mx.array_equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.fixture
def compilation():
    mx.enable_compile()
    yield
    mx.disable_compile()


TRANSFORMS = {
    "checkpoint": lambda f: mx.grad(mx.checkpoint(f), argnums=range(3)),
    "compile": lambda f: mx.compile(mx.grad(f, argnums=range(3))),
    "compiled checkpoint": lambda f: mx.compile(mx.grad(mx.checkpoint(f), argnums=range(3))),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("packed", [False, True])
def test_transforms(name, packed, compilation):
    """Gradients as without: to the bit but for compiled ones, whose fused operations round differently, 1e-6."""
    q, k, v, dy = draw(40)
    segments = rows_of(15, 25) if packed else None

    def loss(q, k, v):
        return (causal_attention(q, k, v, SCALE, segments, queries=16) * dy).sum()

    want = mx.grad(loss, argnums=range(3))(q, k, v)
    got = TRANSFORMS[name](loss)(q, k, v)
    for x, y in zip(got, want, strict=True):
        assert mini.relative_l2(x, y) <= (1e-6 if "compile" in name else 0)


def peak(attend, inputs, transform=lambda f: f):
    """Bytes beyond what was alive before, of a forward and backward."""
    q, k, v, dy = inputs
    step = transform(mx.grad(lambda *x: (attend(*x) * dy).sum(), argnums=range(3)))
    mx.eval(inputs)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(step(q, k, v))
    return mx.get_peak_memory() - before


T, HEADS = 2048, 4
SCORES = HEADS * T * T * 4
MEMORY = {"dtype": "float32", "heads": (HEADS, 1), "B": 1}


@pytest.mark.parametrize("packed", [False, True])
def test_memory(packed):
    """Measured on a CPU: 18 MB, with blocks of 2 MB, of the 67 MB that the scores of all heads take once."""
    inputs = draw(T, **MEMORY)
    segments = rows_of(700, 48, 1300, B=1) if packed else None
    assert peak(lambda *x: causal_attention(*x, SCALE, segments, queries=64), inputs) < SCORES / 2


def test_compiled_memory(compilation):
    """Compilation merges equal subgraphs, which can undo recomputation. Measured on a CPU: 24 MB."""
    attend = mx.checkpoint(lambda *x: causal_attention(*x, SCALE, queries=64))
    assert peak(attend, draw(T, **MEMORY), mx.compile) < SCORES / 2


def test_memory_of_mlx_s_gradient():
    """The control: it holds the scores of all heads, more than once (225 MB), and the measurement sees them."""
    assert peak(plain, draw(T, **MEMORY)) > SCORES


def test_memory_without_an_order_of_the_blocks(monkeypatch):
    """The other control: without its dependencies MLX keeps the scores of many blocks, 95 MB."""
    monkeypatch.setattr(mx, "depends", lambda arrays, _: arrays)
    assert peak(lambda *x: causal_attention(*x, SCALE, queries=64), draw(T, **MEMORY)) > SCORES / 2


def test_a_block_keeps_to_its_memory(monkeypatch):
    """Whatever the length; nothing is evaluated here."""
    monkeypatch.setattr(attention, "_CPU_QUERIES", 512)
    for B, H, length in [(1, 16, 4096), (8, 32, 4096), (1, 64, 262144)]:
        queries = attention._queries_of_a_block(mx.zeros((B, H, length, 256), mx.bfloat16))
        assert 1 <= queries <= 512
        assert queries == 1 or queries * B * H * length * 4 <= attention._BLOCK_BYTES
    assert attention._queries_of_a_block(mx.zeros((1, 1, 1024, 8))) == 512
