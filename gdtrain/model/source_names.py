"""Where a parameter of the mlx-lm model lies in the checkpoint it was loaded from: the way back from layout.py."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import mlx.core as mx

from gdtrain.errors import UserError
from gdtrain.model.layout import is_centred, is_hub_layout, part_of, text_name


@dataclass(frozen=True)
class Place:
    """A tensor of the checkpoint, or a part of one.

    half: None, or 0 or 1 for the first or second half of the second last axis: gate and up of fused experts.
    expert: None, or the one expert that the tensor holds, of all that the parameter has.
    """

    tensor: str
    half: int | None = None
    expert: int | None = None


class SourceNames:
    """The names of a checkpoint's tensors by those of the model's parameters."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
        self._stored = {text_name(name): name for name in shapes if part_of(name, tied=tied) == "text"}
        self._hub = is_hub_layout(shapes)

    def places(self, parameter: str) -> list[Place]:
        """The tensors that a parameter is made of: one, or one for each expert.

        Args:
            parameter: its name in the model, such as "language_model.model.layers.0.mlp.up_proj.weight".

        Raises:
            UserError: the checkpoint has none.
        """
        name = text_name(parameter)
        if name in self._stored:
            return [Place(self._stored[name])]
        mlp, found, projection = name.partition(".switch_mlp.")
        projection = projection.removesuffix(".weight")
        if found and (fused := self._stored.get(f"{mlp}.experts.gate_up_proj")) and projection != "down_proj":
            return [Place(fused, half=["gate_proj", "up_proj"].index(projection))]
        if found and (down := self._stored.get(f"{mlp}.experts.{projection}")):
            return [Place(down)]
        if found and (one_by_one := list(self._experts(mlp, projection))):
            return one_by_one
        raise UserError(f"model: the checkpoint has no tensor for {parameter}")

    def to_model(self, parameter: str, x: mx.array) -> mx.array:
        """What the model is given for a stored tensor, in its dtype."""
        if self._hub and parameter.endswith("conv1d.weight"):
            return x.moveaxis(2, 1)
        return x + 1.0 if self._hub and is_centred(parameter, x.shape) else x

    def to_source(self, parameter: str, x: mx.array) -> mx.array:
        """The inverse of `to_model`, in float32."""
        x = x.astype(mx.float32)
        if self._hub and parameter.endswith("conv1d.weight"):
            return x.moveaxis(1, 2)
        return x - 1.0 if self._hub and is_centred(parameter, x.shape) else x

    def _experts(self, mlp: str, projection: str) -> Iterable[Place]:
        expert = 0
        while stored := self._stored.get(f"{mlp}.experts.{expert}.{projection}.weight"):
            yield Place(stored, expert=expert)
            expert += 1
