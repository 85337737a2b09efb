"""Why a run ends before its last iteration, and what the user is told."""

import math
from collections.abc import Sequence

from gdtrain.config import RunConfig
from gdtrain.errors import TrainingStopped
from gdtrain.memory import is_out_of_memory

_SHOWN = 8
# Of Metal and of CUDA, for a kernel that kept the GPU from drawing the screen for too long.
_WATCHDOG = ("gpu timeout", "impacting interactivity", "launch timed out")


def guard(what: str, value: float, when: int | str, places: Sequence[str]) -> None:
    """Stop at a value that is not finite, naming the samples of the batch or window.

    Args:
        when: the iteration, or another name of the step.

    Raises:
        TrainingStopped: the value is infinite or not a number.
    """
    if not math.isfinite(value):
        shown = ", ".join(places[:_SHOWN]) + (f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else "")
        step = f"iteration {when}" if isinstance(when, int) else when
        raise TrainingStopped(f"{step}: the {what} is {value}; samples: {shown}")


def explain_stop(error: BaseException, when: str, config: RunConfig, blocks: int) -> BaseException:
    """What the user is told about an error of the device: what to lower in this config. Any other error is itself.

    Args:
        when: the iteration or step, with the size of its batch.
        blocks: of the model.
    """
    if not isinstance(error, RuntimeError):
        return error
    text = str(error).lower()
    advice = f"lower max_seq_length (now {config.max_seq_length}) or batch_size (now {config.batch_size})"
    if "resource limit" in text:  # Metal's, on the number of buffers and not on their size
        fault = "too many buffers at once"
        advice = f"lower max_seq_length (now {config.max_seq_length}); fused and recurrent take fewer than chunked"
    elif any(sign in text for sign in _WATCHDOG):
        fault = "the watchdog of the GPU ended a kernel that took too long"
        advice += "; on a Mac with its display asleep there is no watchdog"
    elif is_out_of_memory(error):
        fault = "out of memory"
        trained = "num_layers" if config.fine_tune_type == "full" else "lora_parameters.rank"
        advice += f" or {trained}" + ("" if config.grad_checkpoint else ", or set grad_checkpoint: true")
    else:
        return error
    return TrainingStopped(f"{when}, {blocks} blocks: {fault}; {advice} ({error})")
