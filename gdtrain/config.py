"""The schema of a run: every key with its type, limits, default and meaning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from gdtrain.config_section import (
    Contradiction,
    Count,
    CountOrAll,
    NonNegative,
    Number,
    Positive,
    Section,
    Text,
    show,
    size_in_bytes,
    whole_number,
)

SERVICES = ("wandb", "tensorboard")  # in report_to

# Arguments of the schedules in mlx.optimizers, in order; those after the first `required` may be left out.
SCHEDULES: dict[str, tuple[tuple[str, ...], int]] = {
    "cosine_decay": (("init", "decay_steps", "end"), 2),
    "exponential_decay": (("init", "decay_rate"), 2),
    "linear_schedule": (("init", "end", "steps"), 3),
    "step_decay": (("init", "decay_rate", "step_size"), 3),
}


class LoraParameters(Section):
    rank: Count = Field(default=8, description="Rank of the two LoRA matrices.")
    scale: Positive = Field(default=20.0, description="Factor on the LoRA output; alpha / rank when alpha is set.")
    dropout: Annotated[Number, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Share of the LoRA input set to zero in training, from 0 to below 1."
    )
    keys: Annotated[list[Text], Field(min_length=1)] | None = Field(
        default=None,
        description="Names of the layers to adapt; null adapts every linear projection of attention, GDN and MLP.",
    )
    alpha: Positive | None = Field(default=None, description="Instead of scale: the scale is alpha / rank.")
    rslora: bool = Field(default=False, description="With alpha: the scale is alpha / sqrt(rank).")

    @property
    def resolved_scale(self) -> float:
        """The factor on the LoRA output, from scale or from alpha. rsLoRA: arXiv 2312.03732."""
        if self.alpha is None:
            return self.scale
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def contradictions(self) -> Iterator[Contradiction]:
        if self.alpha is not None and self.was_set("scale"):
            yield Contradiction(("alpha", "scale"), "set together with scale; keep one of the two")
        if self.rslora and self.alpha is None:
            yield Contradiction(("rslora", "alpha"), "true needs alpha (the scale is alpha / sqrt(rank))")


class LrSchedule(Section):
    name: Literal["cosine_decay", "exponential_decay", "linear_schedule", "step_decay"] = Field(
        description="A schedule of mlx.optimizers."
    )
    arguments: list[Number] = Field(
        description="Its arguments in order, the initial learning rate first; lengths in optimizer updates."
    )
    warmup: Annotated[int, BeforeValidator(whole_number), Field(ge=0)] = Field(
        default=0, description="Optimizer updates of linear warm-up before the schedule."
    )
    warmup_init: NonNegative = Field(default=0.0, description="Learning rate at the start of the warm-up.")

    def contradictions(self) -> Iterator[Contradiction]:
        names, required = SCHEDULES[self.name]
        if not required <= len(self.arguments) <= len(names):
            wanted = ", ".join(names[:required]) + "".join(f"[, {name}]" for name in names[required:])
            yield Contradiction(
                ("arguments", "name"), f"{self.name} takes [{wanted}], not {len(self.arguments)} numbers"
            )
        for name, value in zip(names, self.arguments, strict=False):
            if "step" in name and value < 1:
                yield Contradiction(("arguments", "name"), f"{name} of {self.name} must be at least 1, not {value:g}")
            elif "step" not in name and value < 0:
                yield Contradiction(("arguments", "name"), f"{name} of {self.name} must not be negative: {value:g}")


_BETAS = Field(default=None, description="Decay of the running averages of the gradient and of its square.")
_WEIGHT_DECAY = Field(default=None, description="Weight decay.")
_MOMENTUM = Field(default=None, description="Momentum.")
_NESTEROV = Field(default=None, description="Nesterov momentum.")
_Pair = Annotated[list[Number], Field(min_length=2, max_length=2)]


class AdamArguments(Section):
    betas: _Pair | None = _BETAS
    eps: NonNegative | None = Field(default=None, description="Added to the denominator.")
    bias_correction: bool | None = Field(default=None, description="Correct the running averages at the start.")


class AdamWArguments(AdamArguments):
    weight_decay: NonNegative | None = _WEIGHT_DECAY


class SgdArguments(Section):
    momentum: NonNegative | None = _MOMENTUM
    weight_decay: NonNegative | None = _WEIGHT_DECAY
    dampening: Number | None = Field(default=None, description="Dampening of the momentum.")
    nesterov: bool | None = _NESTEROV


class AdafactorArguments(Section):
    eps: _Pair | None = Field(default=None, description="Regularisers of the squared gradient and of the step.")
    clip_threshold: Positive | None = Field(default=None, description="Largest root mean square of an update.")
    decay_rate: Number | None = Field(default=None, description="Exponent of the decay of the second moment.")
    beta_1: NonNegative | None = Field(default=None, description="Decay of the first moment; unset keeps none.")
    weight_decay: NonNegative | None = _WEIGHT_DECAY
    scale_parameter: bool | None = Field(default=None, description="Scale the learning rate by the parameter's size.")
    relative_step: bool | None = Field(
        default=None, description="Learning rate from the step count instead of learning_rate."
    )
    warmup_init: bool | None = Field(default=None, description="With relative_step: start lower.")


class MuonArguments(Section):
    momentum: NonNegative | None = _MOMENTUM
    weight_decay: NonNegative | None = _WEIGHT_DECAY
    nesterov: bool | None = _NESTEROV
    ns_steps: Count | None = Field(default=None, description="Newton-Schulz iterations.")


class OptimizerConfig(Section):
    """Arguments of the optimizer of that name; what is not set keeps the default of mlx.optimizers."""

    adam: AdamArguments = Field(default=AdamArguments(), description="Arguments of adam.")
    adamw: AdamWArguments = Field(default=AdamWArguments(), description="Arguments of adamw.")
    sgd: SgdArguments = Field(default=SgdArguments(), description="Arguments of sgd.")
    adafactor: AdafactorArguments = Field(default=AdafactorArguments(), description="Arguments of adafactor.")
    muon: MuonArguments = Field(default=MuonArguments(), description="Arguments of muon.")


# Keys that name a column, with its usual name.
FEATURES = {
    "prompt_feature": "prompt",
    "completion_feature": "completion",
    "text_feature": "text",
    "chat_feature": "messages",
}


def _one_column_each(section: Section) -> Iterator[Contradiction]:
    """Two of the keys in FEATURES that name the same column, one of them at least by its own choice."""
    names = {key: getattr(section, key) for key in FEATURES if getattr(section, key) is not None}
    chosen = {key: name for key, name in names.items() if name != FEATURES[key]}
    pairs = [("prompt_feature", "completion_feature"), *combinations(chosen, 2)]
    for one, other in dict.fromkeys(pairs):
        if (name := names.get(one, FEATURES[one])) == names.get(other, FEATURES[other]):
            key, second = (one, other) if one in chosen else (other, one)
            yield Contradiction((key, second), f"{name!r} is {second}'s column too")


class HfDataset(Section):
    path: Text = Field(description="Name of the dataset on the Hub, or a path that datasets.load_dataset accepts.")
    train_split: Text = Field(default="train[:80%]", description="Split to train on.")
    valid_split: Text = Field(default="train[-10%:]", description="Split to validate on.")
    test_split: Text | None = Field(default=None, description="Split to test on.")
    config: dict[str, Any] = Field(default={}, description="Further arguments of datasets.load_dataset.")
    prompt_feature: Text = Field(default="prompt", description="Column of the prompt.")
    completion_feature: Text = Field(default="completion", description="Column of the completion.")
    text_feature: Text = Field(default="text", description="Column of plain text.")
    chat_feature: Text = Field(default="messages", description="Column of the conversation.")

    def contradictions(self) -> Iterator[Contradiction]:
        yield from _one_column_each(self)


class RunConfig(Section):
    # Model and data
    model: Text = Field(description="Folder of the model, or its name on the Hugging Face Hub.")
    trust_remote_code: bool = Field(default=False, description="Run code that comes with the tokenizer.")
    data: Text | None = Field(
        default=None, description="Folder with train, valid and test files, or the name of a dataset on the Hub."
    )
    hf_dataset: list[HfDataset] | None = Field(
        default=None, description="Instead of data: one or several datasets of the Hub, with their columns and splits."
    )
    prompt_feature: Text | None = Field(default=None, description="Column of the prompt in data.")
    completion_feature: Text | None = Field(default=None, description="Column of the completion in data.")
    chat_feature: Text | None = Field(default=None, description="Column of the conversation in data.")
    text_feature: Text | None = Field(default=None, description="Column of plain text in data.")
    max_seq_length: Annotated[int, BeforeValidator(whole_number), Field(ge=2)] = Field(
        default=2048, description="Longest row, in tokens."
    )
    on_long: Literal["truncate", "drop", "error"] = Field(
        default="truncate", description="What happens to a row longer than max_seq_length."
    )
    packing: bool = Field(default=False, description="Put several documents in a row, with no leak between them.")
    mask_prompt: bool = Field(default=False, description="Leave the prompt out of the loss.")
    supervise: Literal["all", "last"] = Field(
        default="all", description="With mask_prompt: learn every assistant turn, or only the last."
    )
    enable_thinking: bool | None = Field(
        default=None,
        description="Passed to the chat template; null does as mlx-lm at inference: thinking where the model can.",
    )

    # What is trained
    fine_tune_type: Literal["lora", "dora", "full"] = Field(
        default="lora", description="Train LoRA or DoRA adapters, or all weights of the adapted blocks."
    )
    num_layers: CountOrAll = Field(default=-1, description="Blocks to adapt, counted from the last; -1 for all.")
    lora_parameters: LoraParameters = Field(default=LoraParameters(), description="Size and places of the adapters.")
    resume_adapter_file: Text | None = Field(
        default=None, description="Adapter file to start from; weights only, not the optimizer."
    )

    # Training
    train: bool = Field(default=True, description="Train; false only tests.")
    seed: Annotated[int, BeforeValidator(whole_number), Field(ge=0, lt=2**32)] = Field(
        default=0, description="Seed of data order, adapter initialisation and dropout."
    )
    iters: Count = Field(default=1000, description="Batches to train on.")
    epochs: Positive | None = Field(default=None, description="Instead of iters: passes over the training rows.")
    batch_size: Count = Field(default=4, description="Rows in a batch.")
    grad_accumulation_steps: Count = Field(default=1, description="Batches in one optimizer update.")
    optimizer: Literal["adam", "adamw", "sgd", "adafactor", "muon"] = Field(
        default="adam", description="Optimizer of mlx.optimizers."
    )
    optimizer_config: OptimizerConfig = Field(default=OptimizerConfig(), description="Arguments of each optimizer.")
    learning_rate: NonNegative = Field(default=1e-5, description="Learning rate; lr_schedule takes its place if set.")
    lr_schedule: LrSchedule | None = Field(default=None, description="Learning rate over the optimizer updates.")
    max_grad_norm: Positive | None = Field(
        default=None, description="Scale the gradient down to this global L2 norm; null never does."
    )

    # Evaluation, reports, files
    val_batches: CountOrAll = Field(default=-1, description="Batches in a validation; -1 for all rows.")
    steps_per_report: Count = Field(default=10, description="Iterations between two lines of training loss.")
    steps_per_eval: Count = Field(default=200, description="Iterations between two validations.")
    test: bool = Field(default=False, description="Compute the loss on the test rows after training.")
    test_batches: CountOrAll = Field(default=500, description="Batches in that test; -1 for all rows.")
    early_stopping_patience: Count | None = Field(
        default=None, description="Stop after this many validations without a lower loss."
    )
    adapter_path: Text = Field(
        default="adapters", description="Run directory: adapter, best adapter, checkpoints, metrics."
    )
    save_every: Count = Field(default=100, description="Iterations between two checkpoints.")
    keep_checkpoints: Count = Field(default=3, description="Newest checkpoints kept.")
    report_to: list[str] | None = Field(
        default=None, description="Where the metrics go besides: wandb, tensorboard, or both as a list or with a comma."
    )
    project_name: Text | None = Field(default=None, description="Project at wandb.")

    # Kernel and memory
    kernel: Literal["auto", "fused", "recurrent", "chunked", "replay", "reference", "native"] = Field(
        default="auto", description="How the gated delta rule is computed; a forced one that cannot run is an error."
    )
    chunk_size: Count | None = Field(
        default=None, description="Tokens in a chunk of the gated delta rule; null takes 32 on a CPU and 64 on a GPU."
    )
    grad_checkpoint: bool = Field(default=True, description="Recompute each block in the backward pass: less memory.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="Type of the computation; null keeps the checkpoint's."
    )
    compile: bool | None = Field(
        default=None, description="Compile the training step with mx.compile; null decides per device."
    )
    clear_cache_threshold: Annotated[int, BeforeValidator(size_in_bytes), Field(ge=0)] = Field(
        default=0, description="Free MLX's buffer cache between steps above this size: bytes, 500MB, 2GB."
    )
    memory_limit_gb: Positive | None = Field(default=None, description="MLX memory limit, in GB of 1e9 bytes.")
    cache_limit_gb: NonNegative | None = Field(
        default=None, description="Limit of the buffer cache, in GB of 1e9 bytes."
    )
    wired_limit_gb: NonNegative | None = Field(default=None, description="Wired memory limit, in GB of 1e9 bytes.")
    config: None = Field(default=None, exclude=True, description="Accepted as null: saved mlx-lm configs contain it.")

    @field_validator("hf_dataset", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, dict) else value

    @field_validator("report_to", mode="before")
    @classmethod
    def _services(cls, value: Any) -> Any:
        """As mlx-lm: names with commas between them, in any case, and an empty text for none."""
        names = [name for name in value.split(",") if name.strip()] if isinstance(value, str) else value
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            names = list(dict.fromkeys(name.strip().lower() for name in names))
            if set(names) <= set(SERVICES):
                return names or None
        raise ValueError(f"must be {', '.join(SERVICES)} or both, not {show(value)}")

    @field_validator("optimizer", mode="before")
    @classmethod
    def _any_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @property
    def optimizer_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the chosen optimizer: those that were set."""
        return getattr(self.optimizer_config, self.optimizer).model_dump(exclude_none=True)

    def contradictions(self) -> Iterator[Contradiction]:
        if self.data is not None and self.hf_dataset is not None:
            yield Contradiction(("hf_dataset", "data"), "set together with data; keep one of the two")
        for key in FEATURES if self.hf_dataset is not None else ():
            if getattr(self, key) is not None:
                yield Contradiction((key, "hf_dataset"), f"would be ignored with hf_dataset; set hf_dataset.{key}")
        yield from _one_column_each(self)
        if self.data is None and self.hf_dataset is None:
            yield Contradiction(("data", "hf_dataset"), "required: a folder or a Hub dataset (or set hf_dataset)")
        if self.hf_dataset is not None and self.test and not all(source.test_split for source in self.hf_dataset):
            yield Contradiction(("test", "hf_dataset"), "true needs hf_dataset.test_split")
        if self.supervise != "all" and not self.mask_prompt:
            yield Contradiction(("supervise", "mask_prompt"), f"{self.supervise} needs mask_prompt: true")
        if self.project_name is not None and "wandb" not in (self.report_to or []):
            yield Contradiction(("project_name", "report_to"), "would be ignored without report_to: wandb; remove it")
        if self.optimizer == "adafactor" and self.optimizer_config.adafactor.relative_step:
            for key in ("learning_rate", "lr_schedule"):
                if self.was_set(key):
                    yield Contradiction((key,), "would be ignored: optimizer_config.adafactor.relative_step is true")
        if self.epochs is not None:
            if self.was_set("iters"):
                yield Contradiction(("epochs", "iters"), "set together with iters; keep one, or set iters: null")
            return
        if self.grad_accumulation_steps > self.iters:
            message = f"{self.grad_accumulation_steps} is more than iters ({self.iters}): no window would fill"
            yield Contradiction(("grad_accumulation_steps", "iters"), message)
