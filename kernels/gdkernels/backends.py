"""The table of backends: ways to compute the rule, all with all six gradients."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from gdkernels import fused, native, recurrent
from gdkernels.chunked import chunked
from gdkernels.portable.machine import rounds_to_tf32
from gdkernels.reference import reference
from gdkernels.replay import replay
from gdkernels.sizes import Sizes

# (q, k, v, log_decay, beta, state, chunk_size) -> y, final state; shapes as in the package docstring, none of them None
Rule = Callable[[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array, int], tuple[mx.array, mx.array]]


@dataclass(frozen=True)
class Backend:
    """One way to compute the rule.

    Attributes:
        name: as users write it.
        rule: the computation, on checked inputs.
        refusal: why it cannot run with these sizes on the default device, or None. Cheap: it is asked at every call.
        text: all texts of its own GPU kernels, which identify them; empty if it has none. A backend with kernels has to
            pass the self-test on the device before it is used.
        products: how floats are multiplied in matrix products here, where that is less than exact; empty if it is not.
    """

    name: str
    rule: Rule
    refusal: Callable[[Sizes], str | None]
    text: Callable[[], str]
    products: Callable[[], str] = lambda: ""

    @cached_property
    def digest(self) -> str:
        """Hash of the kernel texts; empty if there are none."""
        text = self.text()
        return hashlib.sha256(text.encode()).hexdigest() if text else ""

    @property
    def has_kernels(self) -> bool:
        return bool(self.digest)


def _operations(name: str, rule: Rule) -> Backend:
    """A backend made of MLX operations: it runs anywhere, with any sizes."""
    return Backend(name, rule, lambda sizes: None, lambda: "", _products)


def _products() -> str:
    return "float32 products in TF32 (MLX_ENABLE_TF32=0 makes them exact)" if rounds_to_tf32() else ""


# In the order in which they are shown; that of `auto` is in dispatch.py.
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("fused", fused.rule, fused.refusal, fused.text, fused.products),
        Backend("recurrent", recurrent.rule, recurrent.refusal, recurrent.text),
        _operations("chunked", chunked),
        _operations("replay", replay),
        _operations("reference", reference),
        Backend("native", native.rule, native.refusal, native.text),
    )
}


def available(sizes: Sizes) -> list[str]:
    """Names of the backends that do not refuse these sizes here."""
    return [name for name, backend in BACKENDS.items() if backend.refusal(sizes) is None]
