"""Safetensors checkpoints, one file or sharded: headers are read and checked at once, tensors when asked for.

file := length:u64 header:json data         header entry := {"dtype", "shape", "data_offsets": [begin, end]}
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..runtime.decode import decode_json
from ..runtime.encodings import BFLOAT16, FLOAT16, FLOAT32, EncodedArray, Encoding
from ..runtime.errors import UserError, shown
from .float8 import BLOCK, FORMATS, SCALES, Float8Tensor
from .packed import PackedTensor, packed_tensors

INDEX = "model.safetensors.index.json"
MAX_NAME = 512
"""Longest name of a tensor."""
_MAX_HEADER = 100_000_000
_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
"""Bytes of each dtype that a file may hold."""
_FLOATS: dict[str, tuple[Encoding, str]] = {
    "F32": (FLOAT32, "<f4"),
    "F16": (FLOAT16, "<f2"),
    "BF16": (BFLOAT16, "<u2"),
    "F64": (FLOAT32, "<f8"),
}
_INTEGERS = {
    "I8": "<i1",
    "U8": "<u1",
    "I16": "<i2",
    "U16": "<u2",
    "I32": "<i4",
    "U32": "<u4",
    "I64": "<i8",
    "U64": "<u8",
}


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class SafetensorsFile:
    """An open file: where each tensor's bytes are."""

    path: Path
    start: int
    """First byte after the header."""
    entries: Mapping[str, _Entry]


