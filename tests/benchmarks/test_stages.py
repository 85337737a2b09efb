"""The stage benchmark: its counts, and all of it on emulated kernels."""

import json

import chains
import mlx.core as mx
import pytest
import stage_counts
import stages
from gdkernels.fused.plan import plan
from gdkernels.portable.program import Program
from metal.emulator import emulated
from stage_counts import STAGES, count

from gdtrain.bench.shapes import Shape

CHAIN = 2


@pytest.fixture(autouse=True)
def _on_the_cpu():
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


# Two chunks of two value heads of one key head: 4 cells. C = 32: 3 blocks of 16 x 16 on and below the diagonal, 768
# elements. Dk = 16, Dv = 32: a product with the state has 32 * 16 * 32 = 16384 multiply-adds, a triangular one with Dv
# columns 768 * 32 = 24576. Two parts: floats times floats are 3 partial products, floats times activations 2.
COUNTED = {
    # 2 * 768 * 16 for q.k and k.k; 32 columns of 120 for the substitution; two products of 16 x 16 x 16, exact: 6 each
    "intra": (24576 + 3840 + 8192, 24576 + 3840 + 6 * 8192),
    "intra_with_pairs": (24576 + 3840 + 8192, 24576 + 3840 + 6 * 8192),
    "forward": (3 * 16384 + 2 * 24576, 6 * 16384 + 6 * 24576),
    "delta": (16384 + 24576, 2 * 16384 + 3 * 24576),
    "reverse": (3 * 16384 + 2 * 24576, 6 * 16384 + 5 * 24576),
    "pairs": (2 * 24576, 5 * 24576),
    # three with the states; four of 32 x 32 x 16 shared by two value heads
    "keys": (3 * 16384 + 32768, 8 * 16384 + 2 * 32768),
    "gates": (0, 0),
}


@pytest.mark.parametrize("stage", STAGES)
def test_operations(stage):
    sizes = plan("cuda", False, B=1, Hk=1, Hv=2, Dk=16, Dv=32, C=32, dtype=mx.bfloat16)
    counted = count(stage, sizes, T=40)
    assert (counted.operations, counted.partial_operations) == tuple(2 * 4 * n for n in COUNTED[stage])


def test_metal_has_no_parts():
    """There the value heads of a key head share q.k and k.k as well."""
    sizes = plan("metal", False, B=1, Hk=1, Hv=2, Dk=16, Dv=32, C=32, dtype=mx.bfloat16)
    for stage in STAGES:
        counted = count(stage, sizes, T=40)
        shared = 12288 if stage.startswith("intra") else 0
        assert counted.partial_operations == counted.operations == 2 * 4 * (COUNTED[stage][0] - shared)


@pytest.mark.parametrize(
    ("left", "right", "products"), [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 3), (3, 1, 3), (3, 3, 6)]
)
def test_partial_products(left, right, products):
    assert stage_counts.partial_products(left, right) == products


def run(tmp_path, *arguments):
    sizes = ["--tokens", "40", "--chunk", "16", "--chain", str(CHAIN), "--repeats", "1", "--plug-ms", "0"]
    with emulated(sanitize=False) as launches:
        stages.main([*sizes, *arguments, "--json", str(tmp_path / "out.json")])
    return json.loads((tmp_path / "out.json").read_text(encoding="utf-8")), launches


def test_emulated(tmp_path, monkeypatch):
    """Every stage and both backends, with bytes that are those of the arrays launched."""
    moved = {}
    launch = Program.__call__

    def weigh(program, inputs, outputs, **options):
        made = launch(program, inputs, outputs, **options)
        names = zip((*program.inputs, *program.outputs), (*inputs, *made), strict=True)
        moved[program] = sum(array.nbytes for name, array in names if name != "span")
        return made

    monkeypatch.setattr(Program, "__call__", weigh)
    report, launches = run(tmp_path, "--shape", "1,2,32,16", "--peak-tflops", "10", "--peak-gbps", "100")
    (shape,) = report["shapes"]
    assert (shape["shape"], shape["tokens"], shape["C"], shape["parts"]) == ("1,2,32,16", 40, 16, 1)
    assert [row["stage"] for row in shape["stages"]] == list(STAGES)
    assert [row["bytes"] for row in shape["stages"]] == [moved[program] for program in stages.stages.PROGRAMS]
    for row in shape["stages"]:
        assert row["chains"] == 1
        if row["ms"] is not None:
            assert row["ms_min"] <= row["ms"] <= row["ms_max"]
            assert row["gbps"] == pytest.approx(row["bytes"] / row["ms"] / 1e6)
            assert row["of_peak_gbps"] == pytest.approx(row["gbps"] / 100)
            assert row["of_peak_tflops"] == pytest.approx(row["partial_operations"] / row["ms"] / 1e9 / 10)
    assert [row["backend"] for row in shape["whole"]] == ["fused", "recurrent"]
    assert all(row["forward_backward_ms"] > 0 for row in shape["whole"])
    assert shape["whole"][0]["pipelined_ms"] > 0
    assert list(shape["seconds"]) == ["prepare", "stages", "whole"]
    # Two chains warm up; each of the eight stages, and the chain without one, ties every launch to the next.
    assert sum(launch.text.name.startswith("tie") for launch in launches) == (1 + len(STAGES)) * (2 + 1) * CHAIN


