"""What the emulator must catch. Each text is wrong in one way, and says so in its name."""

import mlx.core as mx
import numpy as np
import pytest
from metal.emulator import MetalFault, emulated
from metal.small import BARRIER, INDEX, run

X = mx.array(np.random.default_rng(0).standard_normal(64).astype(np.float32))
SHARE = f"threadgroup float s[64]; {INDEX} s[i] = x[i]; {BARRIER} o[i] = s[63 - i];"


def fault(source, match, *, sanitize=True, seed=1, **options):
    with emulated(seed=seed, sanitize=sanitize), pytest.raises(MetalFault, match=match):
        run(source, {"x": X}, **options)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("o[i] = x[i + 1];", "reads 4 bytes out of bounds, 0 bytes past the end of buffer `x` of 256.* at body:1"),
        ("o[i] = x[int(i) - 1];", "reads .* 4 bytes before buffer `x`"),
        ("o[i + 1] = x[i];", "writes .* past the end of buffer `o`"),
        ("o[int(i) - 1] = x[i];", "writes .* before buffer `o`"),
        ("o[i] = x[i + 100000];", "past the end of buffer `x`"),
        ("float4 v = *(const device float4*)(x + 60 + i / 32 * 4); o[i] = v.x;", "reads .* buffer `x`"),
        ("threadgroup float s[64]; s[i] = x[i]; o[i] = ((threadgroup float*)s)[i + 1];", "threadgroup memory `s`"),
    ],
    ids=["read-after", "read-before", "write-after", "write-before", "far", "vector", "threadgroup"],
)
def test_out_of_bounds(source, match):
    fault(INDEX + source, match)


def test_out_of_bounds_of_an_array_with_a_known_extent():
    fault(f"threadgroup float s[64]; {INDEX} s[i] = x[i]; {BARRIER} o[i] = s[i + 1];", "out of bounds|past the end")


def test_out_of_bounds_of_a_threads_own_array():
    source = f"{INDEX} float own[4] = {{x[0], x[1], x[2], x[3]}}; thread float* p = own; o[i] = p[x_shape[0] / 16];"
    fault(source, "stack-buffer-overflow|own array", sanitize="address")


@pytest.mark.parametrize("sanitize", ["address", False])
def test_out_of_bounds_whatever_the_sanitizer(sanitize):
    fault(INDEX + "o[i] = x[i + 1];", "past the end of buffer `x`", sanitize=sanitize)


def test_a_write_to_an_input():
    fault(INDEX + "((device float*)x)[i] = 1.0f; o[i] = x[i];", "writes input `x`")
    fault(INDEX + "((device float*)x)[i] = 1.0f; o[i] = x[i];", "buffer `x`", sanitize=False)


def test_undefined_arithmetic():
    fault(INDEX + "o[i] = 1 << (x_shape[0] - 32 + i);", "shift exponent")


# Lanes of one SIMD group that part


@pytest.mark.parametrize("sanitize", [True, False])
@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("float v = x[i]; if (i < 7) v = simd_sum(v); o[i] = v;", "thread 0 is in simd_sum at body:1.*return"),
        ("float v = x[i];\nif (i < 7) v = simd_sum(v);\nelse v = simd_max(v);\no[i] = v;", "body:2.*body:3"),
        ("float v = i < 7 ? simd_sum(x[i]) : simd_sum(-x[i]); o[i] = v;", "meet at different places"),
        (f"if (i < 7) simdgroup_barrier(mem_flags::mem_none); else {BARRIER} o[i] = x[i];", "different places"),
        ("float v = 0; for (uint t = 0; t <= i % 2; t++) v += simd_shuffle_xor(x[i], 1); o[i] = v;", "returned early"),
    ],
    ids=["some", "two-lines", "one-line", "two-barriers", "loop"],
)
def test_lanes_that_meet_at_different_places(source, match, sanitize):
    fault(INDEX + source, match, sanitize=sanitize)


@pytest.mark.parametrize(
    "source", ["o[i] = simd_shuffle(x[i], 32);", "o[i] = simd_broadcast(x[i], ushort(i));"], ids=["absent", "varying"]
)
def test_a_shuffle_from_no_lane(source):
    fault(INDEX + source, "from lane")


@pytest.mark.parametrize("operation", ["simd_sum(x[i])", "simd_shuffle_xor(x[i], 1)"])
def test_a_simd_operation_of_a_part_of_a_group(operation):
    fault(f"{INDEX} o[i] = {operation};", "by a SIMD group of 16 threads", threads=48)


# Threads of one threadgroup that part


