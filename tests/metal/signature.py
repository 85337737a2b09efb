"""A kernel as MLX's Metal backend would write it: what its parameters are, in which address space, by which name.

Source: mlx/backend/common/metal_kernel.cpp.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

TYPES = {
    mx.float32: "float",
    mx.float16: "half",
    mx.bfloat16: "bfloat16_t",
    mx.bool_: "bool",
    **{getattr(mx, f"{sign}int{bits}"): f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
MAX_BUFFERS = 31
MAX_THREADS = 1024
# MLX hands a buffer of fewer elements over as `constant`.
CONSTANT_BELOW = 8

# Parameters that MLX adds when their name occurs anywhere in the body: type, and what the emulator gives.
ATTRIBUTES = {
    "thread_position_in_grid": ("uint3", "position_in_grid"),
    "thread_position_in_threadgroup": ("uint3", "position_in_group"),
    "threadgroup_position_in_grid": ("uint3", "group"),
    "threads_per_threadgroup": ("uint3", "group_size"),
    "dispatch_threads_per_threadgroup": ("uint3", "full_group_size"),
    "threadgroups_per_grid": ("uint3", "groups"),
    "threads_per_grid": ("uint3", "grid"),
    "grid_size": ("uint3", "grid"),
    "thread_index_in_threadgroup": ("uint", "index"),
    "thread_index_in_simdgroup": ("uint", "lane"),
    "simdgroup_index_in_threadgroup": ("uint", "simd"),
    "simdgroups_per_threadgroup": ("uint", "simds"),
    "threads_per_simdgroup": ("uint", "width"),
    "thread_execution_width": ("uint", "width"),
}


@dataclass(frozen=True)
class Text:
    """What was given to `mx.fast.metal_kernel`."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str = ""
    ensure_row_contiguous: bool = True
    atomic_outputs: bool = False


@dataclass(frozen=True)
class Like:
    """All that the text of a kernel depends on in an array."""

    dtype: mx.Dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: mx.array) -> "Like":
        return cls(array.dtype, tuple(array.shape))

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class Parameter:
    """One buffer of the kernel.

    Attributes:
        type: of an element, `int64_t` say. space: `device` or `constant`. mark: `*`, or `&` for a single value.
        writable: false gives `const`.
        about: the index of the input whose attribute this is (`x_shape`), and which attribute; None for an array.
    """

    name: str
    type: str
    space: str
    mark: str
    writable: bool = False
    about: tuple[int, str] | None = None

    def declare(self) -> str:
        """As it stands in the kernel's head."""
        return f"{'' if self.writable else 'const '}{self.space} {self.type}{self.mark} {self.name}"


def parameters(text: Text, inputs: Sequence[Like], output_dtypes: Sequence[mx.Dtype]) -> list[Parameter]:
    """The buffers of the kernel in MLX's order."""
    found = []
    for index, (name, array) in enumerate(zip(text.input_names, inputs, strict=True)):
        space = "constant" if array.size < CONSTANT_BELOW else "device"
        found.append(Parameter(name, TYPES[array.dtype], space, "*" if array.shape else "&"))
        for suffix, kind, mark in (("shape", "int", "*"), ("strides", "int64_t", "*"), ("ndim", "int", "&")):
            if array.shape and f"{name}_{suffix}" in text.source:
                found.append(Parameter(f"{name}_{suffix}", kind, "constant", mark, about=(index, suffix)))
    for name, dtype in zip(text.output_names, output_dtypes, strict=True):
        kind = f"atomic<{TYPES[dtype]}>" if text.atomic_outputs else TYPES[dtype]
        found.append(Parameter(name, kind, "device", "*", writable=True))
    return found


def attributes(text: Text) -> list[str]:
    """The names of ATTRIBUTES that become parameters."""
    return [name for name in ATTRIBUTES if name in text.source]


def template_head(template: Sequence[tuple[str, Any]]) -> str:
    """`template <typename T, int N>`, or nothing."""
    kinds = {name: "typename" if isinstance(v, mx.Dtype) else type(v).__name__ for name, v in template}
    return f"template <{', '.join(f'{kind} {name}' for name, kind in kinds.items())}>" if template else ""


def template_arguments(template: Sequence[tuple[str, Any]]) -> str:
    """`<float, 128>`, or nothing."""
    values = [TYPES[v] if isinstance(v, mx.Dtype) else str(int(v)) for _, v in template]
    return f"<{', '.join(values)}>" if values else ""


_DECLARATOR = r"\w+\s*(?:\[[^\];]*\]\s*)*"
_VARIABLES = re.compile(
    r"\bthreadgroup\s+(?P<type>(?:unsigned\s+)?\w[\w:]*(?:\s*<[^;()]*>)?)\s+"
    rf"(?P<names>{_DECLARATOR}(?:,\s*{_DECLARATOR})*);"
)
_VARIABLE = re.compile(r"(?P<name>\w+)\s*(?P<extent>(?:\[[^\];]*\]\s*)*)")
_UNREAD_VARIABLE = re.compile(r"\bthreadgroup\b(?!_)[^;*&(){}]*;")


def bind_threadgroup_variables(body: str) -> str:
    """`threadgroup float a[8], b;` as references to memory that all threads share.

    Neither C++ nor OpenCL has variables of a function that belong to a group of its callers.

    Raises:
        ValueError: a declaration of another form.
    """

    def bind(found: re.Match[str]) -> str:
        return " ".join(
            f'auto& {v["name"]} = threadgroup_variable<{found["type"]}{v["extent"].strip()}>("{v["name"]}");'
            for v in _VARIABLE.finditer(found["names"])
        )

    bound = _VARIABLES.sub(bind, body)
    if unread := _UNREAD_VARIABLE.search(bound):
        raise ValueError(f"write this threadgroup variable more simply: {unread[0]}")
    return bound


def without_comments(text: str) -> str:
    """The text with its lines where they were."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


def without_attributes(text: str) -> str:
    """The text without `[[...]]` and without Metal's own headers."""
    text = re.sub(r"\[\[[^\[\]]*(?:\[[^\]]*\][^\[\]]*)*\]\]", "", text)
    return re.sub(r"#include\s*<metal\w*>|\busing\s+namespace\s+metal\s*;", "", text)
