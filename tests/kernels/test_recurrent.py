"""The recurrent kernels, emulated, against the float64 oracle: output, final state and six gradients."""

import emulation
import mlx.core as mx
import oracle
import pytest
from gdkernels import recurrent
from gdkernels.portable.machine import force, shared_bytes
from gdkernels.recurrent import layout, reverse, scan
from gdkernels.sizes import Sizes
from metal.emulator import emulated

# (T, C, B, Hk, Hv, Dk, Dv): every head dimension that is accepted, and so every number of rows and columns in a lane;
# Dv of less than a threadgroup's rows, of several threadgroups, and with a last threadgroup that is not full.
SIZES = [
    (1, 16, 1, 1, 1, 32, 4),
    (2, 1, 2, 1, 2, 64, 8),
    (15, 16, 1, 2, 4, 96, 20),
    (16, 16, 1, 1, 2, 128, 20),
    (17, 16, 2, 1, 1, 160, 4),
    (17, 6, 1, 1, 1, 192, 20),
    (13, 3, 1, 1, 1, 224, 8),
    (19, 4, 1, 1, 3, 256, 8),
    (55, 16, 1, 1, 3, 32, 64),
    (55, 16, 2, 2, 4, 64, 64),
]
# Fast, and with a threadgroup that is not full: the corners below share its two kernels.
CORNER = (23, 7, 2, 1, 2, 64, 20)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size):
    check(size)


@pytest.mark.parametrize("T", [1, 2, 3, 4, 6, 7, 8, 14, 28])
def test_lengths(T):
    check((T, *CORNER[1:]))


@pytest.mark.parametrize("chunk_size", [1, 2, 4, 5, 8, 22, 23, 1000])
def test_chunk_sizes(chunk_size):
    check((CORNER[0], chunk_size, *CORNER[2:]))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("size", [CORNER, (9, 4, 1, 1, 2, 128, 8)], ids=str)
def test_activations(size, dtype):
    emulation.check_activations(recurrent.rule, size, dtype)


@pytest.mark.parametrize("limit", ["SUMS_BYTES", "LAUNCH_MULTIPLY_ADDS"])
def test_launches_of_one_chunk(limit, monkeypatch):
    """Both limits cut a row into launches; the state and its gradient pass between them without a change of bits."""
    given, cotangents, want = emulation.expected(CORNER)
    whole = emulation.run(recurrent.rule, CORNER, given, cotangents)
    monkeypatch.setattr(layout, limit, 1)
    with emulated() as launches:
        got = oracle.measure(recurrent.rule, given, **cotangents, chunk_size=CORNER[1])
    forward, backward = (1, 4) if limit == "SUMS_BYTES" else (4, 4)
    assert [launch.text.name.rsplit("_", 1)[0] for launch in launches] == (
        [scan.PROGRAM.name] * forward + [reverse.PROGRAM.name] * backward
    )
    oracle.assert_matches(got, want)
    oracle.assert_same_bits(got, whole)


def test_spans_keep_to_the_limits():
    cut = list(layout.spans(1000, 64, 2**20, 1))  # 1 MiB a token: 256 tokens
    assert cut == [(0, 256), (256, 512), (512, 768), (768, 1000)]
    assert list(layout.spans(1000, 300, 2**20, 1)) == [(0, 300), (300, 600), (600, 900), (900, 1000)]
    assert [last - first for first, last in layout.spans(300, 64, 1, int(1e8))] == [64] * 4 + [44]
    assert list(layout.spans(10**6, 64, 0, 1)) == [(0, 10**6)]


@pytest.mark.parametrize("size", [CORNER, (9, 4, 1, 1, 2, 128, 20)], ids=str)
def test_same_bits_in_any_order_of_threads(size):
    emulation.check_order_of_threads(recurrent.rule, size)


def test_documents_do_not_leak():
    emulation.check_documents(recurrent.rule, CORNER, 11)


def test_a_row_has_the_gradients_it_has_alone():
    emulation.check_rows_alone(recurrent.rule, CORNER)


def test_another_length_compiles_nothing():
    texts = set()
    for T, C, B in ((9, 4, 1), (10, 5, 2)):
        launches = emulation.launches_of(recurrent.rule, (T, C, B, *CORNER[3:]))
        texts |= {launch.text for launch in launches}
        assert not any(launch.template for launch in launches)
    assert len(texts) == 2


