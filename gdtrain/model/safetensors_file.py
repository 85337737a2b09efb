"""safetensors files tensor by tensor: read one, or write a file of which most are copied byte for byte.

MLX writes whole files from memory and knows fewer dtypes. The format: 8 bytes that say how long the header is, the
header (JSON: dtype, shape and place of every tensor), and the bytes (https://huggingface.co/docs/safetensors).
"""

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx
import numpy as np

from gdtrain.errors import UserError

# Those that MLX has; tensors of others can be copied only.
DTYPES = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "U64": mx.uint64,
    "I64": mx.int64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCK = 16 << 20


@dataclass(frozen=True)
class Stored:
    """One tensor in a file. dtype: as safetensors calls it. begin: offset of its bytes in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


@dataclass(frozen=True)
class Written:
    """One tensor of a file to be written: copied from where it is stored, or made when its turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    source: Stored | Callable[[], mx.array]


def read_header(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of a file, in the order of their bytes, and its metadata.

    Raises:
        UserError: the file cannot be read or is not a safetensors file.
    """
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
        metadata = header.pop("__metadata__", {})
        begin = 8 + length
        tensors = {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            tensors[name] = Stored(file, entry["dtype"], tuple(entry["shape"]), begin + first, last - first)
        end = max((x.begin + x.size for x in tensors.values()), default=begin)
        if end > file.stat().st_size:
            raise ValueError("it is cut off")
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not a safetensors file: {error}") from error
    return tensors, metadata


def read_tensor(stored: Stored) -> mx.array:
    """Raises UserError for a dtype that MLX does not have."""
    if stored.dtype not in DTYPES:
        raise UserError(f"{stored.file}: MLX has no dtype {stored.dtype}; accepted: {', '.join(DTYPES)}")
    with stored.file.open("rb") as stream:
        stream.seek(stored.begin)
        raw = np.fromfile(stream, np.uint8, stored.size)
    return mx.array(raw).view(DTYPES[stored.dtype]).reshape(stored.shape)


def copied(name: str, stored: Stored) -> Written:
    return Written(name, stored.dtype, stored.shape, stored.size, stored)


def made(name: str, dtype: mx.Dtype, shape: tuple[int, ...], make: Callable[[], mx.array]) -> Written:
    return Written(name, NAMES[dtype], shape, math.prod(shape) * dtype.size, make)


def write_tensors(
    file: Path, tensors: Sequence[Written], metadata: dict[str, str], progress: Callable[[int], None]
) -> None:
    """Write one file, holding one tensor at a time. progress: is told bytes as they are written.

    Raises:
        OSError: the disk is full, say.
    """
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.size],
        }
        at += tensor.size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the bytes of the tensors begin at a multiple of 8
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            if isinstance(tensor.source, Stored):
                _copy(tensor.source, stream)
            else:
                x = tensor.source()
                if x.shape != tensor.shape or NAMES[x.dtype] != tensor.dtype:
                    raise AssertionError(f"{tensor.name}: {x.shape} {x.dtype}, planned {tensor.shape} {tensor.dtype}")
                stream.write(np.array(x.reshape(-1).view(mx.uint8)).data)
            progress(tensor.size)


def _copy(stored: Stored, target: BinaryIO) -> None:
    with stored.file.open("rb") as stream:
        stream.seek(stored.begin)
        left = stored.size
        while left:
            block = stream.read(min(left, _BLOCK))
            if not block:
                raise UserError(f"{stored.file} is cut off")
            target.write(block)
            left -= len(block)
