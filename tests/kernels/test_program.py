"""Kernel texts on their way to a machine: what is written for CUDA, which no test here can run, and what is refused."""

import re
from types import SimpleNamespace

import mlx.core as mx
import pytest
from gdkernels.fused.stages import PROGRAMS
from gdkernels.portable import machine, program
from gdkernels.portable.program import Program, body_text, header_text
from gdkernels.recurrent import reverse, scan

TEXTS = [*PROGRAMS, scan.PROGRAM, reverse.PROGRAM]


def launch(monkeypatch, where, dtype=mx.float32, groups=(1, 1, 1), threads=32, arena=0, body="y[0] = x[0];"):
    """The name and options that MLX is asked for; a fake takes its place."""
    asked = SimpleNamespace()

    def factory(**options):
        asked.__dict__.update(options)
        return lambda *, output_shapes, output_dtypes, **rest: [
            mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)
        ]

    monkeypatch.setattr(program, "_factory", lambda where: factory)
    with machine.force(where):
        kernel = Program("twice", ("x",), ("y",), body)
        kernel([mx.zeros(9, dtype)], [((9,), dtype)], constants={"N": 3}, groups=groups, threads=threads, arena=arena)
    return asked


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.name)
def test_cuda_has_no_address_spaces(text):
    """CUDA's own words have underscores around them; `__shared__` is there once where memory is shared."""
    body, header = body_text(text, "cuda"), header_text(text, "cuda", (), 8)
    for words in (body, header):
        code = re.sub(r"//.*", "", words)
        assert not re.search(r"\b(device|threadgroup|thread|constant)\b", code)
    assert body.count("extern __shared__") == ("threadgroup float arena" in text.source)
    assert "arena[ARENA]" not in body


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.name)
def test_metal_gets_the_body_as_it_is(text):
    assert body_text(text, "metal") == text.source


def test_threadgroup_memory_declared_otherwise():
    """On CUDA it would become an array of every thread."""
    with pytest.raises(ValueError, match="threadgroup float arena"):
        body_text(Program("odd", (), (), "threadgroup  float arena[ARENA];"), "cuda")


def test_names_tell_kernels_apart(monkeypatch):
    """MLX on CUDA takes what it has compiled under a name, whatever the text."""
    names = [
        launch(monkeypatch, "cuda").name,
        launch(monkeypatch, "cuda", dtype=mx.bfloat16).name,
        launch(monkeypatch, "cuda", body="y[0] = 2 * x[0];").name,
        launch(monkeypatch, "cuda", arena=8).name,
    ]
    assert len(set(names)) == 4
    assert all(name.startswith("twice_") for name in names)


def test_shared_memory_is_asked_for_in_bytes(monkeypatch):
    assert launch(monkeypatch, "cuda", arena=100).shared_memory == 400
    assert not hasattr(launch(monkeypatch, "metal", arena=100), "shared_memory")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"threads": 1056}, "1056 threads"),
        ({"arena": 8193}, "32772 bytes of threadgroup memory; metal has 32768"),
        ({"groups": (1, 65536, 1)}, "65536 threadgroups in y or z"),
        ({"groups": (1, 1, 65536)}, "65536 threadgroups in y or z"),
    ],
    ids=str,
)
def test_more_than_the_machine_has(monkeypatch, asked, message):
    with pytest.raises(RuntimeError, match=message):
        launch(monkeypatch, "metal", **asked)


@pytest.mark.parametrize(
    ("architecture", "kilobytes"), [("sm_90", 227), ("sm_80", 163), ("sm_121", 99), ("sm_75", 48), ("", 48)]
)
def test_shared_memory_of_a_chip(monkeypatch, architecture, kilobytes):
    monkeypatch.setattr(machine, "architecture", lambda: architecture)
    assert machine.shared_bytes("cuda") == 1024 * kilobytes
    assert machine.shared_bytes("metal") == 32768


@pytest.mark.usefixtures("on_a_cpu")
def test_no_gpu():
    with pytest.raises(RuntimeError, match="no GPU"):
        PROGRAMS[0]([], [((1,), mx.float32)], constants={}, groups=(1, 1, 1), threads=32)
