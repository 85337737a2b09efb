"""Sizes of the fused backend's stages on a machine: rows of a SIMD group, SIMD groups of a threadgroup, what is staged.

Everything that the kernel texts are told, and every limit that they keep, is computed here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from gdkernels.portable.machine import Machine, apple_generation, shared_bytes
from gdkernels.portable.program import SIMD_WIDTH

CHUNKS = (16, 32, 64)
MAX_HEAD_DIM = 256
# Multiples of which Dk and Dv must be; others are filled up with zeros.
HEAD_DIM_STEP = 16

# Live floats of a lane on Metal. A lane has 128 at most; about 110 were 3.4 times slower than staging on an M1 Ultra
# (ml-explore/mlx issue 3837).
_METAL_FLOATS = 96
# Threadgroups of a batch row that a sweep should have before it gives a threadgroup more SIMD groups. CUDA: about the
# number of multiprocessors of an H200. Metal, estimated: six for each core of an M4 Max, the fewest with which matrix
# kernels reach their speed there (philipturner/metal-flash-attention).
_SWEEP_GROUPS: dict[Machine, int] = {"cuda": 128, "metal": 240}
# Columns of dq and dk in a threadgroup of `keys`. H200, bf16, (16, 64, 192, 128), 1024 tokens: 0.22 ms with 64, 0.31
# with 32 (2026-11-30).
_BLOCK = 64
# Columns of the left factors that `pairs` and `keys` hold: three of 16, and the next three on their way.
_FETCHED = 96


def _floats(rows: int, columns: int) -> int:
    """Floats of a lane for accumulators of this size."""
    return rows * columns // SIMD_WIDTH


def _sweep_columns(Dk: int, C: int) -> int:
    return Dk + 3 * C


def _keys_columns(block: int) -> int:
    return 5 * block + _FETCHED


def fitting_chunk(machine: Machine, Dk: int, C: int) -> int:
    """C, or less where a lane's registers would not hold a sweep over chunks of C tokens (Metal, Dk above 192)."""
    while machine == "metal" and _floats(8, _sweep_columns(Dk, C)) > _METAL_FLOATS:
        C //= 2
    return C


@dataclass(frozen=True)
class Stage:
    """How one kernel is launched."""

    constants: Mapping[str, Any]
    groups: int  # SIMD groups of a threadgroup
    rows: int  # of a SIMD group
    arena: int  # threadgroup memory in floats

    @property
    def threads(self) -> int:
        return SIMD_WIDTH * self.groups


