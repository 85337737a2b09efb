"""What the check of address spaces must accept, and what it must refuse."""

import re

import mlx.core as mx
import pytest
from metal import spaces, toolchain
from metal.signature import Like, bind_threadgroup_variables
from metal.small import BARRIER, INDEX, text

PAIR = """
struct Pair { float e[2]; float sum() const { return e[0] + e[1]; } };
METAL_FUNC Pair pair(float x) { Pair p; p.e[0] = p.e[1] = x; return p; }
METAL_FUNC float read(const thread Pair& p) { return p.sum(); }
METAL_FUNC void clear(thread Pair& p) { p.e[0] = 0; }
"""


def check(source, header="", *, size=64, template=()):
    return spaces.check(text(source, header), [Like(mx.float32, (size,) if size else ())], [mx.float32], template)


@pytest.mark.parametrize(
    ("source", "header"),
    [
        (f"threadgroup float s[64]; {INDEX} s[i] = x[i]; {BARRIER} o[i] = s[i] + simd_sum(x[i]);", ""),
        ("const device float* p = x; o[0] = p[0];", ""),
        ("float a[2] = {1, 2}; thread float* p = a; o[0] = p[0];", ""),
        ("simdgroup_float8x8 a, b, c(0.0f), m[2]; simdgroup_load(a, x, 8); simdgroup_store(a, o, 8);"
         "simdgroup_multiply_accumulate(c, a, b, c); m[0].thread_elements()[1] = c.thread_elements()[0];", ""),
        ("float4 v = float4(1, 2, 3, 4) * x[0]; v.x += dot(v, v); o[0] = metal::precise::exp(v.x);", ""),
        ("threadgroup float arena[ARENA]; auto b = (threadgroup bfloat16_t*)(arena + 64); o[0] = b[0];",
         "#define ARENA 128"),
        ("Pair p = pair(x[0]), q[2]; q[0] = p; clear(q[0]); o[0] = read(q[0]) + read(pair(1));", PAIR),
        ("auto r = rows(x, 3); o[0] = r.p[r.n];",
         "template <typename P> struct Rows { P p; int n; };\n"
         "template <typename P> METAL_FUNC Rows<P> rows(P p, int n) { Rows<P> r; r.p = p; r.n = n; return r; }"),
        ("int n = x_shape[0] * sizeof(float) * 2; o[n] = x_strides[0] + x_ndim; // float* p", ""),
    ],
    ids=["shared", "device", "thread", "matrix", "vector", "cast", "struct", "template", "attributes"],
)  # fmt: skip
def test_accepts(source, header):
    assert not check(source, header)


@pytest.mark.parametrize(
    ("source", "header", "words"),
    [
        ("const float* p = x; o[0] = p[0];", "", "no address space is named: const float \\*p = x"),
        ("float a[2]; float* p = a; o[0] = p[0];", "", "no address space is named: float \\*p = a"),
        ("o[0] = head(x);", "METAL_FUNC float head(const float* p) { return p[0]; }", "no address space is named"),
        ("float y; set(y);", "METAL_FUNC void set(float& y) { y = 1; }", "no address space is named: .*float &y"),
        ("float y; set(&y);", "template <typename T> void set(T* y) { *y = 1; }", "no address space is named: .*T\\*"),
        ("const threadgroup float* p = x; o[0] = p[0];", "", "body:1:.*cannot initialize"),
        ("threadgroup float s[8]; const device float* p = s; o[0] = p[0];", "", "body:1:.*cannot initialize"),
        ("threadgroup float* s = (threadgroup float*)o; s[0] = 1;", "", "mismatching address spaces"),
        ("threadgroup Pair s[2]; clear(s[0]);", PAIR, "no matching function"),
        ("threadgroup Pair s[2]; clear(s[0]); o[0] = read(pair(2));", PAIR, "no matching function"),
        ("x[0] = 1;", "", "not assignable"),
        ("\n\no[0] = nonsense(x[0]);", "", "body:3:.*nonsense"),
    ],
    ids=[
        "unspaced", "unspaced-thread", "unspaced-parameter", "unspaced-reference", "unspaced-template",
        "device-as-threadgroup", "threadgroup-as-device", "cast", "threadgroup-as-thread", "after-a-temporary",
        "write-to-input", "undeclared",
    ],
)  # fmt: skip
def test_refuses(source, header, words):
    assert re.search(words, check(source, header))


def test_small_inputs_are_constant_and_scalars_references():
    reads_device = "METAL_FUNC float head(const device float* p) { return p[0]; }"
    assert not check("o[0] = head(x);", reads_device, size=8)
    assert "no matching function" in check("o[0] = head(x);", reads_device, size=7)
    assert not check("o[0] = head(x);", "template <typename P> METAL_FUNC float head(P p) { return p[0]; }", size=7)
    assert not check("o[0] = x;", size=0)
    assert check("o[0] = x[0];", size=0)


def test_templates_are_instantiated():
    source = "if constexpr (N > 2) o[0] = T(x[0]); else o[0] = nonsense(T(x[0]));"
    assert not check(source, template=[("T", mx.bfloat16), ("N", 3)])
    assert "nonsense" in check(source, template=[("T", mx.bfloat16), ("N", 2)])


def test_threadgroup_variables_of_other_forms_are_refused():
    assert bind_threadgroup_variables("threadgroup float a[2][3], b;") == (
        'auto& a = threadgroup_variable<float[2][3]>("a"); auto& b = threadgroup_variable<float>("b");'
    )
    with pytest.raises(ValueError, match="more simply"):
        bind_threadgroup_variables("threadgroup unsigned long long a[2];")


def test_a_missing_compiler_is_said(monkeypatch):
    monkeypatch.setenv("CLANG", "clang-of-no-version")
    with pytest.raises(toolchain.MissingCompiler, match=r"clang-of-no-version not found.*apt-get install clang-19"):
        check("o[0] = x[0]; // not compiled before")