@pytest.mark.parametrize("size", [SIZES[0], CORNER, SIZES[-2]], ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_address_spaces(size, dtype):
    """The first size has inputs of fewer than 8 elements, which MLX hands over as `constant`."""
    emulation.check_spaces(emulation.launches_of(recurrent.rule, size, dtype))


@pytest.mark.parametrize("Dk", range(32, layout.MAX_KEY_DIM + 1, 32))
def test_resources(Dk):
    chosen = layout.layout_of(Dk)
    assert layout.live_floats(Dk, chosen.lane_rows) <= layout.MAX_LIVE_FLOATS
    assert 4 * layout.arena_floats(Dk, chosen.simd_groups) <= shared_bytes("metal")
    assert chosen.threads == 128


def test_refusals():
    sizes = Sizes(1, 8, 2, 4, 64, 8, mx.float32, 4)
    with force("metal"):
        assert recurrent.refusal(sizes) is None
        assert recurrent.refusal(sizes._replace(Dk=48)) == "Dk = 48 is not accepted: a multiple of 32 up to 256 is"
        assert recurrent.refusal(sizes._replace(Dk=288)) == "Dk = 288 is not accepted: a multiple of 32 up to 256 is"
        assert recurrent.refusal(sizes._replace(Dv=6)) == "Dv = 6 is not accepted: a multiple of 4 is"
    if mx.default_device() == mx.cpu:
        assert recurrent.refusal(sizes) == "needs a GPU"


def test_text_holds_all_that_reaches_a_kernel():
    assert all(program.source in recurrent.text() for program in (scan.PROGRAM, reverse.PROGRAM))
    ours = set(recurrent.text().splitlines())
    for launch in emulation.launches_of(recurrent.rule, CORNER):
        lines = launch.text.header.splitlines()
        assert {line for line in lines if not line.startswith(("#define", "typedef"))} <= ours


# Stage, what stands in its text, what is put in its place.
FAULTS = {
    "barrier before the sums over rows": (
        reverse,
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n        //",
        "//",
    ),
    "barrier before the gates' sums": (reverse, "threadgroup_barrier(mem_flags::mem_threadgroup);\n      if", "if"),
    "barrier behind the errors": (reverse, "simdgroup_barrier(mem_flags::mem_device);  // one", "// one"),
    "barrier before the next errors": (reverse, "simdgroup_barrier(mem_flags::mem_device);  // the", "// the"),
    "one row group's dq and dk": (reverse, "s < SIMD_GROUPS; s++) sum += key", "s < SIMD_GROUPS - 1; s++) sum += key"),
    "one row group's gates": (reverse, "s < SIMD_GROUPS; s++) sum += gate", "s < SIMD_GROUPS - 1; s++) sum += gate"),
    "one token's memory for two": (reverse, "step % 2 *", "0 *"),
    "q of another token": (reverse, "q_at + held", "q_at + max(held - 1, 0)"),
    "k of another column": (
        reverse,
        "* KEY_DIM + lane;\n  const auto q_at",
        "* KEY_DIM + (lane ^ 1);\n  const auto q_at",
    ),
    "state of another stretch": (reverse, "S[r][i] = saved_at[stretch *", "S[r][i] = saved_at[0 *"),
    "chunk from the first chunk's state": (
        reverse,
        "size_t(first / chunk_tokens + chunk)",
        "size_t(first / chunk_tokens)",
    ),
    "past the chunk's end": (reverse, "held * value_step, t < end ? rows : 0", "held * value_step, rows"),
    "gradient of the state not decayed": (reverse, "dS[r][i] *= g[step];", ""),
    "update left out of dq": (reverse, "float dq = along_k * k_t[i];", "float dq = 0.0f;"),
    "rows past Dv": (reverse, "if (lane == r && r < rows && t < end)", "if (lane == r && t < end)"),
    "chunk start one token late": (scan, "if (t == chunk * chunk_tokens)", "if (t == chunk * chunk_tokens + 1)"),
    "next token's k": (scan, "k_at + next * key_step", "k_at + t * key_step"),
    "state before its decay": (scan, "S[r][i] *= g;\n", "\n"),
    "final state's rows": (scan, "store_state(S, last_state + state_at, KEY_DIM, rows)", "rows"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_kernel_is_rejected(fault, monkeypatch):
    stage, text, instead = FAULTS[fault]
    emulation.assert_rejected(monkeypatch, (stage.PROGRAM.name, text, instead), lambda: check(CORNER))


def check(size, change=None, **options):
    emulation.check(recurrent.rule, size, change, **options)
