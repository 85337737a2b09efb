"""Metal kernels on the CPU: a stand-in for `mx.fast.metal_kernel`.

    with emulated(seed=2) as launches:
        y = some_kernel(...)            # launched through mx.fast.metal_kernel

The text is compiled as C++ (metal_on_cpu.h) and run as a process of its own, every thread with its own stack, threads
and threadgroups in a random order. A fault of the text raises MetalFault; see test_faults.py for what is one.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from gdkernels import testing
from metal import toolchain
from metal.signature import (
    ATTRIBUTES,
    MAX_BUFFERS,
    MAX_THREADS,
    Like,
    Parameter,
    Text,
    attributes,
    bind_threadgroup_variables,
    parameters,
    template_arguments,
    template_head,
    without_attributes,
    without_comments,
)

HERE = Path(__file__).parent

# True: watch.cpp sees every access (bounds of each buffer, writes to inputs, data races) and the compiler's undefined
# behaviour sanitizer the arithmetic. "address": its address sanitizer instead of the watch, which also guards arrays of
# one thread; the two cannot be combined. False: only what runs into an unmapped page, and lanes that do not meet.
Sanitize = Literal[True, False, "address"]

_UNDEFINED = "bounds,shift,signed-integer-overflow,integer-divide-by-zero,alignment,bool,return"
_FLAGS: dict[Sanitize, tuple[list[str], list[str]]] = {
    # GCC's thread sanitizer only as the source of calls: the functions called are watch.cpp's.
    True: (
        ["-fsanitize=thread", f"-fsanitize={_UNDEFINED}", "-fno-sanitize-recover=all"],
        ["-fsanitize=undefined"],
    ),
    "address": (
        ["-fsanitize=address", f"-fsanitize={_UNDEFINED}", "-fno-sanitize-recover=undefined"],
        ["-fsanitize=address,undefined"],
    ),
    False: ([], []),
}
_ASAN_OPTIONS = "detect_leaks=0:detect_stack_use_after_return=0:handle_segv=0:handle_sigbus=0:handle_sigfpe=0"

_TIMEOUT = 300  # seconds; a loop without end must not stop the tests


class MetalFault(RuntimeError):
    """The kernel text does what Metal forbids or leaves undefined."""


@dataclass(frozen=True)
class Launch:
    """One launch that ran: enough to compile its text elsewhere."""

    text: Text
    inputs: tuple[Like, ...]
    output_dtypes: tuple[mx.Dtype, ...]
    template: tuple[tuple[str, Any], ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    seconds: float


@dataclass
class Emulator:
    """Stands for `mx.fast.metal_kernel`: called with its arguments, makes a kernel.

    Attributes:
        seed: of the order of threads, SIMD groups and threadgroups. sanitize: see `Sanitize`.
        launches: what ran so far, in order.
    """

    seed: int = 1
    sanitize: Sanitize = True
    launches: list[Launch] = field(default_factory=list)

    __hash__ = object.__hash__

    def __call__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: object = None,
    ) -> "Kernel":
        names = tuple(input_names), tuple(output_names)
        return Kernel(self, Text(name, *names, source, header, ensure_row_contiguous, atomic_outputs))


@dataclass(frozen=True)
class Kernel:
    """A kernel; called as one of MLX is. Inputs are evaluated, so it cannot be called inside mx.compile."""

    emulator: Emulator
    text: Text

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array | float],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        text, template = self.text, tuple(template or ())
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        likes = tuple(Like.of(x) for x in arrays)
        buffers = parameters(text, likes, output_dtypes)
        # As MLX: a threadgroup is no larger than the grid.
        group = tuple(min(g, t) for g, t in zip(grid, threadgroup, strict=True))
        if len(buffers) > MAX_BUFFERS:
            raise MetalFault(f"{text.name}: {len(buffers)} buffers; a kernel has {MAX_BUFFERS}")
        if np.prod(threadgroup) > MAX_THREADS:
            raise MetalFault(f"{text.name}: {np.prod(threadgroup)} threads; a threadgroup has {MAX_THREADS}")
        if min(group) < 1:
            raise MetalFault(f"{text.name}: a grid of {grid} in threadgroups of {threadgroup}")
        program = _program(_code(text, buffers, template), text.name, self.emulator.sanitize)
        contents = [_contents(p, arrays, text) for p in buffers if not p.writable]
        words = [f"{p.name}:{len(c)}:1:in" for p, c in zip(buffers, contents, strict=False)]
        results = [np.empty(shape, _numpy(d)) for shape, d in zip(output_shapes, output_dtypes, strict=True)]
        for name, dtype, result in zip(text.output_names, output_dtypes, results, strict=True):
            words.append(f"{name}:{result.nbytes}:{result.itemsize}:{'out' if init_value is None else 'set'}")
            if init_value is not None:
                contents.append(_bytes(mx.full(result.shape, init_value, dtype)))
        numbers = [str(n) for n in (*grid, *group, self.emulator.seed)]
        start = time.perf_counter()
        output = _run([str(program), *numbers, *words], b"".join(contents), text.name)
        record = (text, likes, tuple(output_dtypes), template, tuple(grid), tuple(threadgroup))
        self.emulator.launches.append(Launch(*record, seconds=time.perf_counter() - start))
        return _arrays(output, results, output_dtypes)


@contextmanager
def emulated(seed: int = 1, sanitize: Sanitize = True) -> Iterator[list[Launch]]:
    """Within it `mx.fast.metal_kernel` is the emulator and gdkernels takes the branch of Metal.

    Yields:
        the launches so far; the list grows.
    """
    emulator, original = Emulator(seed, sanitize), mx.fast.metal_kernel
    mx.fast.metal_kernel = emulator
    try:
        with testing.metal():
            yield emulator.launches
    finally:
        mx.fast.metal_kernel = original


def _code(text: Text, buffers: Sequence[Parameter], template: Sequence[tuple[str, Any]]) -> str:
    """The C++ of a kernel. Line numbers in messages are those of the header and the body as they were given."""
    names = attributes(text)
    heads = [p.declare() for p in buffers] + [f"{ATTRIBUTES[n][0]} {n}" for n in names]
    given = []
    for index, p in enumerate(buffers):
        pointer = f"static_cast<{'' if p.writable else 'const '}{p.type}*>(buffers[{index}])"
        given.append(f"*{pointer}" if p.mark == "&" else pointer)
    for kind, value in (ATTRIBUTES[n] for n in names):
        triple = f"uint3(ids.{value}[0], ids.{value}[1], ids.{value}[2])"
        given.append("32" if value == "width" else triple if kind == "uint3" else f"ids.{value}")
    body = bind_threadgroup_variables(without_attributes(without_comments(text.source)))
    return f"""#include "metal_on_cpu.h"
