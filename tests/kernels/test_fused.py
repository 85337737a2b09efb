"""The chunked kernels, emulated, against the float64 oracle: output, final state and six gradients."""

from importlib import import_module

import emulation
import mlx.core as mx
import oracle
import pytest
from fused_plans import M1, M4, STAGES, plan_of
from gdkernels import fused
from gdkernels.fused import plan, stages
from gdkernels.portable.machine import force
from gdkernels.sizes import Sizes
from metal.emulator import emulated

rule = import_module("gdkernels.fused.rule")  # the package has a function of that name

# Two head dimensions that are filled up, two value heads for each of two key heads, two rows, three chunks.
CORNER = (40, 16, 2, 2, 4, 40, 24)
# What the kernels are compiled for; test_every_variant_is_among_the_cases says why. `busy`: heads enough to fill a GPU,
# so that the threadgroups of a sweep have several SIMD groups. The last case has inputs of fewer than 8 elements, which
# MLX hands over as `constant`.
CASES = [
    (M4, False, mx.float32, CORNER),
    (M4, False, mx.float16, (103, 32, 1, 2, 6, 80, 64)),
    (M4, False, mx.bfloat16, (35, 64, 1, 1, 1, 256, 8)),
    (M4, True, mx.float32, (70, 64, 1, 1, 2, 64, 32)),
    (M4, True, mx.float32, (35, 16, 1, 1, 1, 32, 64)),
    (M1, False, mx.float32, CORNER),
    (M1, False, mx.float32, (71, 32, 1, 1, 3, 48, 16)),
    (M1, True, mx.float16, (33, 32, 1, 1, 1, 32, 32)),
    (M1, True, mx.bfloat16, (130, 64, 1, 1, 1, 32, 32)),
    (M4, True, mx.float32, (1, 16, 1, 1, 1, 32, 64)),
]

pytestmark = pytest.mark.usefixtures("on")


def check(size, change=None, **options):
    emulation.check(fused.rule, size, change, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case, on):
    generation, busy, dtype, size = case
    on(generation, busy)
    if dtype == mx.float32:
        check(size)
        # With equal keys, beta 1 and no decay the powers of A would reach 1e18.
        check(size, "equal keys", decay="one", beta=1.0)
    else:
        emulation.check_activations(fused.rule, size, dtype)
    emulation.check_spaces(emulation.launches_of(fused.rule, size, dtype))


def test_every_variant_is_among_the_cases(on):
    found = set()
    for generation, busy, dtype, size in CASES:
        on(generation, busy)
        planned = plan_of("metal", size, dtype)
        for name in STAGES:
            stage = getattr(planned, name)
            given = stage.constants
            found |= {(name, what, given[what]) for what in ("C", "R", "GROUPS", "STAGED", "STAGES") if what in given}
        found |= {("block", planned.block), ("C", size[1], planned.C)}
    wanted = {(name, "C", C) for name in STAGES for C in plan.CHUNKS}
    wanted |= {(name, "STAGED", staged) for name in ("intra", "pairs", "keys", "sweep", "delta") for staged in (0, 1)}
    wanted |= {(name, "R", rows) for name in ("pairs", "keys", "sweep") for rows in (8, 16)}
    wanted |= {(name, "GROUPS", groups) for name in ("sweep", "delta") for groups in (1, 2, 4)}
    wanted |= {("sweep", "STAGES", n) for n in (1, 2)} | {("block", n) for n in (16, 32, 48)} | {("C", 64, 32)}
    assert wanted <= found, wanted - found


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 55])
def test_lengths(T):
    check((T, *CORNER[1:]))


def test_views():
    """Inputs and cotangents that are transposed, or cut out of something wider."""

    def turned(x):
        return mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2)

    def sliced(x):
        return mx.concatenate([x, x], axis=-1)[..., : x.shape[-1]]

    def on_views(q, k, v, log_decay, beta, state, chunk_size):
        views = turned(q), sliced(k), sliced(turned(v)), turned(log_decay), sliced(beta), turned(state)
        y, final = fused.rule(*views, chunk_size)
        return turned(y), turned(final)

    given, cotangents, want = emulation.expected(CORNER)
    got = emulation.run(on_views, CORNER, given, cotangents)
    oracle.assert_matches(got, want)
    oracle.assert_same_bits(got, emulation.run(fused.rule, CORNER, given, cotangents))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("limit", ["_SPAN_BYTES", "_LAUNCH_PRODUCTS"])
