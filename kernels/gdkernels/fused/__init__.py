"""The chunked form as portable kernels: exact gradients, any head size up to 256, no atomics, the same bits every time.

The mathematics is that of `chunked.py`. Kept for the backward: the inputs, and the state at the start of every chunk.

    plan.py     what the kernels are told, and the limits they keep
    stages.py   one function a kernel; the texts, *.metal and *.h, lie beside it
    rule.py     the stages in order, span by span
"""

from gdkernels.fused.rule import products, refusal, rule, text

__all__ = ["products", "refusal", "rule", "text"]
