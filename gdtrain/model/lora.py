"""Which projections train: LoRA, DoRA or the blocks in full."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from gdtrain.arrays import flat
from gdtrain.errors import UserError
from gdtrain.model.dropout import key_dropouts
from gdtrain.model.head import find_head
from gdtrain.model.lora_keys import matches, why_none

FINE_TUNE_TYPES = ("lora", "dora", "full")
_ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")
_DENSE = (nn.Linear, nn.QuantizedLinear)
_EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
_QUANTISED = (nn.QuantizedLinear, QuantizedSwitchLinear)
_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)


@dataclass(frozen=True)
class Target:
    """What trains, by its name within a block: a projection with an adapter, or in full fine-tuning a parameter.

    blocks: in how many. shape: of the weight, (out, in) or (experts, out, in). parameters: that train, in all of them.
    """

    name: str
    blocks: int
    shape: tuple[int, ...]
    parameters: int


@dataclass(frozen=True)
class Adaptation:
    """What trains: as in mlx-lm's adapter_config.json, with the names resolved. notes: what a person should know."""

    fine_tune_type: str
    num_layers: int
    lora_parameters: dict[str, Any] | None
    targets: list[Target]
    notes: tuple[str, ...] = ()


def adapt(
    model: nn.Module,
    *,
    fine_tune_type: str = "lora",
    num_layers: int = -1,
    rank: int = 8,
    scale: float = 20.0,
    dropout: float = 0.0,
    keys: list[str] | None = None,
) -> Adaptation:
    """Make the last `num_layers` blocks (-1: all) trainable, in place: LoRA, DoRA or in full.

    Args:
        keys: projections by their name within a block ("self_attn.q_proj") or its end ("q_proj"); experts only with
            "switch_mlp". None: every projection of attention, GDN and dense or shared MLPs, never a router.

    Raises:
        UserError: more blocks than the model has, or a key that names no projection; says why, and which names there
            are.
    """
    blocks = model.layers
    if fine_tune_type not in FINE_TUNE_TYPES:
        raise UserError(f"fine_tune_type: {fine_tune_type!r}; accepted: {', '.join(FINE_TUNE_TYPES)}")
    if num_layers != -1 and not 1 <= num_layers <= len(blocks):
        raise UserError(f"num_layers: {num_layers}; accepted: -1 (all) or 1 to {len(blocks)}, the blocks of the model")
    adapted = blocks[-num_layers:] if num_layers > 0 else blocks
    model.freeze()
    _check_quantisation(adapted, fine_tune_type)
    if fine_tune_type == "full":
        for block in adapted:
            block.unfreeze()
        return Adaptation("full", num_layers, None, _targets(adapted, {}), tuple(_notes([], adapted, blocks)))
    names = _resolve(keys, adapted, model, dora=fine_tune_type == "dora")
    shapes = {name: _shape(m) for block in adapted for name, m in _projections(block)}
    parameters = {"rank": rank, "scale": scale, "dropout": dropout, "keys": names}
    linear_to_lora_layers(model, num_layers, parameters, use_dora=fine_tune_type == "dora")
    for block in adapted:
        key_dropouts(block)
    notes = tuple(_notes(names, adapted, blocks))
    return Adaptation(fine_tune_type, num_layers, parameters, _targets(adapted, shapes), notes)


def _check_quantisation(blocks: list[nn.Module], fine_tune_type: str) -> None:
    """What MLX 0.32.4 and mlx-lm 0.32.2 cannot do with quantised weights, said before a run is on disk."""
    bits = {m.bits for block in blocks for m in block.modules() if isinstance(m, _QUANTISED)}
    if bits and fine_tune_type == "full":
        raise UserError("fine_tune_type: full needs unquantised weights: quantised ones have no gradient; use lora")
    if fine_tune_type == "dora" and (odd := sorted(b for b in bits if 32 % b)):
        raise UserError(f"fine_tune_type: dora takes 2-, 4- or 8-bit weights, and these have {odd[0]} bits; use lora")


def _projections(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, m) for name, m in block.named_modules() if isinstance(m, _DENSE + _EXPERTS))


def _resolve(keys: list[str] | None, blocks: list[nn.Module], model: nn.Module, *, dora: bool) -> list[str]:
    kinds = {name: module for block in blocks for name, module in _projections(block)}
    if keys is None:
        if names := sorted(n for n, m in kinds.items() if isinstance(m, _DENSE) and n not in _ROUTERS):
            return names
        raise UserError("model: its blocks have no projection that LoRA can adapt")
    elsewhere = {name for block in model.layers for name, _ in _projections(block)}
    tied = isinstance(find_head(model).module, _EMBEDDINGS)
    resolved: set[str] = set()
    faults = []
    for key in keys:
        named = [name for name in kinds if matches(key, name)]
        if not named:
            faults.append(why_none(key, kinds, elsewhere, tied=tied))
        elif dora and any(isinstance(kinds[name], _EXPERTS) for name in named):
            faults.append(f"{key!r} names experts, for which there is LoRA but no DoRA")
        resolved.update(named)
    if faults:
        raise UserError(f"lora_parameters.keys: {'; '.join(faults)}\n  this model has: {', '.join(sorted(kinds))}")
    return sorted(resolved)


def _notes(names: Iterable[str], adapted: list[nn.Module], blocks: list[nn.Module]) -> Iterator[str]:
    if len(adapted) < len(blocks):
        yield f"num_layers: the last {len(adapted)} of {len(blocks)} blocks train"
    if routers := [name for name in names if name in _ROUTERS]:
        yield (
            f"{' and '.join(routers)} {'are routers' if len(routers) > 1 else 'is a router'}: training changes which "
            "experts tokens go to, and nothing keeps the load of the experts even"
        )


def _shape(module: nn.Module) -> tuple[int, ...]:
    """Of the weight, as if it were not quantised."""
    *rows, columns = module.weight.shape
    return (*rows, columns * 32 // module.bits if isinstance(module, _QUANTISED) else columns)


def _targets(blocks: list[nn.Module], shapes: dict[str, tuple[int, ...]]) -> list[Target]:
    """shapes: of the projections that may have adapters; whatever else trains is listed by itself."""
    counts: dict[str, list[int]] = {}
    shapes = dict(shapes)
    for block in blocks:
        sizes: dict[str, int] = {}
        for path, x in flat(block.trainable_parameters()).items():
            name = path.rsplit(".", 1)[0]
            if name not in shapes:
                name = path.removesuffix(".weight")
                shapes[name] = x.shape
            sizes[name] = sizes.get(name, 0) + math.prod(x.shape)
        for name, size in sizes.items():
            counts.setdefault(name, []).append(size)
    return [Target(name, len(sizes), shapes[name], sum(sizes)) for name, sizes in sorted(counts.items())]
