"""The tensors of a GGUF file under the model's parameter names; the converter's changes are undone as they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..runtime.encodings import FLOAT32, EncodedArray, Encoding
from ..runtime.errors import UserError
from .gguf_file import GGUFFile, GGUFTensor
from .gguf_models import Architecture, Heads, Rows, architecture

_NOT_PARAMETERS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A `LazyTensor` stored as the model has it, but for the order of its rows."""

    name: str
    file: GGUFFile
    stored: GGUFTensor
    order: Rows | None = None
    """The stored row of each row; None: all of them as they are."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape if self.order is None else (len(self.order), *self.stored.shape[1:])

    @property
    def encoding(self) -> Encoding:
        return self.stored.type.encoding

    @property
    def format(self) -> str:
        return self.stored.type.name

    def read(self, start: int = 0, stop: int | None = None) -> EncodedArray:
        """Rows (of a vector: elements) `start:stop` with the file's own codes."""
        wanted = slice(start, stop) if self.order is None else self.order[start:stop]
        rows = self.file.rows(self.stored)
        if len(self.stored.shape) == 1:
            whole = self.stored.type.decode_rows(rows)
            return EncodedArray(whole.encoding, whole.data[0, wanted])
        return self.stored.type.decode_rows(rows[wanted])


@dataclass(frozen=True)
class RowTensor:
    """A vector that the file has as one row of a matrix of floats."""

    name: str
    matrix: StoredTensor
    row: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape[1:]

    @property
    def encoding(self) -> Encoding:
        return self.matrix.encoding

    @property
    def format(self) -> str:
        return self.matrix.format

    def read(self, start: int = 0, stop: int | None = None) -> EncodedArray:
        """Elements `start:stop`."""
        return EncodedArray(self.encoding, self.matrix.read(self.row, self.row + 1).data[0, start:stop])


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


Tensor = StoredTensor | RowTensor | OffsetTensor | TransposedTensor


class GGUFSource:
    """A `TensorSource` over a GGUF file. `config` is the model's Hugging Face config, for its head counts."""

    def __init__(self, file: GGUFFile, config: object) -> None:
        self._path = file.path
        self._tensors: dict[str, Tensor] = {}
        kind, heads = architecture(file), Heads.of(config)
        for stored in file.tensors.values():
            name = kind.place(stored.name)
            if name is not None:
                self._tensors |= {view.name: view for view in _views(kind, heads, name, file, stored)}
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


def _views(kind: Architecture, heads: Heads, name: str, file: GGUFFile, stored: GGUFTensor) -> Iterator[Tensor]:
    """The model's tensors in a tensor of the file."""
    stem, suffix = name.rsplit(".", 1)
    path, _, module = stem.rpartition(".")
    is_affine = stored.type.encoding.kind == "affine"
    if is_affine and (len(stored.shape) == 1 or module == kind.by_head):
        raise UserError(f"{file.path.name}: {stored.name} is quantized, expected floats; convert it again.")
    if module == kind.by_head:
        matrix = StoredTensor(name, file, stored)
        yield from (RowTensor(f"{path}.{module}.{row}.{suffix}", matrix, row) for row in range(stored.shape[0]))
    elif kind.parts and stored.name.split(".")[-2] == "attn_qkv":
        for part, order in zip(kind.parts, heads.parts(stored.shape[0]), strict=True):
            yield StoredTensor(f"{path}.{part}.{suffix}", file, stored, order)
    else:
        yield _view(kind, heads, name, file, stored)


def _view(kind: Architecture, heads: Heads, name: str, file: GGUFFile, stored: GGUFTensor) -> Tensor:
    module, suffix = name.split(".")[-2:]
    order = None
    if module in kind.order:
        rows = stored.shape[0]
        with np.errstate(divide="ignore"):
            order = kind.order[module](heads, rows)
        if not np.array_equal(np.sort(order), np.arange(rows)):
            raise UserError(
                f"{file.path.name}: {stored.name} has {rows} rows, which {heads.query} and {heads.key} heads do not "
                "share evenly; convert the model again."
            )
    tensor = StoredTensor(name, file, stored, order)
    if kind.norm_offset and module.endswith("norm") and suffix == "weight":
        return OffsetTensor(name, tensor)
    if module in kind.transposed and suffix == "weight":
        return TransposedTensor(name, tensor)
    return tensor
