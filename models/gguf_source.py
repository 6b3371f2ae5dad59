"""The tensors of a GGUF file under the model's parameter names; the converter's changes are undone as they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..runtime.encodings import FLOAT32, EncodedArray, Encoding
from ..runtime.errors import UserError
from .gguf_file import GGUFFile, GGUFTensor
from .gguf_models import Architecture, architecture

_NOT_PARAMETERS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class StoredTensor:
    """A `LazyTensor` stored as the model has it, but for the order of its rows."""

    name: str
    file: GGUFFile
    stored: GGUFTensor
    heads: int = 0
    """If not 0, the rows of each head are interleaved: model row t * D/2 + i is stored as row 2 * i + t."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def encoding(self) -> Encoding:
        return self.stored.type.encoding

    @property
    def format(self) -> str:
        return self.stored.type.name

    def read(self, start: int = 0, stop: int | None = None) -> EncodedArray:
        """Rows (of a vector: elements) `start:stop` with the file's own codes."""
        wanted = np.arange(self.shape[0])[start:stop]
        if self.heads:
            wanted = self._interleaved(wanted)
        if len(self.shape) == 1:
            whole = self.stored.type.decode_rows(self.file.rows(self.stored))
            return EncodedArray(whole.encoding, whole.data[0, wanted])
        first = int(wanted.min(initial=self.shape[0]))
        rows = self.file.rows(self.stored, first, int(wanted.max(initial=first - 1)) + 1)
        return self.stored.type.decode_rows(rows[wanted - first] if self.heads else rows)

    def _interleaved(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        size = self.shape[0] // self.heads
        head, row = np.divmod(rows, size)
        half, index = np.divmod(row, size // 2)
        stored: npt.NDArray[np.intp] = head * size + 2 * index + half
        return stored


@dataclass(frozen=True)
class OffsetTensor:
    """A float tensor stored plus 1; read as float32."""

    name: str
    inner: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inner.shape

    @property
    def encoding(self) -> Encoding:
        return FLOAT32

    @property
    def format(self) -> str:
        return self.inner.format

    def read(self, start: int = 0, stop: int | None = None) -> EncodedArray:
        """The difference in float32 arithmetic, as the model's own implementation will add 1 back."""
        return EncodedArray(FLOAT32, self.inner.read(start, stop).decode() - np.float32(1))


@dataclass(frozen=True)
class TransposedTensor:
    """A matrix that the model has as [in, out] and the file as [out, in], which is `turned`.

    Scales belong to columns of the file, which are rows here, so a quantized matrix is read as its float32 values.
    """

    name: str
    turned: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.turned.shape[::-1]

    @property
    def format(self) -> str:
        return self.turned.format

    @property
    def encoding(self) -> Encoding:
        return FLOAT32 if self.turned.encoding.kind == "affine" else self.turned.encoding

    def read(self, start: int = 0, stop: int | None = None) -> EncodedArray:
        """Rows `start:stop`, which are columns of the file: the whole matrix is decoded each time."""
        whole = self.turned.read()
        data = whole.decode() if whole.encoding.kind == "affine" else whole.data
        return EncodedArray(self.encoding, np.ascontiguousarray(data.T[start:stop]))


def growth_notes(file: GGUFFile) -> Iterator[str]:
    """Types whose exact form takes much more room than the file's."""
    for block, count in Counter(tensor.type for tensor in file.tensors.values()).items():
        if block.grows:
            yield (
                f"{count} {block.name} tensors have {8 * block.bytes / block.size:.1f} bits a value in the file; "
                f"kept exactly, they take {block.encoding.bits}-bit codes"
            )


Tensor = StoredTensor | OffsetTensor | TransposedTensor


class GGUFSource:
    """A `TensorSource` over a GGUF file. `config` is the model's Hugging Face config, for its head counts."""

    def __init__(self, file: GGUFFile, config: object) -> None:
        self._path = file.path
        self._tensors: dict[str, Tensor] = {}
        kind = architecture(file)
        for stored in file.tensors.values():
            name = kind.place(stored.name)
            if name is not None:
                self._tensors[name] = _view(kind, config, name, file, stored)
            elif stored.name not in _NOT_PARAMETERS:
                raise UserError(
                    f"{file.path.name} has a tensor {stored.name} that has no place in a {kind.model_type} model; "
                    "compile from the Hugging Face directory instead."
                )

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise UserError(f"{self._path.name} lacks the tensor {name}; convert the model again.")
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)


def _view(kind: Architecture, config: object, name: str, file: GGUFFile, stored: GGUFTensor) -> Tensor:
    module, suffix = name.split(".")[-2:]
    if len(stored.shape) == 1 and stored.type.encoding.kind == "affine":
        raise UserError(f"{file.path.name}: the vector {stored.name} is quantized, expected floats; convert it again.")
    heads = int(getattr(config, kind.interleaved[module])) if module in kind.interleaved else 0
    tensor = StoredTensor(name, file, stored, heads)
    if kind.norm_offset and module.endswith("norm"):
        return OffsetTensor(name, tensor)
    if module in kind.transposed and suffix == "weight":
        return TransposedTensor(name, tensor)
    return tensor
