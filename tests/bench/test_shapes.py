"""Options of bench-shapes to cases, and what is wrong with them."""

import pytest

from gdtrain.bench.shapes import MODELS, PRESETS, Case, Shape, make_cases, parse_shape, parse_sizes
from gdtrain.errors import UserError


def test_presets():
    assert PRESETS["seed-9b"].shape == (16, 64, 192, 128)
    assert PRESETS["seed-9b"].tokens == (256, 512, 1024, 2048)
    assert (PRESETS["batch-rows"].tokens, PRESETS["batch-rows"].batch) == ((64,), (1, 2, 4, 8))
    assert all(PRESETS[name].shape == shape for name, shape in MODELS.items())
    for preset in PRESETS.values():
        assert preset.shape.Hv % preset.shape.Hk == 0


def test_cases():
    cases = make_cases(["2,4,8,16", "batch-rows"], "3,5", "1,2", "float32")
    assert cases[:3] == [
        Case("2,4,8,16", Shape(2, 4, 8, 16), 1, 3, "float32"),
        Case("2,4,8,16", Shape(2, 4, 8, 16), 1, 5, "float32"),
        Case("2,4,8,16", Shape(2, 4, 8, 16), 2, 3, "float32"),
    ]
    assert len(cases) == 8
    assert [(case.B, case.T) for case in make_cases(["batch-rows"], None, None, "bfloat16")] == [
        (1, 64),
        (2, 64),
        (4, 64),
        (8, 64),
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("qwen3.5-9", ("--shape", "'qwen3.5-9b'")),
        ("zzz", ("--shape", "'zzz'", "seed-9b", "Hk,Hv,Dk,Dv")),
        ("16,32,128", ("--shape", "3 numbers")),
        ("3,4,64,64", ("--shape", "multiple", "Hv = 4", "Hk = 3")),
        ("0,4,64,64", ("--shape", "from 1 on")),
        ("a,b,c,d", ("--shape", "whole numbers")),
    ],
)
def test_bad_shape(text, named):
    with pytest.raises(UserError) as caught:
        parse_shape(text)
    assert [part for part in named if part not in str(caught.value)] == []


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1.5", "-3", "many"])
def test_bad_sizes(text):
    with pytest.raises(UserError, match=r"--tokens: .*whole numbers"):
        parse_sizes("--tokens", text)


def test_bad_dtype():
    with pytest.raises(UserError, match="--dtype: 'int8'; accepted: bfloat16, float16, float32"):
        make_cases(["seed-9b"], None, None, "int8")
