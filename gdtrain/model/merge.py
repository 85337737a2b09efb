"""What an adapter makes of the weights that it stands beside."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from gdtrain.arrays import flat
from gdtrain.model.lora import Adaptation
from gdtrain.model.source_names import SourceNames


@dataclass(frozen=True)
class Merge:
    """One adapted parameter of the model.

    experts: how many matrices are stacked in it, or None for a single one.
    apply: (stored value, of one expert where there are several; which) -> the new value, float32, as it is stored.
    """

    experts: int | None
    apply: Callable[[mx.array, int], mx.array]


def find_merges(model: nn.Module, adaptation: Adaptation, names: SourceNames) -> dict[str, Merge]:
    """By the parameter's name in the unadapted model. model: adapted, its adapter loaded.

    LoRA: W + scale (A B)^T, Hu et al., arXiv:2106.09685, equation 3. DoRA: m (W + scale (A B)^T) / |W + scale (A B)^T|,
    norms of rows, Liu et al., arXiv:2402.09353, equation 5. In full: the trained value.
    """
    if adaptation.fine_tune_type == "full":
        return {name: _full(name, x, names) for name, x in flat(model.trainable_parameters()).items()}
    return {
        f"{name}.weight": _low_rank(module)
        for name, module in model.named_modules()
        if isinstance(module, LoRALinear | DoRALinear | LoRASwitchLinear)
    }


def _low_rank(layer: LoRALinear | DoRALinear | LoRASwitchLinear) -> Merge:
    a, b = layer.lora_a.astype(mx.float32), layer.lora_b.astype(mx.float32)
    if isinstance(layer, LoRASwitchLinear):
        return Merge(a.shape[0], lambda w, expert: w.astype(mx.float32) + layer.scale * (b[expert] @ a[expert]))

    def lora(w: mx.array, _: int) -> mx.array:
        return w.astype(mx.float32) + layer.scale * (a @ b).T

    def dora(w: mx.array, _: int) -> mx.array:
        adapted = lora(w, 0)
        return (layer.m.astype(mx.float32) / mx.linalg.norm(adapted, axis=1))[:, None] * adapted

    return Merge(None, dora if isinstance(layer, DoRALinear) else lora)


def _full(name: str, trained: mx.array, names: SourceNames) -> Merge:
    experts = trained.shape[0] if ".switch_mlp." in name else None

    def replace(stored: mx.array, expert: int) -> mx.array:
        new = trained if experts is None else trained[expert]
        # A norm less one can have more digits than the norm: what was not trained keeps them.
        if mx.array_equal(names.to_model(name, stored).astype(new.dtype), new):
            return stored.astype(mx.float32)
        return names.to_source(name, new)

    return Merge(experts, replace)
