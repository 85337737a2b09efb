"""Backends that count as GPU kernels and are made of MLX operations, right or with one fault."""

import mlx.core as mx
from gdkernels.backends import Backend
from gdkernels.chunked import chunked

GRADIENTS = ("dq", "dk", "dv", "dlog_decay", "dbeta", "dstate")


def stub(name="fused", rule=chunked, refusal=lambda sizes: None, text="a kernel"):
    return Backend(name, rule, refusal, lambda: text)


def spoilt(change):
    """`chunked` with change(outputs or gradients) -> the same; one of {tensor: x}."""

    @mx.custom_function
    def identity(*arrays):
        return arrays

    @identity.vjp
    def gradient(primals, cotangents, outputs):
        return tuple(change(dict(zip(GRADIENTS, cotangents, strict=True))).values())

    def rule(q, k, v, log_decay, beta, state, chunk_size):
        outputs = chunked(*identity(q, k, v, log_decay, beta, state), chunk_size)
        changed = change(dict(zip(("y", "state_out"), outputs, strict=True)))
        return tuple(x + mx.stop_gradient(c - x) for x, c in zip(outputs, changed.values(), strict=True))

    return rule


def scaled(tensor, factor):
    """The rule with one tensor multiplied."""
    return spoilt(lambda found: {name: x * factor if name == tensor else x for name, x in found.items()})


def raising(*arrays):
    raise RuntimeError("Unable to build metal library from source\nerror: use of undeclared identifier 'simd_sum'")


def counted(rule=chunked):
    """(rule, the list of the lengths it ran on)"""
    lengths = []

    def count(*arrays):
        lengths.append(arrays[0].shape[1])
        return rule(*arrays)

    return count, lengths