def test_spans(limit, chunks, monkeypatch):
    """Both limits cut a row; the state and its gradient pass between the spans without a change of bits."""
    given, cotangents, want = emulation.expected(CORNER)
    whole = emulation.run(fused.rule, CORNER, given, cotangents)
    lower(limit, chunks, monkeypatch)
    with emulated() as launches:
        got = oracle.measure(fused.rule, given, **cotangents, chunk_size=CORNER[1])
    oracle.assert_matches(got, want)
    oracle.assert_same_bits(got, whole)
    spans = {1: 3, 2: 2}[chunks]
    forward, backward = ["intra", "forward"], ["intra", "reverse", "delta", "pairs", "keys", "gates"]
    names = [launch.text.name.rsplit("_", 1)[0].removeprefix("gd_") for launch in launches]
    assert names == forward * (spans if limit == "_LAUNCH_PRODUCTS" else 1) + backward * spans


def lower(limit, chunks, monkeypatch):
    """Lowers the limit until the spans of CORNER have that many chunks."""
    planned, memory, value = plan_of("metal", CORNER), limit == "_SPAN_BYTES", getattr(rule, limit)
    while next(rule._spans(planned, CORNER[0], memory=memory)).chunks > chunks:
        value *= 0.9
        monkeypatch.setattr(rule, limit, value)


def test_spans_are_about_equal(monkeypatch):
    lower("_LAUNCH_PRODUCTS", 2, monkeypatch)
    planned = plan_of("metal", CORNER)
    assert [span[:2] for span in rule._spans(planned, 70, memory=False)] == [(0, 2), (2, 2), (4, 1)]
    assert [span.tokens(16) for span in rule._spans(planned, 70, memory=False)] == [32, 32, 6]


@pytest.mark.parametrize("generation", [M1, M4])
def test_same_bits_in_any_order_of_threads(generation, on):
    on(generation)
    emulation.check_order_of_threads(fused.rule, CORNER)


@pytest.mark.parametrize("start", [11, 16, 37])
def test_documents_do_not_leak(start):
    emulation.check_documents(fused.rule, CORNER, start)


@pytest.mark.parametrize("generation", [M1, M4])
def test_a_row_has_the_gradients_it_has_alone(generation, on):
    on(generation)
    emulation.check_rows_alone(fused.rule, CORNER)


def test_another_length_compiles_nothing():
    sizes = (CORNER, (17, CORNER[1], 1, *CORNER[3:]))
    texts = [{launch.text for launch in emulation.launches_of(fused.rule, size)} for size in sizes]
    assert texts[0] == texts[1]
    assert len(texts[0]) == len(stages.PROGRAMS)


def test_refusals():
    sizes = Sizes(1, 8, 2, 4, 250, 8, mx.float32, 32)
    with force("metal"):
        assert fused.refusal(sizes) is None
        assert "not Dk = 257, Dv = 8" in fused.refusal(sizes._replace(Dk=257))
        assert "not Dk = 250, Dv = 272" in fused.refusal(sizes._replace(Dv=272))
        for C in (1, 8, 24, 48, 128):
            assert fused.refusal(sizes._replace(C=C)) == f"chunk_size 16, 32, 64 are accepted, not {C}"
    if mx.default_device() == mx.cpu:
        assert "needs a GPU" in fused.refusal(sizes)
        given, _, _ = emulation.expected(CORNER)
        with pytest.raises(RuntimeError, match="needs a GPU"):
            fused.rule(*map(mx.array, given.values()), 16)


