"""What is measured: sizes by name or by hand. Without MLX, so that a bad option is refused at once."""

import difflib
from dataclasses import dataclass
from typing import NamedTuple

from gdtrain.errors import UserError

DTYPES = ("bfloat16", "float16", "float32")


class Shape(NamedTuple):
    """Key heads, value heads, and their head dimensions."""

    Hk: int
    Hv: int
    Dk: int
    Dv: int

    def __str__(self) -> str:
        return ",".join(map(str, self))


@dataclass(frozen=True)
class Preset:
    """A shape with the row lengths T and batch sizes B that are measured unless the user says otherwise."""

    shape: Shape
    tokens: tuple[int, ...] = (512, 2048)
    batch: tuple[int, ...] = (1,)


class Case(NamedTuple):
    """One measurement's inputs; dtype is that of q, k, v and of the layer's gate projections a and b."""

    name: str
    shape: Shape
    B: int
    T: int
    dtype: str


# Released models by name. The two of 64 value heads were not checked against a config.json.
MODELS = {
    "qwen3.5-0.8b": Shape(16, 16, 128, 128),
    "qwen3.5-2b": Shape(16, 16, 128, 128),
    "qwen3.5-4b": Shape(16, 32, 128, 128),
    "qwen3.5-9b": Shape(16, 32, 128, 128),
    "qwen3.5-27b": Shape(16, 48, 128, 128),
    "qwen3.5-35b-a3b": Shape(16, 32, 128, 128),
    "qwen3.5-122b-a10b": Shape(16, 64, 128, 128),
    "qwen3.5-397b-a17b": Shape(16, 64, 128, 128),
    "qwen3-next-80b-a3b": Shape(16, 32, 128, 128),
}
# What is compared with: the training path of mlx-lm, a loop over tokens left to automatic differentiation.
LOOP = "mlx-lm loop"
SEED_9B, BATCH_ROWS = "seed-9b", "batch-rows"
PRESETS = {
    # The table of the pull request that proposed a Metal VJP to mlx-lm, and of the one that mended batch rows.
    SEED_9B: Preset(Shape(16, 64, 192, 128), (256, 512, 1024, 2048)),
    BATCH_ROWS: Preset(Shape(2, 2, 64, 64), (64,), (1, 2, 4, 8)),
    **{name: Preset(shape) for name, shape in MODELS.items()},
}


def parse_shape(text: str) -> tuple[str, Preset]:
    """The name and preset of one --shape: a name in PRESETS, or Hk,Hv,Dk,Dv.

    Raises:
        UserError: neither, or value heads that are no multiple of the key heads.
    """
    if "," not in text:
        if text in PRESETS:
            return text, PRESETS[text]
        near = difflib.get_close_matches(text, PRESETS, n=1, cutoff=0.3)
        meant = f"; did you mean {near[0]!r}?" if near else ";"
        raise UserError(f"--shape: unknown shape {text!r}{meant} accepted: {', '.join(PRESETS)}, or Hk,Hv,Dk,Dv")
    sizes = parse_sizes("--shape", text)
    if len(sizes) != 4:
        raise UserError(f"--shape: {text!r} has {len(sizes)} numbers; accepted: Hk,Hv,Dk,Dv, such as 16,32,128,128")
    shape = Shape(*sizes)
    if shape.Hv % shape.Hk:
        raise UserError(
            f"--shape: {text!r}: value heads must be a multiple of key heads: Hv = {shape.Hv}, Hk = {shape.Hk}"
        )
    return str(shape), Preset(shape)


def parse_sizes(option: str, text: str) -> tuple[int, ...]:
    """Comma-separated whole numbers from 1 on; raises UserError that names the option."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise UserError(f"{option}: {text!r}; accepted: whole numbers from 1 on with commas between them")
    return sizes


def parse_dtype(text: str) -> str:
    """A name in DTYPES; raises UserError."""
    if text not in DTYPES:
        raise UserError(f"--dtype: {text!r}; accepted: {', '.join(DTYPES)}")
    return text


def make_cases(shapes: list[str], tokens: str | None, batch: str | None, dtype: str) -> list[Case]:
    """Every shape with every T and B, T varying fastest; raises UserError."""
    Ts = parse_sizes("--tokens", tokens) if tokens is not None else None
    Bs = parse_sizes("--batch", batch) if batch is not None else None
    parse_dtype(dtype)
    named = dict(parse_shape(text) for text in shapes)
    return [
        Case(name, preset.shape, B, T, dtype)
        for name, preset in named.items()
        for B in Bs or preset.batch
        for T in Ts or preset.tokens
    ]