@dataclass(frozen=True)
class FileTensor:
    """A `LazyTensor` in a safetensors file. float64 is read as float32."""

    name: str
    file: SafetensorsFile
    entry: _Entry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def encoding(self) -> Encoding:
        return self._stored[0]

    @property
    def format(self) -> str:
        return self.entry.dtype

    @property
    def _stored(self) -> tuple[Encoding, str]:
        if self.entry.dtype not in _FLOATS:
            raise UserError(
                f"Tensor {self.name} in {self.file.path.name} is {self.entry.dtype}; weights must be "
                f"{', '.join(_FLOATS)}: dequantize the checkpoint first."
            )
        return _FLOATS[self.entry.dtype]

    def read(self, start: int = 0, stop: int | None = None) -> EncodedArray:
        """Rows `start:stop` of the first axis."""
        encoding, dtype = self._stored
        data = self._read(dtype, start, stop)
        return EncodedArray(encoding, data.astype("<f4") if dtype == "<f8" else data)

    def read_raw(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Rows `start:stop` of a tensor whose numbers are one byte each."""
        return self._read("<u1", start, stop)

    def integers(self) -> npt.NDArray[Any]:
        """All numbers of a tensor of integers, mapped: only what is looked at is read. Raises UserError for others."""
        if self.entry.dtype not in _INTEGERS or 0 in self.shape:
            raise UserError(f"expected integers in {self.name}, found {self.entry.dtype} {list(self.shape)}")
        offset = self.file.start + self.entry.data_offsets[0]
        return np.memmap(self.file.path, _INTEGERS[self.entry.dtype], "r", offset, self.shape)

    def _read(self, dtype: str, start: int, stop: int | None) -> npt.NDArray[Any]:
        first, last, _ = slice(start, stop).indices(self.shape[0] if self.shape else 1)
        row = math.prod(self.shape[1:])
        offset = self.file.start + self.entry.data_offsets[0] + first * row * np.dtype(dtype).itemsize
        # Read and not mapped, so that memory holds no more than what is asked for.
        data = np.fromfile(self.file.path, dtype, max(0, last - first) * row, offset=offset)
        return data.reshape(-1, *self.shape[1:]) if self.shape else data.reshape(())


def read_safetensors(path: Path) -> SafetensorsFile:
    """Open a file and check its header. Raises UserError where it is damaged."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else _MAX_HEADER + 1
            if length > min(_MAX_HEADER, size - 8):
                raise UserError(
                    f"{path.name} is no whole safetensors file: its header should be {length} bytes long, "
                    f"the file has {size}; download it again."
                )
            raw = decode_json(file.read(length), dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            entries = {name: decode_json(bytes(entry), _Entry) for name, entry in raw.items()}
    except ValueError as error:
        raise UserError(f"{path.name} has a damaged safetensors header ({error}); download it again.") from None
    except OSError as error:
        raise UserError(f"{path.name} cannot be read: {error.strerror}.") from None
    for name, entry in entries.items():
        _check_entry(path, name, entry, size - 8 - length)
    return SafetensorsFile(path, 8 + length, entries)


def _check_entry(path: Path, name: str, entry: _Entry, available: int) -> None:
    begin, end = entry.data_offsets
    if not name.isprintable() or len(name) > MAX_NAME:
        raise UserError(f"{path.name} is damaged: a tensor has the name {shown(name)}; download it again.")
    if entry.dtype not in _SIZES or any(dim < 0 for dim in entry.shape):
        raise UserError(f"{path.name}: tensor {name} has dtype {shown(entry.dtype)} and shape {list(entry.shape)}.")
    if not 0 <= begin <= end <= available:
        raise UserError(
            f"{path.name} is truncated or damaged: tensor {name} is at bytes {begin} to {end} of {available}; "
            "download it again."
        )
    if math.prod(entry.shape) * _SIZES[entry.dtype] != end - begin:
        raise UserError(
            f"{path.name} is damaged: tensor {name} {list(entry.shape)} does not fill its {end - begin} bytes."
        )


@dataclass(frozen=True)
class Quantized:
    """What a configuration says of how weights are stored that their tensors don't."""

    block: tuple[int, int] = BLOCK
    """Rows and columns that share a scale of 8-bit floats."""
    zero_offset: int = 1
    """What GPTQ's zeros lack."""
    keeps_float8: bool = False
    """Whether 8-bit floats may stay so."""


class Checkpoint:
    """A `TensorSource` over the safetensors files of a directory.

    `rename` gives the model's name of a tensor. `prefix` is what the decoder's parameters begin with in the model,
    `model.` say. A checkpoint of the bare decoder lacks it; its tensors are then listed with it. Tensors that a
    quantized weight consists of are listed as that weight; `quantized` says what they themselves don't.
    """

    def __init__(
        self,
        directory: Path,
        prefix: str = "",
        rename: Callable[[str], str] = str,
        quantized: Quantized | None = None,
    ) -> None:
        self.files = tuple(read_safetensors(path) for path in weight_files(directory))
        self._name = directory.name
        stored = {name: FileTensor(name, file, entry) for file in self.files for name, entry in file.entries.items()}
        _check_index(directory, stored)
        stored = {rename(name): tensor for name, tensor in stored.items()}
        if prefix and not any(name.startswith(prefix) for name in stored):
            stored = {name if name.startswith("lm_head.") else prefix + name: tensor for name, tensor in stored.items()}
        self._files = stored
        known = quantized or Quantized()
        packed, parts = packed_tensors(stored, known.zero_offset)
        self._tensors: dict[str, FileTensor | Float8Tensor | PackedTensor] = {
            name: _with_scales(name, tensor, stored, known) for name, tensor in stored.items() if name not in parts
        }
        self._tensors |= packed

    def __getitem__(self, name: str) -> FileTensor | Float8Tensor | PackedTensor:
        if name not in self._tensors:
            raise UserError(f"The checkpoint {self._name} lacks the tensor {name}; download it again.")
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @property
    def main_encoding(self) -> Encoding:
        """The float format that most of the weights have."""
        sizes: Counter[Encoding] = Counter()
        for tensor in self._files.values():
            if tensor.entry.dtype in _FLOATS:
                sizes[tensor.encoding] += math.prod(tensor.shape)
        return sizes.most_common(1)[0][0] if sizes else FLOAT32


def _with_scales(
    name: str, tensor: FileTensor, stored: Mapping[str, FileTensor], quantized: Quantized
) -> FileTensor | Float8Tensor:
    """A tensor of 8-bit floats together with its scales, if the checkpoint has them; else the tensor as it is."""
    if tensor.format not in FORMATS:
        return tensor
    scales = (stored[name + suffix] for suffix in SCALES if name + suffix in stored)
    found = next(scales, None)
    return tensor if found is None else Float8Tensor(tensor, found, quantized.block, quantized.keeps_float8)


def float8_notes(checkpoint: Checkpoint) -> Iterator[str]:
    """What a user should know of weights in 8-bit floats."""
    found = (checkpoint[name] for name in checkpoint)
    if count := sum(isinstance(tensor, Float8Tensor) and tensor.encoding == FLOAT32 for tensor in found):
        yield (
            f"{count} tensors are 8-bit floats with scales in the checkpoint; `--quant keep` stores their exact values "
            "as float32, 4 times the size: --quant int8, fp8 on GPUs, or none for --dtype, stores less"
        )


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a model. Raises UserError if there are none or one is missing."""
    if (directory / INDEX).is_file():
        names = sorted(set(_weight_map(directory).values()))
        present = {path.name for path in directory.iterdir() if path.is_file()}
        for name in names:
            if name not in present:
                raise UserError(f"{directory.name} lacks {shown(name)}, which {INDEX} names; download the model again.")
        return tuple(directory / name for name in names)
    single = directory / "model.safetensors"
    found = (single,) if single.is_file() else tuple(sorted(directory.glob("*.safetensors")))
    if len(found) == 1:
        return found
    if found:
        raise UserError(
            f"{directory.name} has {len(found)} safetensors files but no {INDEX}; download the model again."
        )
    pickled = any(directory.glob("*.bin"))
    hint = "convert its .bin files to safetensors" if pickled else "download them, or use --weights random"
    raise UserError(f"{directory.name} has no safetensors weights; {hint}.")


def _weight_map(directory: Path) -> dict[str, str]:
    class Index(msgspec.Struct):
        weight_map: dict[str, str]

    try:
        return decode_json((directory / INDEX).read_bytes(), Index).weight_map
    except ValueError as error:
        raise UserError(f"{INDEX} is damaged ({error}); download the model again.") from None


def _check_index(directory: Path, stored: Mapping[str, Any]) -> None:
    if (directory / INDEX).is_file():
        missing = next((name for name in _weight_map(directory) if name not in stored), None)
        if missing is not None:
            raise UserError(f"No shard of {directory.name} has the tensor {shown(missing)}, which {INDEX} names.")