@pytest.mark.parametrize("sanitize", [True, False])
@pytest.mark.parametrize(
    ("source", "match"),
    [
        (f"if (i < 32) {BARRIER} o[i] = x[i];", "returned before a barrier"),
        (f"if (i == 3) return; {BARRIER} o[i] = x[i];", "returned early.*thread 3 in return"),
        (f"if (i / 32 == 1) return; {BARRIER} o[i] = x[i];", "returned before a barrier"),
        (f"if (i < 32) {{ {BARRIER} }} else {{\n{BARRIER} }} o[i] = x[i];", "different barriers.*body:1.*body:2"),
    ],
    ids=["some", "early-return", "early-return-of-a-simd-group", "two-barriers"],
)
def test_a_barrier_that_not_all_reach(source, match, sanitize):
    fault(INDEX + source, match, sanitize=sanitize)


# Limits


def test_too_much_threadgroup_memory():
    with emulated():
        run(f"threadgroup float s[8192]; {INDEX} s[i] = 1.0f; o[i] = s[i];", {"x": X})
    fault(f"threadgroup float s[8192], more[1]; {INDEX} s[i] = 1.0f; o[i] = s[i];", "32784 bytes of threadgroup memory")


def test_too_many_threads():
    fault(INDEX + "o[i] = x[i % 64];", "1056 threads", threads=1056, shape=(1056,))


def test_too_many_buffers():
    names = [f"x{n}" for n in range(30)]
    with emulated():
        run(INDEX + "o[i] = x0[i];", dict.fromkeys(names, X))
        with pytest.raises(MetalFault, match="32 buffers"):
            run(INDEX + "o[i] = x0[i] + x0_shape[0];", dict.fromkeys(names, X))


# Memory that is read before it is written, or by another thread without a barrier


def test_unwritten_memory_is_nan():
    with emulated():
        assert mx.isnan(run(f"threadgroup float s[64]; {INDEX} o[i] = s[i] + x[i];", {"x": X})).all()
        assert mx.isnan(run(f"{INDEX} if (i != 5) o[i] = x[i];", {"x": X})).tolist() == [i == 5 for i in range(64)]
        assert mx.isnan(run(INDEX + "simdgroup_float8x8 m; o[i] = m.thread_elements()[0];", {"x": X})).all()
        for dtype in (mx.float16, mx.bfloat16):
            assert mx.isnan(run(f"{INDEX} if (i != 5) o[i] = 1;", {"x": X}, dtype=dtype))[5]


def test_threadgroup_memory_is_new_to_every_threadgroup():
    source = f"threadgroup float s[1]; {INDEX} o[i] = s[0]; {BARRIER} if (i % 64 == 0) s[0] = 1.0f;"
    with emulated():
        assert mx.isnan(run(source, {"x": X}, (192,), groups=3)).all()


@pytest.mark.parametrize(
    "source",
    [
        SHARE.replace(BARRIER, ""),
        SHARE.replace("mem_threadgroup", "mem_none"),
        f"threadgroup float s[32]; {INDEX} s[i % 32] = x[i]; {BARRIER} o[i] = s[i % 32];",
        f"threadgroup float s[32]; {INDEX} if (i < 32) s[i] = x[i]; {BARRIER} o[i] = s[i % 32]; if (i > 31) s[0] = 1;",
        f"threadgroup float s[64]; {INDEX} s[i] = x[i]; simd_sum(x[i]); o[i] = s[i ^ 1];",
        f"threadgroup float s[64]; auto b = (threadgroup bfloat16_t*)s; {INDEX} b[i / 2] = o[i] = 1;",
    ],
    ids=["no-barrier", "barrier-of-nothing", "write-write", "read-write", "within-a-simd-group", "cast"],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_race_in_threadgroup_memory(source, seed):
    fault(source, "data race.* of threadgroup memory `s`.* at body:1", seed=seed)


def test_a_missing_barrier_shows_without_the_watch():
    with emulated(sanitize=False):
        assert mx.isnan(run(SHARE.replace(BARRIER, ""), {"x": X})).any()


def test_an_output_element_with_two_writers():
    fault(INDEX + "o[i / 2] = x[i];", "data race.* of buffer `o`")
    fault(INDEX + "o[i % 64] = x[i % 64];", "data race.* a thread of another threadgroup wrote", groups=2)


def test_what_is_no_race():
    barrier = "simdgroup_barrier(mem_flags::mem_threadgroup);"
    halves = "threadgroup half* h = (threadgroup half*)s; h[i] = half(x[i]);"
    with emulated():
        run(f"threadgroup float s[64]; {INDEX} s[i] = x[i]; {barrier} o[i] = s[i ^ 1];", {"x": X})
        run(f"threadgroup float s[64]; {INDEX} {halves} {BARRIER} o[i] = h[63 - i];", {"x": X})
        run(f"{INDEX} o[i] = x[i]; threadgroup_barrier(mem_flags::mem_device); o[63 - i] += 1;", {"x": X})


def test_a_text_that_is_no_metal():
    fault(INDEX + "o[i] = nonsense(x[i]);", "(?s)does not compile.*body:1.*nonsense")
    fault("\n\n" + INDEX + "o[i] = helper(x[i]);", "header:2", header="\nfloat helper(float x) { return y; }")