class Piece(NamedTuple):
    """A matrix in threadgroup memory; where neighbouring rows would start in the same bank they are padded."""

    rows: int
    columns: int
    dtype: mx.Dtype = mx.float32
    planes: int = 1
    padding: int = 16  # bytes; 16 keep rows aligned for copies of 16 bytes. Factors lie in tiles and need none.

    @property
    def ld(self) -> int:
        return self.columns + self.padding // self.dtype.size

    @property
    def floats(self) -> int:
        return -(-self.planes * self.rows * self.ld * self.dtype.size // 16) * 4


class Places(NamedTuple):
    """Where pieces lie, one after another: constants {NAME}_LD in elements and AT_{NAME} in floats, and their end."""

    constants: dict[str, int]
    end: int


def near(places: Places, staged: bool) -> dict[str, int]:
    """Its constants; where nothing is staged the texts still form the addresses, but of nowhere beyond the arena."""
    return {name: x if staged or name.endswith("_LD") else 0 for name, x in places.constants.items()}


def place(pieces: Mapping[str, Piece], start: int = 0) -> Places:
    constants: dict[str, int] = {}
    for name, piece in pieces.items():
        constants |= {f"AT_{name}": start, f"{name}_LD": piece.ld}
        start += piece.floats
    return Places(constants, start)


@dataclass(frozen=True)
class Plan:
    """Sizes as in the package docstring; Dk and Dv are multiples of HEAD_DIM_STEP, C is one of CHUNKS.

    A float is split into `parts` numbers for products: one float32 on Metal, bfloat16 on CUDA (see tiles.cuda.h).
    """

    machine: Machine
    parts: int
    B: int
    Hk: int
    Hv: int
    Dk: int
    Dv: int
    C: int
    dtype: mx.Dtype

    @property
    def factor(self) -> mx.Dtype:
        """dtype of a part."""
        return mx.float32 if self.machine == "metal" else mx.bfloat16

    @property
    def block(self) -> int:
        """Columns of dq and dk in a threadgroup of `keys`: a divisor of Dk."""
        blocks = [b for b in range(HEAD_DIM_STEP, _BLOCK + 1, HEAD_DIM_STEP) if self.Dk % b == 0]
        return max(b for b in blocks if self.machine == "cuda" or _floats(8, _keys_columns(b)) <= _METAL_FLOATS)

    @cached_property
    def intra(self) -> Stage:
        C = self.C
        own = {"A": Piece(C, C), "TEMPORARY": Piece(C // 2, C // 2)}
        keys = Piece(C, self.Dk, self.dtype)
        # More threadgroups hide the inverse's waiting on CUDA; on Metal a key head's value heads share q.k and k.k.
        heads = 1 if self.machine == "cuda" else self.Hv // self.Hk
        return self._by_token(2 * C, own, {"Q": keys, "K": keys}, HEADS=heads)

    @cached_property
    def pairs(self) -> Stage:
        C = self.C
        # The padding of one float lets every thread walk along a row of its own.
        own = {"SPANNED": Piece(C, C, padding=4)}
        return self._by_token(4 * C + _FETCHED, own, {"DELTA": self._factors(C, self.Dv)})

    @cached_property
    def keys(self) -> Stage:
        C, block = self.C, self.block
        rows = self._rows(_keys_columns(block))
        states = place({name: self._factors(self.Dv, block) for name in ("S", "DS")})
        # in the same place, later
        activations = place({name: Piece(C, block, self.dtype) for name in ("K", "Q")})
        end = max(states.end, activations.end)
        staged = self._room(end) > 0
        constants = {"BLOCK": block, "STAGED": staged, **near(states, staged), **near(activations, staged)}
        return self._stage(rows, C // rows, constants, end if staged else 0)

    @cached_property
    def gates(self) -> Stage:
        groups = -(-self.C // SIMD_WIDTH)
        constants = {"STAGED": False, "BLOCKS": self.Dk // self.block, "SUMS": self.keys.groups}
        return self._stage(self.keys.rows, groups, constants, 2 * self.C)

    @cached_property
    def sweep(self) -> Stage:
        """`forward` and `reverse`, over the chunks one after another."""
        return self._by_value(_sweep_columns(self.Dk, self.C), queries=True, sequential=True)

    @cached_property
    def delta(self) -> Stage:
        return self._by_value(2 * self.C, queries=False, sequential=False)

    def _by_token(self, columns: int, own: Mapping[str, Piece], read: Mapping[str, Piece], **constants: int) -> Stage:
        """One threadgroup for a chunk and key head, its SIMD groups own tokens.

        Args:
            columns: width of all accumulators of a SIMD group, for its registers.
            own: what it keeps in threadgroup memory. read: what it reads from there if it is staged.
        """
        rows = self._rows(columns)
        places = place({"DECAYS": Piece(1, self.decay_floats, padding=0), **own})
        staged_places = place(read, places.end)
        staged = self._room(staged_places.end) > 0
        constants |= {"STAGED": staged, **places.constants, **near(staged_places, staged)}
        return self._stage(rows, self.C // rows, constants, staged_places.end if staged else places.end)

    def _by_value(self, columns: int, *, queries: bool, sequential: bool) -> Stage:
        """SIMD groups own value rows; `sequential`: they walk over the chunks. `queries`: they read q and P as well."""
        C, rows = self.C, self._rows(columns)
        strips = self.Dv // rows
        groups = max(g for g in (1, 2, 4) if strips % g == 0)
        # Fewer, wider threadgroups would leave a GPU idle. Whatever B is, so that no kernel depends on it.
        while sequential and groups > 1 and self.Hv * strips // groups < _SWEEP_GROUPS[self.machine]:
            groups //= 2
        read = {
            "K": Piece(C, self.Dk, self.dtype),
            "V": Piece(C, groups * rows, self.dtype),
            "M": self._factors(C, C),
            "SCALES": Piece(1, 3 * C),
        }
        if queries:
            read |= {"Q": read["K"], "P": read["M"]}
        places = place(read)
        # Two chunks in threadgroup memory let the next one be fetched while this one is computed.
        stages = min(self._room(places.end), 2 if sequential else 1)
        constants = {"WITH_QUERIES": queries, "STAGED": stages > 0, "STAGES": max(stages, 1)}
        constants |= {"STAGE_FLOATS": places.end if stages else 0, **near(places, stages > 0)}
        return self._stage(rows, groups, constants, stages * places.end)

    def _stage(self, rows: int, groups: int, constants: Mapping[str, Any], arena: int) -> Stage:
        split = self.machine == "cuda"
        common = {
            "C": self.C,
            "DK": self.Dk,
            "DV": self.Dv,
            "Activation": self.dtype,
            "PARTS": self.parts,
            "ACTIVATION_PARTS": 1 if self.dtype == mx.bfloat16 else self.parts,
            "EXACT_PARTS": 3 if split else 1,
            "DECAY_FLOATS": self.decay_floats,
        }
        return Stage({**common, "R": rows, "GROUPS": groups, **constants}, groups, rows, arena)

    @property
    def decay_floats(self) -> int:
        """Threadgroup memory of decay.h, in floats."""
        return 3 * self.C + self.C // 8

    def _factors(self, rows: int, columns: int) -> Piece:
        return Piece(rows, columns, self.factor, self.parts, padding=0)

    def _rows(self, columns: int) -> int:
        """Rows of a SIMD group whose accumulators are `columns` wide: 16, or 8 where registers are few."""
        return 8 if self.machine == "metal" and _floats(16, columns) > _METAL_FLOATS else 16

    def _room(self, floats: int) -> int:
        """How many times `floats` fit into threadgroup memory, or 0 where device memory is better read directly.

        M1 and M2 gain by staging, M3 and later by direct reads (philipturner/metal-flash-attention, its block sizes).
        """
        if self.machine == "metal" and apple_generation() not in (13, 14):
            return 0
        return shared_bytes(self.machine) // (4 * floats)


@lru_cache(maxsize=256)
def plan(machine: Machine, exact: bool, B: int, Hk: int, Hv: int, Dk: int, Dv: int, C: int, dtype: mx.Dtype) -> Plan:
    """The plan for these sizes; `exact` asks for all of a float32 in products, where that costs more."""
    parts = 1 if machine == "metal" else 3 if exact else 2
    return Plan(machine, parts, B, Hk, Hv, Dk, Dv, C, dtype)
