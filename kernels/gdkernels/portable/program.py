"""A kernel text with its constants, made for the machine at hand and launched through MLX."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import mlx.core as mx

from gdkernels.portable.machine import Machine, machine, shared_bytes

MAX_THREADS = 1024
MAX_GROUPS = 65535  # in y and in z, on CUDA
MAX_BUFFERS = 31
SIMD_WIDTH = 32

_TYPES = {mx.float32: "float", mx.bfloat16: "bfloat16_t", mx.float16: "half"}
# A kernel that shares memory begins with this line. On CUDA it is the dynamic memory, which alone may exceed 48 KB.
_ARENA = "threadgroup float arena[ARENA];"
_CUDA_ARENA = "extern __shared__ __align__(16) float arena[];"
_ADDRESS_SPACES = re.compile(r"\b(?:device|threadgroup|thread|constant)\b ?")


@dataclass(frozen=True)
class Program:
    """A kernel text and the names of its buffers.

    Attributes:
        name: of the kernel, for error messages and profilers.
        inputs, outputs: names of the buffers in the text. Every input must be an array of at least one dimension, and
            no name may be followed by `_shape`, `_strides` or `_ndim` in the text unless that attribute is meant.
        source: the body of the kernel.
        headers: texts before it, in order, as PACKAGE:FILE, or FILE for those of this package; `tiles.*.h` means the
            file of the machine, `tiles.metal.h` say.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    headers: tuple[str, ...] = field(default=())

    def __call__(
        self,
        inputs: Sequence[mx.array],
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
        *,
        constants: Mapping[str, int | bool | mx.Dtype],
        groups: tuple[int, int, int],
        threads: int,
        arena: int = 0,
    ) -> list[mx.array]:
        """Launch.

        Args:
            inputs: in the order of their names; made contiguous if they are not.
            outputs: shape and dtype of each; they start uninitialised.
            constants: integers, booleans and types that the text uses by name.
            groups: threadgroups in x, y and z. threads: of one threadgroup, all in x.
            arena: threadgroup memory in floats; the text declares it by `threadgroup float arena[ARENA];`.

        Raises:
            RuntimeError: the text does not compile here, or asks for more than the machine has.
        """
        where = machine()
        if where is None:
            raise RuntimeError(f"{self.name}: no GPU is the default device")
        self._check(where, groups, threads, arena)
        dtypes_in = tuple(x.dtype for x in inputs)
        kernel = _kernel(_factory(where), self, where, tuple(constants.items()), arena, dtypes_in)
        shapes, dtypes = zip(*outputs, strict=True)
        return kernel(
            inputs=list(inputs),
            output_shapes=list(shapes),
            output_dtypes=list(dtypes),
            grid=(groups[0] * threads, groups[1], groups[2]),
            threadgroup=(threads, 1, 1),
        )

    def _check(self, where: Machine, groups: tuple[int, int, int], threads: int, arena: int) -> None:
        limits = (
            ("threads in a threadgroup", threads, MAX_THREADS),
            ("bytes of threadgroup memory", 4 * arena, shared_bytes(where)),
            ("threadgroups in y or z", max(groups[1:]), MAX_GROUPS),
            ("buffers", len(self.inputs) + len(self.outputs), MAX_BUFFERS),
        )
        for what, asked, limit in limits:
            if asked > limit:
                raise RuntimeError(f"{self.name}: asks for {asked} {what}; {where} has {limit}")


def read_text(package: str, file: str) -> str:
    """A kernel text that lies beside the modules of `package`."""
    return files(package).joinpath(file).read_text(encoding="utf-8")


def header_text(program: Program, where: Machine, constants: Sequence[tuple[str, Any]], arena: int = 0) -> str:
    """All that stands before the body: constants, then the headers."""
    lines = [
        f"typedef {_TYPES[value]} {name};" if isinstance(value, mx.Dtype) else f"#define {name} {int(value)}"
        for name, value in (*constants, ("ARENA", max(arena, 1)))
    ]
    names = _header(f"names.{where}.h")
    text = "\n".join([names, *lines, *(_header(h.replace("*", where)) for h in program.headers)]) + "\n"
    return _ADDRESS_SPACES.sub("", text) if where == "cuda" else text


def body_text(program: Program, where: Machine) -> str:
    """The body of the kernel as the machine takes it."""
    if where == "metal":
        return program.source
    text = program.source.replace(_ARENA, _CUDA_ARENA)
    if "arena[ARENA]" in text:
        raise ValueError(f"{program.name}: threadgroup memory must be declared as {_ARENA!r}")
    return _ADDRESS_SPACES.sub("", text)


@cache
def _header(name: str) -> str:
    package, _, file = name.rpartition(":")
    return read_text(package or __package__, file)


def _factory(where: Machine) -> Callable[..., Any]:
    # Looked up at every launch, so that an emulator can stand in for it.
    return mx.fast.metal_kernel if where == "metal" else mx.fast.cuda_kernel


@cache
def _kernel(
    factory: Callable[..., Any],
    program: Program,
    where: Machine,
    constants: tuple[tuple[str, Any], ...],
    arena: int,
    dtypes: tuple[mx.Dtype, ...],
) -> Callable[..., list[mx.array]]:
    header, body = header_text(program, where, constants, arena), body_text(program, where)
    # MLX's CUDA backend knows a compiled kernel by its name alone, in memory and on disk: the name must tell the text,
    # and the types of the buffers, which MLX writes.
    digest = hashlib.sha256(f"{header}{body}{dtypes}".encode()).hexdigest()[:16]
    options = {"shared_memory": 4 * arena} if where == "cuda" else {}
    return factory(
        name=f"{program.name}_{digest}",
        input_names=list(program.inputs),
        output_names=list(program.outputs),
        source=body,
        header=header,
        **options,
    )
