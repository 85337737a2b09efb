"""How far MLX runs ahead of a device, and what a forecast is multiplied by there: the measured coefficients.

MLX 0.32.4 hands out operations until more than ten tasks are in flight. What a task is depends on the device:

    cpu     ten commands; an operation is two or more, a view one. 12 tasks instead of 11: measured peaks of one config
            differ by up to 10 % from run to run, and a forecast had better be above them (benchmarks/plan-cpu.json).
    cuda    a graph of 100 operations, or one whose operations read more than 1000 * 2^20 elements (Hopper and later).
            H200, 2026-12-01, benchmarks/loss-h200.json: 6.2 blocks of 256 MB alive, of two products that read
            1.02e9 elements each, and 14 blocks of 32 MB.
            That is where the program is as far ahead as it may be. Operations that take the device no longer than the
            program takes to hand them out would leave it less far ahead; then the forecast is too high.
    metal   a command buffer of 50 operations, or one whose operations read more than 50 * 2^20 elements (M Max and
            Ultra; 40 of both on others). Read in MLX's source, not measured.

`factor` multiplies what a step makes, that is everything but weights, adapters and optimizer. It is 1 until somebody
measures: `python benchmarks/plan.py --json benchmarks/plan-h200.json` on an H200. The rows of that file have forecasts
for other numbers of tasks as well: the number nearest to what was measured belongs into the table below, and the median
of what then remains, measured over forecast, is the factor, with machine and date.
"""

from dataclasses import dataclass

import mlx.core as mx

from gdtrain.plan.sizes import DeltaNet, ModelSizes
from gdtrain.plan.tape import Lead


@dataclass(frozen=True)
class Device:
    """What a forecast is for. label: for people."""

    name: str
    label: str
    lead: Lead
    factor: float

    @property
    def gpu(self) -> bool:
        return self.name != "cpu"


DEVICES = {
    device.name: device
    for device in (
        Device("cpu", "CPU", Lead(11, 10, float("inf"), True), 1.0),
        Device("cuda", "CUDA GPU", Lead(10, 100, 1000 * 2**20, False), 1.0),
        Device("metal", "Metal GPU", Lead(10, 50, 50 * 2**20, False), 1.0),
    )
}
# Backends that no CPU has: who asks for one plans for a GPU.
GPU_KERNELS = ("fused", "recurrent", "native")
# Limits of gdkernels.fused and gdkernels.recurrent.
_FUSED_HEAD_DIM, _FUSED_CHUNKS, _RECURRENT_KEY_DIM = 256, (16, 32, 64), 256


def device_of(kernel: str) -> Device:
    """This machine's, or a Metal GPU where the machine has none and the kernel needs one."""
    if mx.default_device() != mx.cpu:
        return DEVICES["metal" if mx.metal.is_available() else "cuda"]
    return DEVICES["metal" if kernel in GPU_KERNELS else "cpu"]


def backend_of(kernel: str, sizes: ModelSizes, device: Device, chunk: int) -> str:
    """The backend of the rule that `kernel` takes there, as far as that can be told without a self-test."""
    if kernel != "auto":
        return kernel
    net = next((block.mixer for block in sizes.blocks if isinstance(block.mixer, DeltaNet)), None)
    if not device.gpu or net is None:
        return "chunked"
    if max(net.Dk, net.Dv) <= _FUSED_HEAD_DIM and chunk in _FUSED_CHUNKS:
        return "fused"
    return "recurrent" if net.Dk % 32 == 0 and net.Dk <= _RECURRENT_KEY_DIM and net.Dv % 4 == 0 else "chunked"


def default_chunk(device: Device) -> int:
    """Tokens of a chunk where the config leaves the choice, as in gdkernels."""
    return 64 if device.gpu else 32
