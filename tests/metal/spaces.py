"""Do the pointers of a Metal text stay in their address spaces? Asked of clang, which has the same rules for OpenCL.

On the CPU all memory is one, so the emulator cannot tell. MLX hands an input of fewer than 8 elements over as
`constant` and a larger one as `device`: a text that spells one of them compiles or not by the shape of its inputs.
"""

import re
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from metal import toolchain
from metal.signature import (
    ATTRIBUTES,
    Like,
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
_OLDEST_CLANG = 15
_OPTIONS = [
    *("-x", "clcpp", "-cl-std=CLC++2021", "-target", "spir64", "-fsyntax-only", "-w", "-ferror-limit=20"),
    # Printed back with the space of every pointer. OpenCL's generic space stays on: without it clang refuses to return
    # a struct. So a pointer that fell into it is looked for in what is printed.
    *("-Xclang", "-ast-print"),
    # Only the language: no functions of OpenCL beside Metal's.
    *("-Xclang", "-cl-ext=-__opencl_c_pipes,-__opencl_c_device_enqueue,+cl_khr_fp16"),
    *("-cl-no-stdinc", "-nostdinc", "-include", str(HERE / "spaces.h")),
]
_TEMPORARY = "cannot bind reference in default address space to object in address space '__private'"
_THREAD_REFERENCE = re.compile(r"\b(?:const\s+thread|thread\s+const)\s+(\w+(?:\s*<[^<>]*>)?)\s*&")


def check(
    text: Text, inputs: Sequence[Like], output_dtypes: Sequence[mx.Dtype], template: Sequence[tuple[str, Any]] = ()
) -> str:
    """What is wrong with the kernel's spaces and syntax, line numbers as in its header and body; empty if nothing.

    Raises:
        MissingCompiler: there is no clang.
    """
    if unspaced := _unspaced_template(text.header):
        return unspaced
    code = _code(text, inputs, output_dtypes, template)
    found = _compile(code)
    # In Metal a temporary is of the thread's space. Clang has none for it, and binds it to no reference that names one:
    # such a text is read once more with values in place of those references.
    return _compile(_THREAD_REFERENCE.sub(r"const \1 ", code)) if _TEMPORARY in found else found


@cache
def _compile(code: str) -> str:
    done = subprocess.run([_clang(), *_OPTIONS, "-"], input=code, capture_output=True, text=True)
    return done.stderr.strip()[:4000] if done.returncode else "\n".join(_unspaced(done.stdout))


def _clang() -> str:
    advice = f"the tests of Metal kernels need clang {_OLDEST_CLANG} or later (Debian: apt-get install clang-19)"
    newest_first = (f"clang-{n}" for n in range(25, _OLDEST_CLANG - 1, -1))
    clang = toolchain.find("CLANG", (*newest_first, "clang"), advice)
    if toolchain.major_version(clang) < _OLDEST_CLANG:
        raise toolchain.MissingCompiler(f"{clang} is too old: {advice}")
    return clang


def _code(
    text: Text, inputs: Sequence[Like], output_dtypes: Sequence[mx.Dtype], template: Sequence[tuple[str, Any]]
) -> str:
    heads = [p.declare() for p in parameters(text, inputs, output_dtypes)]
    heads += [f"{ATTRIBUTES[name][0]} {name}" for name in attributes(text)]
    body = bind_threadgroup_variables(without_attributes(without_comments(text.source)))
    # Instantiated, as MLX does: what depends on a template parameter is checked only then.
    types = ", ".join(head.rsplit(" ", 1)[0] for head in heads)
    instance = f"template void kernel_body{template_arguments(template)}({types});" if template else ""
    return f"""#line 1 "header"
{without_attributes(without_comments(text.header))}
{template_head(template)}
void kernel_body({", ".join(heads)}) {{
#line 1 "body"
{body}
}}
{instance}
"""


def _unspaced(printed: str) -> Iterator[str]:
    """Declarations and casts, as clang prints them, of pointers that fell into the generic space; Metal has none."""
    for line in printed.splitlines():
        if "__generic" in line:
            yield f"no address space is named: {line.strip().replace('__generic ', '')}"


def _unspaced_template(header: str) -> str:
    """The same of `T*` where T is a template's type: clang lets T bring the space with it."""
    code = without_comments(header)
    types = "|".join(re.findall(r"\b(?:typename|class)\s+(\w+)\s*(?=[,>])", code))
    found = re.search(rf"[(,;{{<]\s*(?:const\s+)?(?:{types})\s*(?:const\s*)?[*&]", code) if types else None
    return (
        f"no address space is named: header:{code.count(chr(10), 0, found.end()) + 1}: {found[0][1:]}" if found else ""
    )
