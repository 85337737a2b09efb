"""The tensors that a fused checkpoint has in other form than its base, each made when its turn to be written comes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import mlx.core as mx

from gdtrain.arrays import scalar
from gdtrain.model.merge import Merge
from gdtrain.model.quantised import PARTS, Packing, dense_shape
from gdtrain.model.safetensors_file import DTYPES, Stored, Written, made, read_tensor
from gdtrain.model.source_names import Place

# What the adapter changes in one stored tensor: fused experts hold two parameters.
Target = list[tuple[Merge, Place]]


@dataclass
class Losses:
    """What storing costs, by tensor, in relative L2 of the exact merged weight."""

    rounding: dict[str, float] = field(default_factory=dict)
    change: dict[str, float] = field(default_factory=dict)
    _sums: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, before: mx.array, exact: mx.array, stored: mx.array) -> None:
        """One matrix of a tensor, all float32."""
        new = [scalar(mx.sum(mx.square(x))) for x in (exact, stored - exact, exact - before)]
        sums = self._sums[name] = [a + b for a, b in zip(self._sums.get(name, [0.0] * 3), new, strict=True)]
        size = max(sums[0], 1e-45) ** 0.5
        self.rounding[name], self.change[name] = sums[1] ** 0.5 / size, sums[2] ** 0.5 / size

    def total(self) -> tuple[float, float]:
        """Of rounding and of the adapter's change, over all tensors together."""
        exact, rounding, change = (sum(sums[i] for sums in self._sums.values()) for i in range(3))
        size = max(exact, 1e-45) ** 0.5
        return rounding**0.5 / size, change**0.5 / size


def merged(name: str, stored: Stored, target: Target, losses: Losses) -> Written:
    def make() -> mx.array:
        whole, slices = read_tensor(stored), []
        for expert, before in _matrices(whole, target):
            exact = _apply(target, before, expert)
            after = exact.astype(whole.dtype)
            losses.add(name, before.astype(mx.float32), exact, after.astype(mx.float32))
            slices.append(after)
        return slices[0] if len(slices) == 1 and slices[0].shape == whole.shape else mx.stack(slices)

    return Written(name, stored.dtype, stored.shape, stored.size, make)


def unpacked(
    stem: str,
    packing: Packing,
    target: Target,
    tensors: Mapping[str, Stored],
    losses: Losses,
) -> dict[str, list[Written]]:
    """A dense weight in the place of the packed one, adapted or not, and nothing in those of its scales."""
    name, shape, dtype = f"{stem}.weight", dense_shape(stem, packing, tensors), _dense_dtype(stem, tensors)

    def make() -> mx.array:
        parts, slices = _parts(stem, tensors), []
        for expert, matrix in _split(parts):
            before = packing.unpack(matrix)
            exact = _apply(target, before, expert)
            after = exact.astype(dtype)
            if target:
                losses.add(name, before, exact, after.astype(mx.float32))
            mx.eval(after)
            slices.append(after)
        return slices[0].reshape(shape) if len(slices) == 1 else mx.stack(slices)

    dropped: dict[str, list[Written]] = {f"{stem}.{part}": [] for part in PARTS if f"{stem}.{part}" in tensors}
    return dropped | {name: [made(name, dtype, shape, make)]}


def packed_again(
    stem: str, packing: Packing, target: Target, tensors: Mapping[str, Stored], losses: Losses
) -> dict[str, list[Written]]:
    """The same parts with other contents. They are made together, and each is kept until its turn comes: they may even
    lie in two files."""
    names = {part: f"{stem}.{part}" for part in PARTS if f"{stem}.{part}" in tensors}
    ready: dict[str, mx.array] = {}

    def make(part: str) -> mx.array:
        if part not in ready:
            ready.update(together())
        return ready.pop(part)

    def together() -> dict[str, mx.array]:
        parts, slices = _parts(stem, tensors), []
        for expert, matrix in _split(parts):
            before = packing.unpack(matrix)
            exact = _apply(target, before, expert)
            after = packing.pack(exact, matrix)
            losses.add(names["weight"], before, exact, packing.unpack(after))
            slices.append(after)
        if len(slices) == 1:
            return {part: slices[0][part].reshape(x.shape) for part, x in parts.items()}
        return {part: mx.stack([matrix[part] for matrix in slices]) for part in parts}

    return {
        name: [Written(name, tensors[name].dtype, tensors[name].shape, tensors[name].size, lambda p=part: make(p))]  # type: ignore[misc]
        for part, name in names.items()
    }


def _matrices(whole: mx.array, target: Target) -> Iterator[tuple[int, mx.array]]:
    """A tensor expert by expert, or as a whole: experts of a large model are gigabytes."""
    merge, place = target[0]
    if merge.experts is None or place.expert is not None:
        yield place.expert or 0, whole
    else:
        yield from enumerate(whole)


def _split(parts: dict[str, mx.array]) -> Iterator[tuple[int, dict[str, mx.array]]]:
    """The parts of a packed weight, matrix by matrix."""
    if parts["weight"].ndim == 2:
        yield 0, parts
    else:
        for i in range(parts["weight"].shape[0]):
            yield i, {part: x[i] for part, x in parts.items()}


def _parts(stem: str, tensors: Mapping[str, Stored]) -> dict[str, mx.array]:
    return {part: read_tensor(tensors[name]) for part in PARTS if (name := f"{stem}.{part}") in tensors}


def _apply(target: Target, x: mx.array, expert: int) -> mx.array:
    """All that the adapter changes in one stored matrix; float32."""
    new = x.astype(mx.float32)
    for merge, place in target:
        if place.half is None:
            new = merge.apply(x, expert)
        else:
            rows = x.shape[0] // 2
            part = slice(place.half * rows, (place.half + 1) * rows)
            new[part] = merge.apply(x[part], expert)
    return new


def _dense_dtype(stem: str, tensors: Mapping[str, Stored]) -> mx.Dtype:
    """Of the scales, where they are as wide as the weights were; else of the unquantised norms."""
    scales = DTYPES[tensors[f"{stem}.scales"].dtype]
    if mx.issubdtype(scales, mx.floating):
        return scales
    norms = (x for name, x in tensors.items() if name.endswith("layernorm.weight"))
    return DTYPES[next(norms).dtype]