def test_launches_are_tied(monkeypatch):
    """A launch reads the numbers that the tie wrote, and the tie what the launch wrote."""
    reads, writes = [], []
    launch = Program.__call__

    def watch(program, inputs, outputs, **options):
        made = launch(program, inputs, outputs, **options)
        reads.append([id(x) for x in inputs])
        writes.append([id(x) for x in made])
        kept.extend([*inputs, *made])  # so that no id is given twice
        return made

    kept = []
    monkeypatch.setattr(Program, "__call__", watch)
    args = stages.parse(["--shape", "1,1,16,16", "--chain", "3", "--repeats", "1"])
    with emulated(sanitize=False):
        double = Program("double", ("numbers",), ("o",), "if (thread_index_in_threadgroup < 4) o[0] = numbers[0];")
        link = lambda x: double([x], [((4,), mx.int32)], constants={}, groups=(1, 1, 1), threads=32)[0]  # noqa: E731
        chains.chain_ms(link, mx.zeros(4, mx.int32), chains.make_plug(0, 0), args)
    for earlier, later in zip(writes[:5], reads[1:6], strict=True):
        assert set(earlier) & set(later)


def test_compiled_side_by_side(monkeypatch):
    """A process for each of the ten kernels; together they launch what the whole does."""
    commands = []
    with emulated(sanitize=False) as launches:
        with monkeypatch.context() as patch:
            patch.setattr(stages.subprocess, "run", lambda command, check: commands.append(command))
            stages.compile_side_by_side(stages.parse(["--shape", "1,2,32,16", "--chunk", "16"]))
        assert not launches
        assert sorted(int(command[-1].removeprefix("--compile=")) for command in commands) == list(range(10))
        for number, command in enumerate(commands, start=1):
            stages.main(command[2:])
            assert len(launches) == number
        names = sorted(launch.text.name for launch in launches)
        launches.clear()
        primals, cotangents = stages.draw_rule_inputs(Shape(1, 2, 32, 16), 16)
        for package in stages.WHOLE.values():
            mx.eval(mx.vjp(lambda *x, rule=package.rule: list(rule(*x, 16)), primals, cotangents))
        assert names == sorted(launch.text.name for launch in launches)


def test_below_the_resolution():
    """A stage that adds 0.1 ms to chains of two whose middle half is 0.4 ms wide, and one that adds 4 ms."""
    args = stages.parse(["--shape", "1,1,16,16", "--chain", "2"])
    sizes = plan("cuda", False, B=1, Hk=1, Hv=1, Dk=16, Dv=16, C=16, dtype=mx.bfloat16)
    empty = [4.8, 5.0, 5.2]
    assert chains.resolution_ms(empty, 2) == pytest.approx(0.2)
    row = stages.stage_row("intra", sizes, [5.1, 5.1, 5.1], empty, args)
    assert (row["ms"], row["tflops"], row["gbps"], row["of_peak_gbps"]) == (None, None, None, None)
    assert row["resolution_ms"] == pytest.approx(0.2)
    assert stages._shown(row) == "below the resolution of 0.2000 ms"
    row = stages.stage_row("intra", sizes, [9.0, 9.0, 9.0], empty, args)
    assert row["ms"] == pytest.approx(2)
    assert "2.0000 ms" in stages._shown(row)


def test_slow_parts_take_fewer_repeats():
    def repeats(*options):
        args = stages.parse(["--shape", "1,1,16,16", "--chain", "1", "--repeats", "9", *options])
        with emulated(sanitize=False):
            return len(chains.chain_ms(lambda x: x, mx.zeros(4, mx.int32), chains.make_plug(0, 0), args))

    assert repeats("--part-seconds", "0") == 3
    assert repeats("--part-seconds", "100") == 9


def test_json_after_every_shape(tmp_path, monkeypatch):
    """What was measured before a shape fails is kept."""
    whole = stages.measure_shape

    def fails(shape, *rest):
        if shape.Dk == 32:
            raise RuntimeError("time is up")
        return whole(shape, *rest)

    monkeypatch.setattr(stages, "measure_shape", fails)
    with pytest.raises(RuntimeError, match="time is up"):
        run(tmp_path, "--shape", "1,1,16,16", "--shape", "1,1,32,16")
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [shape["shape"] for shape in report["shapes"]] == ["1,1,16,16"]


def test_plug(monkeypatch):
    """Products of about the time asked for, none of them less than one or beyond what bfloat16 holds."""
    monkeypatch.setattr(chains, "_PLUG_SIZE", 64)
    monkeypatch.setattr(chains, "_TIMED_PRODUCTS", 2)
    for ms in (1e-6, 1.0):
        y = chains.make_plug(ms, warm_seconds=0.01)()
        assert y.shape == (64, 64)
        assert 0.3 < float(mx.abs(y.astype(mx.float32)).mean()) < 3


def test_needs_a_gpu():
    with pytest.raises(SystemExit, match="needs a GPU"):
        stages.main(["--shape", "1,1,16,16"])


WRONG = {
    "no shape": ([], "--shape"),
    "three numbers": (["--shape", "1,2,16"], "3 numbers"),
    "heads": (["--shape", "2,3,16,16"], "multiple of key heads"),
    "head size": (["--shape", "1,1,24,16"], "multiples of 16"),
    "large head": (["--shape", "1,1,16,512"], "up to 256"),
    "chunk": (["--shape", "1,1,16,16", "--chunk", "24"], "--chunk"),
    "chain": (["--shape", "1,1,16,16", "--chain", "0"], "--chain"),
}


@pytest.mark.parametrize("case", WRONG)
def test_arguments(case, capsys):
    arguments, words = WRONG[case]
    with pytest.raises(SystemExit):
        stages.parse(arguments)
    assert words in capsys.readouterr().err


def test_several_shapes():
    args = stages.parse(["--shape", "16,64,192,128", "--shape", "qwen3.5-9b"])
    assert [str(shape) for shape in args.shape] == ["16,64,192,128", "16,32,128,128"]
    assert (args.tokens, args.chunk, args.repeats) == (2048, 64, 20)