def test_text_holds_all_that_reaches_a_kernel():
    ours = set(fused.text().splitlines())
    for launch in emulation.launches_of(fused.rule, CORNER):
        lines = (launch.text.header + launch.text.source).splitlines()
        assert {line for line in lines if not line.startswith(("#define", "typedef"))} <= ours


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
# Program, what stands in its text, what is put in its place.
FAULTS = {
    "wait for operands": ("gd_forward", f"stage_wait<0>();\n  }}\n  {BARRIER}", "stage_wait<0>();\n  }\n"),
    "wait for rows of S": ("gd_keys", f"stage_wait<0>();\n  }}\n  {BARRIER}", "stage_wait<0>();\n  }\n"),
    "release of operands": ("gd_reverse", "    released();\n", ""),
    "release of S before the next head": ("gd_keys", "    released();\n    const", "    const"),
    "release of S before Q and K": ("gd_keys", "  released();\n  const NearActivations", "  const NearActivations"),
    "other half of threadgroup memory": ("gd_forward", "(chunk + 1) % 2 * STAGE_FLOATS", "chunk % 2 * STAGE_FLOATS"),
    "wait for log_decay": ("gd_intra", f": 0.0f;\n  {BARRIER}", ": 0.0f;\n"),
    "wait for sums of log_decay": ("gd_intra", f"block;\n  }}\n  {BARRIER}", "block;\n  }\n"),
    "wait for A": ("gd_intra", f"    {BARRIER}    invert", "    invert"),
    "wait for columns of the inverse": (
        "gd_intra",
        f"      x[i] = sum;\n    }}\n  }}\n  {BARRIER}",
        "x[i] = sum;\n    }\n  }\n",
    ),
    "wait for R": ("gd_pairs", f"    {BARRIER}    if (thread_id < C) {{  //", "    if (thread_id < C) {  //"),
    "wait for running sums": ("gd_pairs", f"    {BARRIER}    if (thread_id < C) {{\n", "    if (thread_id < C) {\n"),
    "wait before the next head's R": ("gd_pairs", f"= sum;\n    }}\n    {BARRIER}", "= sum;\n    }\n"),
    "wait for u and e": ("gd_gates", f"  {BARRIER}", ""),
    "key head of a value head": ("gd_forward", "head / (value_heads / key_heads)", "head % key_heads"),
    "key head in the backward": ("gd_reverse", "head / (value_heads / key_heads)", "head % key_heads"),
    "value heads of a key head": ("gd_keys", "head * (value_heads / key_heads) + g", "head + g * key_heads"),
    "gradient of the state behind the row": ("gd_reverse", "= tile(last, v0, 8 * d, lane)", "= zero_tile()"),
    "decay of the state": ("gd_forward", "scale(S[d], o.scales[C - 1]);", ";"),
    "token's own value in the readout": ("gd_forward", "int i = j; i < C / 16", "int i = j + 1; i < C / 16"),
    "decay of the diagonal's neighbour": ("gd_intra", "col < l && l <= lane.row", "col < l && l < lane.row"),
    "tokens past the row's end": ("gd_intra", "thread_id < valid ?", "thread_id < C ?"),
    "y past the row's end": ("gd_forward", "span_tokens - chunk * C, readout", "C, readout"),
    "one term of dK": ("gd_keys", "mma(dk_tile[2 * n + h], kk_columns, k_block.r[h]);", ""),
    "one value head's d(k.k)": ("gd_pairs", "through_A[j][2 * i + c] +=", "through_A[j][2 * i + c] ="),
    "<S, dS> of one SIMD group": ("gd_keys", "if (value / 16 % GROUPS == group) S_dS", "S_dS"),
    "e of the token itself": ("gd_gates", "j < i ? e[j]", "j <= i ? e[j]"),
    "place of a lane in a matrix": ("gd_delta", "(id >> 3 & 1) * 4 + (id & 1) * 2", "(id >> 3 & 1) * 2 + (id & 1) * 4"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_kernel_is_rejected(fault, on, monkeypatch):
    on(M1)
    emulation.assert_rejected(monkeypatch, FAULTS[fault], lambda: check(CORNER))


def test_broken_inverse_is_rejected(on, monkeypatch):
    """Where blocks are put together, from C = 32 on."""
    generation, _, _, size = CASES[6]
    on(generation)
    fault = ("gd_intra", "scale(sum, -1.0f);", "")
    emulation.assert_rejected(monkeypatch, fault, lambda: check(size))


def test_state_of_another_span_is_rejected(monkeypatch):
    lower("_LAUNCH_PRODUCTS", 2, monkeypatch)
    fault = ("gd_delta", "bh * all_chunks + first + chunk", "bh * all_chunks + chunk")
    emulation.assert_rejected(monkeypatch, fault, lambda: check(CORNER))


def test_lost_gradient_of_the_state_is_rejected(monkeypatch):
    def forgetful(planned, q, k, dy, within, d_final, span):
        return reverse(planned, q, k, dy, within, d_final if span.first else mx.zeros_like(d_final), span)

    lower("_LAUNCH_PRODUCTS", 2, monkeypatch)
    reverse = stages.reverse
    monkeypatch.setattr(stages, "reverse", forgetful)
    with pytest.raises(AssertionError):
        check(CORNER)
