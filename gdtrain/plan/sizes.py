"""What a model consists of, from its config.json: blocks, their parameters, and the bytes they take.

Names and shapes are those of mlx-lm's qwen3_5, qwen3_5_moe and qwen3_next. Vision parts and multi-token prediction are
not loaded, and not counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from gdtrain.plan.model_config import ModelConfig
from gdtrain.plan.quantisation import Quantised, Storage


class Matrix(NamedTuple):
    """The weight of a projection: its name within the block; experts: how many of it lie in one tensor, 0 for a dense
    one; rows: how many a position takes; biases: further floats, which are never quantised; stored: how the weights are
    quantised, None where they are not."""

    name: str
    outputs: int
    inputs: int
    experts: int = 0
    rows: int = 1
    biases: int = 0
    stored: Quantised | None = None

    @property
    def weights(self) -> int:
        return max(1, self.experts) * self.outputs * self.inputs


class DeltaNet(NamedTuple):
    """Heads as in gdkernels; taps of the convolution."""

    Hk: int
    Hv: int
    Dk: int
    Dv: int
    taps: int

    @property
    def keys(self) -> int:
        return self.Hk * self.Dk

    @property
    def values(self) -> int:
        return self.Hv * self.Dv


class Attention(NamedTuple):
    """Heads, key heads, and the dimension of a head."""

    H: int
    Hkv: int
    D: int


class Experts(NamedTuple):
    """Routed experts, how many a token takes, and the widths of one and of the shared one."""

    routed: int
    chosen: int
    width: int
    shared: int


@dataclass(frozen=True)
class Block:
    """mixer: what mixes tokens; mlp: the width of a dense one, or experts. floats, exact: other parameters, in the
    model's dtype and in float32."""

    mixer: DeltaNet | Attention
    mlp: int | Experts
    matrices: tuple[Matrix, ...]
    floats: int
    exact: int

    def matrix(self, name: str) -> Matrix:
        return next(m for m in self.matrices if m.name == name)

    @property
    def parameters(self) -> int:
        return sum(m.weights + m.biases for m in self.matrices) + self.floats + self.exact


@dataclass(frozen=True)
class ModelSizes:
    """A model. prefix: of the names of its language model in mlx-lm."""

    prefix: str
    hidden: int
    vocabulary: int
    tied: bool
    blocks: tuple[Block, ...]

    @property
    def parameters(self) -> int:
        """How many, before quantisation."""
        ends = self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden
        return ends + sum(block.parameters for block in self.blocks)

    def matrices(self) -> Iterator[tuple[str, Matrix]]:
        """Every matrix with its name in mlx-lm's model."""
        yield f"{self.prefix}model.embed_tokens", Matrix("embed_tokens", self.vocabulary, self.hidden)
        if not self.tied:
            yield f"{self.prefix}lm_head", Matrix("lm_head", self.vocabulary, self.hidden)
        for i, block in enumerate(self.blocks):
            for matrix in block.matrices:
                yield f"{self.prefix}model.layers.{i}.{matrix.name}", matrix


def read_sizes(config: ModelConfig, storage: Storage) -> ModelSizes:
    """Raises UserError for a config.json that lacks a size."""
    number = config.number
    hidden = number("hidden_size")
    interval = max(1, number("full_attention_interval", 4))
    prefix = "" if config.family == "qwen3_next" else "language_model."
    blocks = tuple(
        _stored(_block(config, hidden, i, (i + 1) % interval != 0), storage, f"{prefix}model.layers.{i}.")
        for i in range(number("num_hidden_layers"))
    )
    return ModelSizes(prefix, hidden, number("vocab_size"), config.tied, blocks)


def weight_bytes(sizes: ModelSizes, storage: Storage) -> dict[str, int]:
    """Bytes of all weights by how they are stored: "4-bit affine", "bfloat16", ..."""
    found: dict[str, int] = {}

    def add(kind: str, size: int) -> None:
        if size:
            found[kind] = found.get(kind, 0) + size

    for name, matrix in sizes.matrices():
        quantised = storage.of(name, matrix.inputs)
        add(str(quantised or storage.dtype), storage.matrix_bytes(matrix.weights, quantised))
        add(storage.dtype, matrix.biases * storage.float_bytes)
    floats = sizes.hidden + sum(block.floats for block in sizes.blocks)
    add(storage.dtype, floats * storage.float_bytes)
    add("float32", 4 * sum(block.exact for block in sizes.blocks))
    return found


