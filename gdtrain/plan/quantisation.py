"""How the weights of a checkpoint are stored, as its config.json says."""

from typing import Any, NamedTuple

from gdtrain.errors import UserError
from gdtrain.plan.model_config import ModelConfig

FLOATS = {"float32": 4, "bfloat16": 2, "float16": 2}
# Bytes of a group's scale and bias in the modes of MLX; affine ones have the dtype of the weights.
_SCALE_BYTES = {"mxfp4": 1, "mxfp8": 1, "nvfp4": 1}
_GROUPS = {"affine": 64, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}
_BITS = {"affine": 4, "mxfp4": 4, "mxfp8": 8, "nvfp4": 4}


class Quantised(NamedTuple):
    """bits of a weight; group: weights along a row that share a scale; mode: of mx.quantize."""

    bits: int
    group: int
    mode: str

    def __str__(self) -> str:
        return f"{self.bits}-bit {self.mode}"


class Storage:
    """Dtype of the floats, and which matrices are quantised.

    mlx-lm's converter quantises every projection and embedding whose rows divide into groups, and writes into
    config.json whatever it treats differently, by name: routers for example.
    """

    def __init__(self, config: ModelConfig, dtype: str | None) -> None:
        """dtype: of the run, None for the checkpoint's.

        Raises:
            UserError: a dtype or a quantisation that a forecast cannot be made for.
        """
        self._file = config.file
        self.dtype, self.assumed = _dtype(config, dtype)
        self._values = _quantisation(config)
        self._default = None if self._values is None else self._read("quantization", self._values)

    @property
    def float_bytes(self) -> int:
        return FLOATS[self.dtype]

    def of(self, name: str, columns: int) -> Quantised | None:
        """How the matrix of this name is quantised; None: it is not.

        Args:
            name: as in mlx-lm's model, language_model.model.layers.0.mlp.down_proj for example.
            columns: of its rows, which are what groups divide.
        """
        if self._values is None or self._default is None:
            return None
        own = self._values.get(name, True)
        if isinstance(own, dict):
            return self._read(name, own)
        return self._default if own and columns % self._default.group == 0 else None

    def matrix_bytes(self, weights: int, quantised: Quantised | None) -> int:
        """Bytes of so many weights with their scales and biases."""
        if quantised is None:
            return weights * self.float_bytes
        groups = weights // quantised.group
        return weights * quantised.bits // 8 + groups * _SCALE_BYTES.get(quantised.mode, 2 * self.float_bytes)

    def _read(self, name: str, values: dict[str, Any]) -> Quantised:
        mode = values.get("mode") or "affine"
        if mode not in _GROUPS:
            raise UserError(f"model: {self._file}: {name} has mode {mode!r}; accepted: {', '.join(_GROUPS)}")
        bits, group = values.get("bits") or _BITS[mode], values.get("group_size") or _GROUPS[mode]
        if not isinstance(bits, int) or not isinstance(group, int) or not 1 <= bits <= 8 or group < 1:
            raise UserError(f"model: {self._file}: {name} has bits {bits!r} and group_size {group!r}")
        return Quantised(bits, group, mode)


def _dtype(config: ModelConfig, dtype: str | None) -> tuple[str, bool]:
    """The dtype of the floats, and whether nobody says it."""
    if dtype is not None:
        return dtype, False
    sources = (config.text, config.values)
    named = next((s[key] for s in sources for key in ("dtype", "torch_dtype") if s.get(key)), None)
    if named is None:
        return "bfloat16", True
    name = str(named).removeprefix("torch.")
    if name not in FLOATS:
        raise UserError(f"model: {config.file}: dtype is {named!r}; a forecast can be made for {', '.join(FLOATS)}")
    return name, False


def _quantisation(config: ModelConfig) -> dict[str, Any] | None:
    values = config.values.get("quantization")
    if isinstance(values, dict):
        return values
    foreign = config.values.get("quantization_config") or config.text.get("quantization_config")
    if foreign is None:
        return None
    method = foreign.get("quant_method") if isinstance(foreign, dict) else foreign
    raise UserError(
        f"model: {config.file} is quantised by {method!r}, and does not say which weights are; a forecast can be made "
        "for `quantization` as mlx-lm's converter writes it"
    )