#line 1 "header"
{without_attributes(without_comments(text.header))}
{template_head(template)}
static void kernel_body({", ".join(heads)}) {{
#line 1 "body"
{body}
}}
#line 1 "launch"
void run_thread(void* const* buffers, const machine::Ids& ids) {{
  (void)buffers, (void)ids;
  kernel_body{template_arguments(template)}({", ".join(given)});
}}
"""


def _compiler() -> str:
    advice = "the tests of Metal kernels compile them (Debian: apt-get install g++; macOS: xcode-select --install)"
    return toolchain.find("CXX", ("g++", "clang++"), advice)


@cache
def _dependencies() -> str:
    texts = "".join(p.read_text(encoding="utf-8") for pattern in ("*.h", "*.cpp") for p in sorted(HERE.glob(pattern)))
    return texts + toolchain.version(_compiler())


@cache
def _program(code: str, name: str, sanitize: Sanitize) -> Path:
    compiler, (compile_flags, link_flags) = _compiler(), _FLAGS[sanitize]
    common = [compiler, "-std=c++20", "-w", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off", "-I", str(HERE)]
    if "clang" in toolchain.version(compiler):
        common += ["-Xclang", "-ffloat16-excess-precision=none"]  # every operation on halves is rounded, as by Metal
    key = _dependencies()
    machine = [
        toolchain.cached(key, ".o", [*common, "-O2", "-c", str(HERE / f"{part}.cpp"), "-o", "{}"])
        for part in ("machine", "launch", "watch", "multiply")
    ]
    compile_kernel = [*common, "-O1", "-g1", *compile_flags, "-x", "c++", "-c", "-", "-o", "{}"]
    try:
        kernel = toolchain.cached(key, ".o", compile_kernel, code)
    except RuntimeError as error:
        raise MetalFault(f"{name} does not compile:\n{str(error)[:4000]}") from None
    objects = [str(o) for o in (kernel, *machine)]
    return toolchain.cached(key, ".run", [compiler, *objects, *link_flags, "-o", "{}"])


def _run(command: list[str], contents: bytes, name: str) -> bytes:
    environment = os.environ | {"ASAN_OPTIONS": _ASAN_OPTIONS}
    try:
        done = subprocess.run(command, input=contents, capture_output=True, env=environment, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise MetalFault(f"{name}: did not end within {_TIMEOUT} s") from None
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip() or f"ended by {done.returncode}"
        words = re.sub(r" \[code (\w+)\]", lambda found: _line(command[0], found[1]), words)
        raise MetalFault(f"{name}: {words.removeprefix('metal: ')[:4000]}")
    return done.stdout


def _line(program: str, code: str) -> str:
    """` at body:12`: the line of the text that the code belongs to, where addr2line is installed; else nothing."""
    if not shutil.which("addr2line"):
        return ""
    done = subprocess.run(["addr2line", "-i", "-e", program, code], capture_output=True, text=True)
    lines = re.findall(r"\b(?:header|body):\d+", done.stdout)
    return f" at {', called at '.join(lines)}" if lines else ""


def _numpy(dtype: mx.Dtype) -> np.dtype:
    return np.dtype(np.uint16) if dtype == mx.bfloat16 else np.array(mx.zeros((), dtype)).dtype


def _bytes(array: mx.array) -> bytes:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array).tobytes()


def _contents(parameter: Parameter, arrays: Sequence[mx.array], text: Text) -> bytes:
    """What the buffer holds: an input as it lies in memory, or the attribute of one."""
    if parameter.about is None:
        array = arrays[text.input_names.index(parameter.name)]
        return _bytes(mx.contiguous(array)) if text.ensure_row_contiguous else _memory(array)[0]
    index, attribute = parameter.about
    array = arrays[index]
    if attribute == "ndim":
        return np.int32(array.ndim).tobytes()
    if attribute == "shape":
        return np.array(array.shape, np.int32).tobytes()
    return np.array(_memory(mx.contiguous(array) if text.ensure_row_contiguous else array)[1], np.int64).tobytes()


def _memory(array: mx.array) -> tuple[bytes, list[int]]:
    """The elements from the array's first to its last, whatever lies between, and its strides in elements."""
    view = np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)
    strides = [s // view.itemsize for s in view.strides]
    extent = 1 + sum((n - 1) * s for n, s in zip(view.shape, strides, strict=True)) if view.size else 0
    return np.lib.stride_tricks.as_strided(view, (extent,), (view.itemsize,)).tobytes(), strides


def _arrays(output: bytes, results: Sequence[np.ndarray], dtypes: Sequence[mx.Dtype]) -> list[mx.array]:
    arrays, at = [], 0
    for like, dtype in zip(results, dtypes, strict=True):
        values = np.frombuffer(output, like.dtype, like.size, at).reshape(like.shape)
        arrays.append(mx.array(values).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(values))
        at += like.nbytes
    return arrays
