"""The forecast of a run's peak memory, by part.

    weights         all of them, as they are stored
    adapter         what LoRA and DoRA train, twice: the loop keeps the last good ones as well
    optimizer       its state
    gradients       those made so far, and with grad_accumulation_steps those of the batches before
    block inputs    (B, T, hidden) for every block from the first that trains, until the block's backward
    activations     what blocks make, forward and backward: see the files of their layers
    GDN states      of the rule: states at the starts of the chunks, and scratch (rules.py and chunked.py)
    loss            logits of the blocks of rows that are alive (loss.py)

The last five are those of the moment at which they sum to the most, found by playing a step on a tape (tape.py and
step.py) as the device would run it (devices.py). An update takes new parameters and moments as well, but nothing of a
step: the peak is an update's where that is more.
"""

from dataclasses import dataclass

import mlx.core as mx
from gdkernels.cores import _cores

from gdtrain.config import RunConfig
from gdtrain.plan.adapter import Trained, trained_blocks
from gdtrain.plan.devices import GPU_KERNELS, Device, backend_of, default_chunk, device_of
from gdtrain.plan.loss import LOSS
from gdtrain.plan.model_config import find_model_config
from gdtrain.plan.pieces import GRADIENTS, Run
from gdtrain.plan.quantisation import Storage
from gdtrain.plan.rules import RULE
from gdtrain.plan.sizes import DeltaNet, Experts, read_sizes, weight_bytes
from gdtrain.plan.step import ACTIVATIONS, INPUTS, Step, lay_out

# From this part of a budget on a run is called tight: the forecast may be as far below what is measured.
_TIGHT = 0.9
# What an update takes above everything that is there before a step, in bytes of what trains: 0.5 to 1.4 in full
# fine-tuning with adam, sgd and adafactor (4 blocks, CPU, MLX 0.32.4, 2026-12-01).
_UPDATE = 1.4
# Where the model's config.json does not say how long its rows may be.
_LONGEST = 2**20
_LINES = {GRADIENTS: "gradients", INPUTS: "block inputs", ACTIVATIONS: "activations", RULE: "GDN states", LOSS: "loss"}


@dataclass(frozen=True)
class Part:
    """One line of a forecast. size: bytes at the peak; most: at any moment."""

    name: str
    size: int
    most: int
    note: str = ""


@dataclass(frozen=True)
class Forecast:
    """Of one run. moment: of the peak, "step" or "update"."""

    parts: tuple[Part, ...]
    moment: str

    @property
    def total(self) -> int:
        return sum(part.size for part in self.parts)

    def label(self, budget: int) -> str:
        """fits, tight or will not fit."""
        if self.total > budget:
            return "will not fit"
        return "tight" if self.total > _TIGHT * budget else "fits"


class Planner:
    """Forecasts of a config, for any batch size and row length."""

    def __init__(self, config: RunConfig) -> None:
        """Raises UserError where there is no config.json of the model, or the run's config does not fit it."""
        self.config = config
        self.model = find_model_config(config.model)
        self.storage = Storage(self.model, config.dtype)
        self.sizes = read_sizes(self.model, self.storage)
        self.trained: list[Trained] = trained_blocks(config, self.sizes, self.storage)
        self.weights = weight_bytes(self.sizes, self.storage)
        self.device: Device = device_of(config.kernel)
        self.chunk = default_chunk(self.device) if config.chunk_size is None else config.chunk_size
        self.cores = _cores()
        self.backend = backend_of(config.kernel, self.sizes, self.device, self.chunk)

    @property
    def trainable(self) -> int:
        """Parameters that train."""
        return sum(block.parameters for block in self.trained)

    @property
    def delta_nets(self) -> int:
        return sum(isinstance(block.mixer, DeltaNet) for block in self.sizes.blocks)

    @property
    def has_experts(self) -> bool:
        return any(isinstance(block.mlp, Experts) for block in self.sizes.blocks)

    @property
    def longest(self) -> int:
        """Tokens of the longest rows that the model was made for."""
        return self.model.number("max_position_embeddings", _LONGEST)

    @property
    def elsewhere(self) -> bool:
        """Whether the kernel needs a GPU that this machine has not."""
        return self.config.kernel in GPU_KERNELS and mx.default_device() == mx.cpu

    def forecast(self, batch_size: int | None = None, max_seq_length: int | None = None) -> Forecast:
        """Of rows that are all as long as they may be; None is what the config says."""
        config = self.config
        rows = config.batch_size if batch_size is None else batch_size
        tokens = config.max_seq_length if max_seq_length is None else max_seq_length
        static = self._static()
        room = float("inf")
        if config.memory_limit_gb is not None:
            room = 1e9 * config.memory_limit_gb - sum(part.size for part in static)
        peak = lay_out(self._step(), self._run(rows, tokens - 1)).play(self.device.lead, room)
        trained = sum(block.bytes for block in self.trained)
        update = int(_UPDATE * trained)
        if update > peak.size:
            return Forecast((*static, Part("gradients", update, update, "with new parameters and moments")), "update")
        dynamic = []
        for part, name in _LINES.items():
            dynamic.append(Part(name, peak.parts.get(part, 0), peak.most.get(part, 0)))
        return Forecast((*static, *dynamic), "step")

    def _static(self) -> list[Part]:
        """What is there all the time."""
        stored = ", ".join(f"{kind} {size / 1e9:.3f}" for kind, size in sorted(self.weights.items()))
        sizes = {"weights": (sum(self.weights.values()), stored)}
        if self.config.fine_tune_type != "full":
            adapter = sum(block.bytes for block in self.trained)
            sizes["adapter"] = (2 * adapter, "float32, and the last good one")
        sizes["optimizer"] = (sum(block.state for block in self.trained), self.config.optimizer)
        return [Part(name, size, size, note) for name, (size, note) in sizes.items()]

    def _step(self) -> Step:
        full = self.config.fine_tune_type == "full"
        names = [
            {m.name for m in (block.matrices if full and trained.parameters else trained.matrices)}
            for block, trained in zip(self.sizes.blocks, self.trained, strict=True)
        ]
        name = "model.embed_tokens" if self.sizes.tied else "lm_head"
        stored = self.storage.of(self.sizes.prefix + name, self.sizes.hidden)
        head = self.sizes.vocabulary * self.sizes.hidden * (1 if stored is None else stored.bits / 32)
        window = [block.bytes for block in self.trained] if self.config.grad_accumulation_steps > 1 else []
        return Step(self.sizes, names, self.config.grad_checkpoint, head, window)

    def _run(self, rows: int, positions: int) -> Run:
        config = self.config
        return Run(
            B=rows,
            T=positions,
            itemsize=self.storage.float_bytes,
            rank=config.lora_parameters.rank,
            dropout=config.lora_parameters.dropout > 0,
            kind=config.fine_tune_type,
            packed=config.packing,
            backend=self.backend,
            chunk=self.chunk,
            gpu=self.device.gpu,
            cores=self.cores,
        )
