"""What this machine is, and which backend of the rule it runs, tested now."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
from gdkernels import BACKENDS, explain, explain_convolution
from gdkernels.dispatch import default_chunk
from gdkernels.selftest import Result
from gdkernels.sizes import Sizes
from gdkernels.verdicts import clear_marks, verdict

from gdtrain.bench.machine import examine_machine
from gdtrain.bench.shapes import MODELS, Shape

_TOKENS = 1024
# Of the convolution before the rule, in every released model.
_TAPS = 4


def _shapes() -> dict[str, Shape]:
    """Models of one shape are tested together."""
    names: dict[Shape, list[str]] = {}
    for name, shape in MODELS.items():
        names.setdefault(shape, []).append(name)
    return {", ".join(same): shape for shape, same in names.items()}


SHAPES = _shapes()


@dataclass(frozen=True)
class Status:
    """What became of a backend for one shape: state is chosen, available, refused or failed."""

    model: str
    backend: str
    state: str
    detail: str


@dataclass(frozen=True)
class Report:
    """All that `gdtrain doctor` shows.

    Attributes:
        machine: names and values, and what the convolution before the rule runs on.
        statuses: one for each of SHAPES and each backend, in bfloat16.
        reasons: of the choice, by model.
        tests: the self-tests that were run, by model and backend.
        cleared: files left by processes that had ended in a self-test, of any shape; removed, so that it is run again.
    """

    machine: dict[str, str]
    statuses: tuple[Status, ...]
    reasons: dict[str, str]
    tests: dict[tuple[str, str], Result]
    cleared: tuple[str, ...]

    @property
    def fault(self) -> str | None:
        """Why the backend chosen for some shape cannot be trusted; None if all can."""
        for status in self.statuses:
            if status.state == "chosen":
                result = self.tests[status.model, status.backend]
                if not result.passed:
                    return f"{status.backend} is chosen for {status.model}, but its self-test says: {result.summary()}"
        return None


def examine(say: Callable[[str], None] = lambda line: None) -> Report:
    """Ask and test every backend on the default device. `say` hears what is being tested."""
    cleared = tuple(map(str, clear_marks()))
    statuses: list[Status] = []
    reasons: dict[str, str] = {}
    tests: dict[tuple[str, str], Result] = {}
    operations: dict[str, Result] = {}
    for model, heads in SHAPES.items():
        sizes = Sizes(1, _TOKENS, *heads, mx.bfloat16, default_chunk())
        refusals = {name: backend.refusal(sizes) for name, backend in BACKENDS.items()}
        for name, backend in BACKENDS.items():
            if refusals[name] is not None or name == "reference":  # which the others are compared with
                continue
            if name not in operations:  # what has no kernels is the same for every shape
                say(f"{name}, {model}")
                result = verdict(backend, sizes, fresh=True)
                if not backend.has_kernels:
                    operations[name] = result
            tests[model, name] = operations.get(name, result)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of self-tests that failed: they are shown
            choice = explain(*sizes[:-1], chunk_size=sizes.C)
        reasons[model] = choice.reason
        for name in BACKENDS:
            statuses.append(_status(model, name, name == choice.backend, refusals[name], tests.get((model, name))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        convolution = explain_convolution(mx.bfloat16, mx.bfloat16, _TAPS)
    machine = examine_machine() | {"convolution": f"{convolution.backend}: {convolution.reason}"}
    return Report(machine, tuple(statuses), reasons, tests, cleared)


def _status(model: str, name: str, chosen: bool, refusal: str | None, result: Result | None) -> Status:
    if refusal is not None:
        return Status(model, name, "refused", refusal)
    if result is not None and not result.passed and not chosen:
        return Status(model, name, "failed", f"self-test: {result.summary()}")
    detail = "what the self-test compares with" if result is None else f"self-test {result.summary()}"
    return Status(model, name, "chosen" if chosen else "available", detail)
