"""What the emulator must get right."""

import mlx.core as mx
import numpy as np
import pytest
from gdkernels.portable.machine import machine
from metal.emulator import emulated
from metal.small import BARRIER, INDEX, run

RNG = np.random.default_rng(0)
X = RNG.standard_normal(64).astype(np.float32)
SIMD_X = X.reshape(2, 32)
LANES = np.arange(32)


def values(source, inputs=None, **options):
    with emulated():
        return np.array(run(source, inputs or {"x": mx.array(X)}, **options))


def test_stands_in_and_restores():
    original = mx.fast.metal_kernel
    with emulated() as launches:
        assert machine() == "metal"
        run(INDEX + "o[i] = x[i];", {"x": mx.array(X)})
        assert [(launch.text.name, launch.grid) for launch in launches] == [("small", (64, 1, 1))]
    assert mx.fast.metal_kernel is original
    assert machine() is None


@pytest.mark.parametrize("sanitize", [True, False, "address"])
def test_every_build_computes_the_same(sanitize):
    source = f"threadgroup float s[64]; {INDEX} s[i] = x[i]; {BARRIER} o[i] = s[63 - i] + simd_sum(x[i]);"
    with emulated(sanitize=sanitize):
        got = np.array(run(source, {"x": mx.array(X)}))
    np.testing.assert_allclose(got, X[::-1] + np.repeat(SIMD_X.sum(1), 32), rtol=1e-5)


# Language and types


