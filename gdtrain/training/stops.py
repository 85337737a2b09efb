"""Why a run ends before its last iteration, and what the user is told."""

import math
from collections.abc import Sequence

from gdtrain.config import RunConfig
from gdtrain.errors import Interrupted, TrainingStopped
from gdtrain.memory import is_out_of_memory

_SHOWN = 8


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


def explain_stop(error: BaseException, iteration: int, config: RunConfig) -> BaseException:
    """What the user is told when the loop ends early: the error itself, unless a clearer one is known."""
    if isinstance(error, KeyboardInterrupt):
        return Interrupted(f"interrupted at iteration {iteration}; resume_adapter_file goes on from its weights")
    if is_out_of_memory(error):
        return out_of_memory(error, f"iteration {iteration}", config)
    return error


def out_of_memory(error: BaseException, when: str, config: RunConfig) -> TrainingStopped:
    """The stop for an allocation that failed, with what is left to lower in this config."""
    if "resource limit" in str(error).lower():  # Metal's, on the number of buffers and not on their size
        advice = "lower max_seq_length; kernel: chunked takes more buffers than fused or recurrent"
        return TrainingStopped(f"{when}: too many buffers at once; {advice} ({error})")
    trained = "num_layers" if config.fine_tune_type == "full" else "lora_parameters.rank"
    advice = f"lower max_seq_length, batch_size or {trained}"
    if not config.grad_checkpoint:
        advice += ", or set grad_checkpoint: true"
    return TrainingStopped(f"{when}: out of memory; {advice} ({error})")
