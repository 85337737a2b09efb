"""Small kernels for the tests of the harness: one float32 output `o`."""

import mlx.core as mx
from metal.signature import Text

# Of every small kernel that needs no more: the thread's own index.
INDEX = "uint i = thread_position_in_grid.x; "
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup); "


def run(source, inputs, shape=(64,), *, threads=64, groups=1, header="", template=None, dtype=mx.float32, **options):
    """The output of a kernel over `groups` threadgroups of `threads` threads; inputs by name."""
    kernel = mx.fast.metal_kernel(
        name="small", input_names=list(inputs), output_names=["o"], source=source, header=header
    )
    return kernel(
        inputs=list(inputs.values()),
        output_shapes=[shape],
        output_dtypes=[dtype],
        grid=(threads * groups, 1, 1),
        threadgroup=(threads, 1, 1),
        template=template,
        **options,
    )[0]


def text(source, header="", inputs=("x",)):
    """The kernel's text alone."""
    return Text("small", tuple(inputs), ("o",), source, header)
