"""For tests: take the Metal branch on a machine without Metal.

`mx.fast.metal_kernel` is looked up at every launch, so that an emulator can stand in for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from gdkernels.portable.machine import force
from gdkernels.verdicts import left_out


@contextmanager
def metal(*, selftest: bool = False) -> Iterator[None]:
    """Within it the portable kernels are launched through `mx.fast.metal_kernel` on any device.

    Args:
        selftest: whether a kernel has to pass its self-test before it is used, as it has to outside. A test that wants
            the Metal branch is usually the better one.
    """
    with force("metal"), left_out(not selftest):
        yield