def _stored(block: Block, storage: Storage, prefix: str) -> Block:
    """The block with its matrices as the checkpoint has them."""
    return replace(
        block, matrices=tuple(m._replace(stored=storage.of(prefix + m.name, m.inputs)) for m in block.matrices)
    )


def _block(config: ModelConfig, hidden: int, i: int, linear: bool) -> Block:
    mixer, mixing, floats, exact = (_delta_net if linear else _attention)(config, hidden)
    mlp, projections = _mlp(config, hidden, i)
    return Block(mixer, mlp, (*mixing, *projections), floats + 2 * hidden, exact)


def _delta_net(config: ModelConfig, hidden: int) -> tuple[DeltaNet, list[Matrix], int, int]:
    """The layer, its matrices, other floats, and those that are always float32."""
    number = config.number
    net = DeltaNet(
        Hk=number("linear_num_key_heads"),
        Hv=number("linear_num_value_heads"),
        Dk=number("linear_key_head_dim"),
        Dv=number("linear_value_head_dim"),
        taps=number("linear_conv_kernel_dim", 4),
    )
    qkv = 2 * net.keys + net.values
    if config.family == "qwen3_next":
        inputs = {"in_proj_qkvz": qkv + net.values, "in_proj_ba": 2 * net.Hv}
    else:
        inputs = {"in_proj_qkv": qkv, "in_proj_z": net.values, "in_proj_b": net.Hv, "in_proj_a": net.Hv}
    matrices = [Matrix(f"linear_attn.{name}", outputs, hidden) for name, outputs in inputs.items()]
    matrices.append(Matrix("linear_attn.out_proj", hidden, net.values))
    # The convolution, dt_bias, and the norm of the output; A_log is float32.
    return net, matrices, qkv * net.taps + net.Hv + net.Dv, net.Hv


def _attention(config: ModelConfig, hidden: int) -> tuple[Attention, list[Matrix], int, int]:
    heads = config.number("num_attention_heads")
    dim = config.number("head_dim", hidden // max(1, heads))
    layer = Attention(heads, config.number("num_key_value_heads"), dim)
    bias = config.flag("attention_bias")
    # The query projection has the gate in it.
    sizes = {
        "q_proj": (2 * layer.H * dim, hidden),
        "k_proj": (layer.Hkv * dim, hidden),
        "v_proj": (layer.Hkv * dim, hidden),
        "o_proj": (hidden, layer.H * dim),
    }
    matrices = [Matrix(f"self_attn.{name}", *size, biases=size[0] if bias else 0) for name, size in sizes.items()]
    return layer, matrices, 2 * dim, 0


def _mlp(config: ModelConfig, hidden: int, i: int) -> tuple[int | Experts, list[Matrix]]:
    number = config.number
    count = number("num_experts", 0)
    if config.family == "qwen3_next":
        dense = config.text.get("mlp_only_layers") or []
        sparse = count > 0 and i not in dense and (i + 1) % max(1, number("decoder_sparse_step", 1)) == 0
    else:
        sparse = count > 0
    if not sparse:
        width = number("intermediate_size")
        return width, _gated("mlp", hidden, width)
    experts = Experts(
        count,
        number("num_experts_per_tok"),
        number("moe_intermediate_size"),
        number("shared_expert_intermediate_size"),
    )
    routers = [Matrix("mlp.gate", count, hidden), Matrix("mlp.shared_expert_gate", 1, hidden)]
    routed = _gated("mlp.switch_mlp", hidden, experts.width, count, experts.chosen)
    return experts, [*routers, *routed, *_gated("mlp.shared_expert", hidden, experts.shared)]


def _gated(name: str, hidden: int, width: int, experts: int = 0, rows: int = 1) -> list[Matrix]:
    return [
        Matrix(f"{name}.gate_proj", width, hidden, experts, rows),
        Matrix(f"{name}.up_proj", width, hidden, experts, rows),
        Matrix(f"{name}.down_proj", hidden, width, experts, rows),
    ]
