"""What was chosen, and why, as text."""

from dataclasses import dataclass

from gdkernels.portable.machine import architecture, machine


@dataclass(frozen=True)
class Choice:
    """The backend that will run, and why."""

    backend: str
    reason: str


def describe_device() -> str:
    """The default device in a reason: "CPU device", "Metal device applegpu_g16s"."""
    where = machine()
    if where is None:
        return "CPU device"
    return f"{'Metal' if where == 'metal' else 'CUDA'} device {architecture()}".rstrip()