def test_ids_over_a_grid_of_three_dimensions_with_a_partial_edge():
    names = ("thread_position_in_grid", "threadgroup_position_in_grid", "thread_position_in_threadgroup")
    more = ("threads_per_threadgroup", "threadgroups_per_grid", "threads_per_grid")
    sums = " + ".join(f"{n}.x * {p}u + {n}.y * {p * 7}u + {n}.z * {p * 49}u" for p, n in enumerate(names + more, 1))
    source = f"uint3 p = thread_position_in_grid; o[(p.z * 6 + p.y) * 5 + p.x] = {sums};"
    kernel_options = {"grid": (5, 6, 2), "threadgroup": (2, 4, 2), "output_shapes": [(2, 6, 5)]}
    with emulated():
        kernel = mx.fast.metal_kernel(name="ids", input_names=[], output_names=["o"], source=source)
        got = np.array(kernel(inputs=[], output_dtypes=[mx.float32], **kernel_options)[0])
    for z, y, x in np.ndindex(2, 6, 5):
        groups = (x // 2, y // 4, z // 2)
        sizes = (min(2, 5 - x // 2 * 2), min(4, 6 - y // 4 * 4), 2)
        triples = ((x, y, z), groups, (x % 2, y % 4, z % 2), sizes, (3, 2, 1), (5, 6, 2))
        assert got[z, y, x] == sum(p * (a + 7 * b + 49 * c) for p, (a, b, c) in enumerate(triples, 1))


def test_a_threadgroup_is_no_larger_than_the_grid():
    with emulated():
        kernel = mx.fast.metal_kernel(
            name="small", input_names=[], output_names=["o"], source="o[0] = threads_per_threadgroup.x;"
        )
        (o,) = kernel(inputs=[], output_shapes=[(1,)], output_dtypes=[mx.int32], grid=(1, 1, 1), threadgroup=(64, 1, 1))
    assert o.item() == 1


def test_inputs_of_any_size_with_shapes_strides_and_scalars():
    a = mx.array(X[:6].reshape(2, 3))
    source = "o[0] = a_ndim * 1000 + a_shape[0] * 100 + a_shape[1] * 10 + a_strides[0]; o[1] = a[5] * s + float(n);"
    got = values(source, {"a": a, "s": mx.array(2.0), "n": 3}, threads=1, shape=(2,))
    np.testing.assert_allclose(got, [2233, X[5] * 2 + 3], rtol=1e-6)


def test_inputs_that_are_not_contiguous():
    a = mx.array(X.reshape(8, 8)).T
    assert values(INDEX + "o[i] = a[i];", {"a": a}).tolist() == X.reshape(8, 8).T.ravel().tolist()
    with emulated():
        kernel = mx.fast.metal_kernel(
            name="small",
            input_names=["a"],
            output_names=["o"],
            source="uint2 p = uint2(thread_position_in_grid.x, thread_position_in_grid.y); "
            "o[p.y * 8 + p.x] = a[p.y * a_strides[0] + p.x * a_strides[1]];",
            ensure_row_contiguous=False,
        )
        shape = {"output_shapes": [(8, 8)], "output_dtypes": [mx.float32]}
        (got,) = kernel(inputs=[a], grid=(8, 8, 1), threadgroup=(8, 8, 1), **shape)
    assert (np.array(got) == X.reshape(8, 8).T).all()


def test_templates_and_headers():
    header = "#define TWO 2\ntemplate <typename T> METAL_FUNC T twice(T x) { return TWO * x; }\n"
    source = INDEX + "o[i] = twice<T>(T(x[i])) + N; if (EXACT) o[i] += 0.5f;"
    got = values(source, header=header, template=[("T", mx.float16), ("N", 3), ("EXACT", True)])
    np.testing.assert_allclose(got, 2 * X.astype(np.float16).astype(np.float32) + 3.5, rtol=2e-3)


def test_initial_values():
    assert values("o[1] = 5;", threads=1, shape=(3,), init_value=2).tolist() == [2, 5, 2]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_short_floats(dtype):
    a, b = (mx.array(RNG.standard_normal(64).astype(np.float32)).astype(dtype) for _ in range(2))
    with emulated():
        for source, want in (
            ("o[i] = a[i] * b[i] + a[i];", a * b + a),  # rounded after each operation
            ("T c = a[i]; c += b[i]; c *= 3; o[i] = c / b[i];", (a + b) * 3 / b),
            ("o[i] = T(float(a[i]) * b[i]);", (a.astype(mx.float32) * b.astype(mx.float32)).astype(dtype)),
            ("o[i] = i < 32 ? a[i] : 0;", mx.where(mx.arange(64) < 32, a, mx.array(0, dtype))),
            ("o[i] = T(metal::max(a[i], -b[i]) > T(0.5f));", (mx.maximum(a, -b) > 0.5).astype(dtype)),
        ):
            got = run(INDEX + source, {"a": a, "b": b}, template=[("T", dtype)], dtype=dtype)
            assert mx.array_equal(got, want), source


def test_vectors():
    source = """
        float4 v = ((const device float4*)x)[i], w = v * 2.0f + float4(1, 2, 3, 4);
        w.x -= v[3];
        threadgroup float4 s[16];
        s[i] = fma(v, w, -w);
        o[i] = dot(s[i], float4(1.0f)) + dot(float2(v.x, v.y), float2(half2(half(2))));
    """
    v = X.reshape(16, 4)
    w = v * 2 + [1, 2, 3, 4]
    w[:, 0] -= v[:, 3]
    want = (v * w - w).sum(1) + 2 * (v[:, 0] + v[:, 1])
    np.testing.assert_allclose(values(INDEX + source, threads=16, shape=(16,)), want, rtol=1e-5)


def test_functions():
    source = "float y = precise::exp(x[i]); o[i] = log(y) + rsqrt(y) * sqrt(y) + as_type<float>(as_type<uint>(y));"
    np.testing.assert_allclose(values(INDEX + source), X + 1 + np.exp(X), rtol=1e-5)


def test_threadgroup_memory_in_pieces_of_several_types():
    header = "#define ARENA 128\n"
    source = f"""
        threadgroup float arena[ARENA];
        {INDEX}
        threadgroup bfloat16_t* keys = (threadgroup bfloat16_t*)(arena + 64);
        arena[i] = x[i];
        keys[i] = bfloat16_t(x[i]);
        {BARRIER}
        o[i] = arena[63 - i] + keys[i ^ 32];
    """
    rounded = np.array(mx.array(X).astype(mx.bfloat16).astype(mx.float32))
    assert (values(source, header=header) == X[::-1] + rounded[np.arange(64) ^ 32]).all()


# What threads do together


@pytest.mark.parametrize(
    ("operation", "want"),
    [
        ("simd_max(x[i])", SIMD_X.max(1, keepdims=True) + 0 * SIMD_X),
        ("simd_shuffle_xor(x[i], 9)", SIMD_X[:, LANES ^ 9]),
        ("simd_shuffle(x[i], ushort(31 - i % 32))", SIMD_X[:, ::-1]),
        ("simd_shuffle_down(x[i], 3)", SIMD_X[:, np.where(LANES + 3 < 32, LANES + 3, LANES)]),
        ("simd_shuffle_up(x[i], 3)", SIMD_X[:, np.where(LANES >= 3, LANES - 3, LANES)]),
        ("simd_broadcast(x[i], 5)", SIMD_X[:, [5] * 32]),
        ("simd_broadcast_first(x[i])", SIMD_X[:, [0] * 32]),
    ],
)
def test_simd_operations(operation, want):
    assert (values(f"{INDEX} o[i] = {operation};") == want.ravel()).all()


@pytest.mark.parametrize(
    ("operation", "want"),
    [
        ("simd_sum(x[i])", SIMD_X.sum(1, keepdims=True) + 0 * SIMD_X),
        ("simd_prefix_inclusive_sum(x[i])", SIMD_X.cumsum(1)),
        ("simd_prefix_exclusive_sum(x[i])", SIMD_X.cumsum(1) - SIMD_X),
    ],
)
def test_simd_sums(operation, want):
    np.testing.assert_allclose(values(f"{INDEX} o[i] = {operation};"), want.ravel(), rtol=1e-4, atol=1e-5)


def test_the_butterfly_is_simd_sum():
    butterfly = " ".join(f"v += simd_shuffle_xor(v, {m});" for m in (1, 2, 4, 8, 16))
    assert (values(f"{INDEX} float v = x[i]; {butterfly} o[i] = v - simd_sum(x[i]);") == 0).all()


def test_where_a_lane_holds_a_matrix():
    source = """
        simdgroup_float8x8 m;
        simdgroup_load(m, x, 8);
        for (int j = 0; j < 2; j++) o[i * 2 + j] = m.thread_elements()[j];
    """
    b = [LANES >> n & 1 for n in range(5)]
    first = (4 * b[4] + 2 * b[2] + b[1]) * 8 + 4 * b[3] + 2 * b[0]
    assert (values(INDEX + source, threads=32) == X[np.stack([first, first + 1], 1).ravel()]).all()


def test_a_diagonal_matrix():
    source = "simdgroup_float8x8 m(2.0f); simdgroup_store(m, o, 8);"
    assert (values(source, threads=32, shape=(8, 8)) == 2 * np.eye(8)).all()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("transpose", [False, True])
def test_matrix_products(dtype, transpose):
    a, b = (mx.array(RNG.standard_normal(s).astype(np.float32)).astype(dtype) for s in ((16, 24), (24, 8)))
    source = """
        const uint group = simdgroup_index_in_threadgroup;
        simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        simdgroup_matrix<T, 8, 8> x, y;
        for (int k = 0; k < 3; k++) {
            simdgroup_load(x, a + group * 8 * 24, 24, ulong2(k * 8, 0));
            if (TRANSPOSE) simdgroup_load(y, b + k * 8, 24, ulong2(0, 0), true);
            else simdgroup_load(y, b + k * 64, 8);
            simdgroup_multiply_accumulate(sum, x, y, sum);
        }
        simdgroup_store(sum, o + group * 64, 8);
    """
    right = mx.contiguous(b.T) if transpose else b
    template = [("T", dtype), ("TRANSPOSE", transpose)]
    got = values(source, {"a": a, "b": right}, template=template, shape=(16, 8))
    want = np.array(a.astype(mx.float32)) @ np.array(b.astype(mx.float32))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_atomics_in_an_order_that_the_seed_chooses():
    def count_and_last(seed):
        with emulated(seed=seed):
            kernel = mx.fast.metal_kernel(
                name="small",
                input_names=[],
                output_names=["o"],
                source="atomic_fetch_add_explicit(&o[0], 1.0f, memory_order_relaxed); "
                "atomic_store_explicit(&o[1], float(thread_position_in_grid.x), memory_order_relaxed);",
                atomic_outputs=True,
            )
            shape = {"output_shapes": [(2,)], "output_dtypes": [mx.float32], "init_value": 0}
            return kernel(inputs=[], grid=(256, 1, 1), threadgroup=(64, 1, 1), **shape)[0].tolist()

    counts, lasts = zip(*map(count_and_last, (1, 2, 3, 4, 1)), strict=True)
    assert set(counts) == {256}
    assert lasts[4] == lasts[0]
    assert len(set(lasts)) > 2


def test_inside_a_gradient():
    @mx.custom_function
    def square(x):
        return run(INDEX + "o[i] = x[i] * x[i];", {"x": x})

    @square.vjp
    def backward(primals, cotangent, _):
        return run(INDEX + "o[i] = 2 * x[i] * d[i];", {"x": primals, "d": cotangent})

    with emulated():
        gradient = mx.grad(lambda x: (square(x) * x).sum())(mx.array(X))
    np.testing.assert_allclose(np.array(gradient), 3 * X**2, rtol=1e-5)
