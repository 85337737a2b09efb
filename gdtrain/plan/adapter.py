"""What trains, from the config of a run and the sizes of a model, and what its training keeps beside it.

Which projections a key names is as in gdtrain.model.lora, which cannot be asked without a model.
"""

from dataclasses import dataclass

from gdtrain.config import RunConfig
from gdtrain.errors import UserError
from gdtrain.plan.quantisation import Storage
from gdtrain.plan.sizes import Block, Matrix, ModelSizes

_ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")


@dataclass(frozen=True)
class Trained:
    """What trains in a block: the projections with an adapter (none in full fine-tuning), parameters, their bytes, and
    bytes of the optimizer's state."""

    matrices: tuple[Matrix, ...]
    parameters: int
    bytes: int
    state: int


def trained_blocks(config: RunConfig, sizes: ModelSizes, storage: Storage) -> list[Trained]:
    """One for every block, empty where nothing trains.

    LoRA and DoRA are float32 whatever the weights are; in full fine-tuning parameters have the model's dtype.

    Raises:
        UserError: more blocks than the model has, keys that name nothing, or full with quantised weights.
    """
    count = len(sizes.blocks)
    if config.num_layers != -1 and config.num_layers > count:
        raise UserError(f"num_layers: {config.num_layers}; accepted: -1 (all) or 1 to {count}, the blocks of the model")
    first = 0 if config.num_layers == -1 else count - config.num_layers
    if config.fine_tune_type == "full":
        if any(storage.of(name, matrix.inputs) for name, matrix in sizes.matrices()):
            raise UserError("fine_tune_type: full needs unquantised weights: quantised ones have no gradient; use lora")
        return [_full(block, config, storage) if i >= first else _NOTHING for i, block in enumerate(sizes.blocks)]
    names = _resolve(config.lora_parameters.keys, sizes.blocks[first:])
    return [
        _adapted([m for m in block.matrices if m.name in names], config) if i >= first else _NOTHING
        for i, block in enumerate(sizes.blocks)
    ]


_NOTHING = Trained((), 0, 0, 0)


def _adapted(matrices: list[Matrix], config: RunConfig) -> Trained:
    rank, dora = config.lora_parameters.rank, config.fine_tune_type == "dora"
    parameters = state = 0
    for m in matrices:
        copies = max(1, m.experts)
        shapes = [(copies, m.inputs, rank), (copies, rank, m.outputs), *([(1, 1, m.outputs)] if dora else [])]
        parameters += sum(a * b * c for a, b, c in shapes)
        state += sum(_state_floats(config, a, b, c) for a, b, c in shapes)
    return Trained(tuple(matrices), parameters, 4 * parameters, 4 * state)


def _full(block: Block, config: RunConfig, storage: Storage) -> Trained:
    size, floats = storage.float_bytes, block.floats + sum(m.biases for m in block.matrices)
    weights = sum(m.weights for m in block.matrices)
    state = sum(_state_floats(config, max(1, m.experts), m.outputs, m.inputs) for m in block.matrices)
    state += _state_floats(config, 1, 1, floats)
    exact = _state_floats(config, 1, 1, block.exact)
    return Trained((), block.parameters, size * (weights + floats) + 4 * block.exact, size * state + 4 * exact)


def _state_floats(config: RunConfig, copies: int, rows: int, columns: int) -> int:
    """Of a parameter of this shape in the state of the optimizer: two moments of adam and adamw, the momentum of sgd
    and muon, sums over rows and columns of adafactor, which has a moment only with beta_1."""
    size = copies * rows * columns
    if config.optimizer in ("adam", "adamw"):
        return 2 * size
    if config.optimizer != "adafactor":
        return size
    moment = size if config.optimizer_config.adafactor.beta_1 is not None else 0
    return moment + (size if rows == 1 else copies * (rows + columns))


def _resolve(keys: list[str] | None, blocks: tuple[Block, ...]) -> set[str]:
    matrices = {m.name: m for block in blocks for m in block.matrices}
    if keys is None:
        return {name for name, m in matrices.items() if not m.experts and name not in _ROUTERS}
    resolved: set[str] = set()
    for key in keys:
        named = {name for name in matrices if _matches(key, name)}
        if not named:
            raise UserError(
                f"lora_parameters.keys: {key!r} names no projection\n  this model has: {', '.join(sorted(matrices))}"
            )
        resolved |= named
    return resolved


def _matches(key: str, name: str) -> bool:
    return name == key or (name.endswith(f".{key}") and ("switch_mlp" not in name or "switch_mlp" in key))
