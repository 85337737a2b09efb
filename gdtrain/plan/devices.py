"""How far MLX runs ahead of a device, and what a forecast is multiplied by there: the measured coefficients.

MLX 0.32.4 hands out operations until more than ten tasks are in flight. What a task is depends on the device:

    cpu     ten commands of a stream; an operation is two or more, a view one. Compared with what is measured in
            benchmarks/plan-cpu.json: 11 tasks, because the peaks of one config differ by up to 7 % from step to step,
            and a forecast had better be above them. 12 would be nearer to the highest and too high where the loss is
            the peak.
    cuda    a graph of 100 operations, or one whose operations read more than 1000 * 2^20 elements (Hopper and later).
            H200, 2026-12-01, benchmarks/loss-h200.json: 6.2 blocks of 256 MB alive, of two products that read
            1.02e9 elements each, and 14 blocks of 32 MB.
            That is where the program is as far ahead as it may be. Operations that take the device no longer than the
            program takes to hand them out would leave it less far ahead; then the forecast is too high. Whole steps
            are not measured with this text; with an older one Qwen3.5-9B cut to 8 blocks took 18.1 and 20.0 GB at
            T = 2048 and 4096, and the forecasts are 5 and 3 % above.
    metal   a command buffer of 50 operations, or one whose operations read more than 50 * 2^20 elements (M Max and
            Ultra; 40 of both on others). Read in MLX's source, not measured.

To measure a GPU: `python benchmarks/plan.py --json benchmarks/plan-h200.json`. The rows have forecasts for other
numbers of tasks as well: the one nearest to what was measured belongs into the table below, with machine and date.
"""

from dataclasses import dataclass

import mlx.core as mx
from gdkernels.dispatch import _CPU_CHUNK, _GPU_CHUNK
from gdkernels.fused.plan import CHUNKS, MAX_HEAD_DIM
from gdkernels.recurrent.layout import MAX_KEY_DIM

from gdtrain.plan.sizes import DeltaNet, ModelSizes
from gdtrain.plan.tape import Lead


@dataclass(frozen=True)
class Device:
    """What a forecast is for. label: for people. measured: how its forecasts compare with measurements, for people."""

    name: str
    label: str
    lead: Lead
    measured: str

    @property
    def gpu(self) -> bool:
        return self.name != "cpu"


DEVICES = {
    device.name: device
    for device in (
        Device("cpu", "CPU", Lead(11, 10, float("inf"), True), "compared with measured peaks of small models"),
        Device(
            "cuda", "CUDA GPU", Lead(10, 100, 1000 * 2**20, False), "not measured on a CUDA GPU; it may be well off"
        ),
        Device(
            "metal", "Metal GPU", Lead(10, 50, 50 * 2**20, False), "not measured on a Metal GPU; it may be well off"
        ),
    )
}
# Backends that no CPU has: who asks for one plans for a GPU.
GPU_KERNELS = ("fused", "recurrent", "native")


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
    if max(net.Dk, net.Dv) <= MAX_HEAD_DIM and chunk in CHUNKS:
        return "fused"
    return "recurrent" if net.Dk % 32 == 0 and net.Dk <= MAX_KEY_DIM and net.Dv % 4 == 0 else "chunked"


def default_chunk(device: Device) -> int:
    """Tokens of a chunk where the config leaves the choice, as in gdkernels."""
    return _GPU_CHUNK if device.gpu else _CPU_CHUNK
