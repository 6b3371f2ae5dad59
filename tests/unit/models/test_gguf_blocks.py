"""Block types against the gguf package's dequantizer: equal to the last bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from toolkit.kernels_templates.packing import pack, unpack
from toolkit.models.gguf_blocks import BLOCKS, BlockType
from toolkit.models.gguf_file import read_gguf

QUANTIZED = {number: block for number, block in BLOCKS.items() if block.unpack}


def random_rows(block: BlockType, rows: int, columns: int, seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (rows, columns // block.size * block.bytes), dtype=np.uint8)


@pytest.mark.parametrize("number", QUANTIZED, ids=lambda number: BLOCKS[number].name)
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (7, 768)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes hold infinite scales too
def test_random_blocks_decode_to_the_same_bits(number: int, rows: int, columns: int) -> None:
    stored = random_rows(BLOCKS[number], rows, columns, seed=number)
    expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType(number))
    found = BLOCKS[number].decode_rows(stored).decode()
    assert found.shape == (rows, columns)
    finite = np.isfinite(expected)
    assert finite.mean() > 0.5
    np.testing.assert_array_equal(found[finite].view(np.uint32), expected[finite].view(np.uint32))
    np.testing.assert_array_equal(np.isfinite(found), finite)


@pytest.mark.parametrize("number", QUANTIZED, ids=lambda number: BLOCKS[number].name)
def test_codes_and_scales_have_the_shapes_that_the_encoding_says(number: int) -> None:
    block = BLOCKS[number]
    array = block.decode_rows(random_rows(block, 3, 512, seed=1))
    assert array.scale is not None
    assert array.data.shape == (3, 512)
    assert array.data.dtype == (np.int8 if block.encoding.bits == 8 else np.uint8)
    assert array.scale.shape == (3, 512 // block.encoding.unit)
    assert array.scale.dtype == np.dtype(block.encoding.scale)
    assert (array.minimum is not None) == block.encoding.has_minimum
    assert (array.factors is not None) == (block.encoding.block > 0)
    assert (array.minimum_factors is not None) == (block.encoding.block > 0 and block.encoding.has_minimum)
    for factors, kind in ((array.factors, np.int8), (array.minimum_factors, np.uint8)):
        assert factors is None or factors.shape == (3, 512 // block.encoding.group)
        assert factors is None or factors.dtype == np.dtype(kind)
    if block.encoding.bits < 8:
        assert int(array.data.max()) < 2**block.encoding.bits


@pytest.mark.parametrize("number", QUANTIZED, ids=lambda number: BLOCKS[number].name)
def test_the_kernels_layout_holds_every_type(number: int) -> None:
    block = BLOCKS[number]
    array = block.decode_rows(random_rows(block, 19, 512, seed=2))
    back = unpack("panel16", block.encoding, array.shape, pack("panel16", array))
    for name in ("data", "scale", "minimum", "factors", "minimum_factors"):
        np.testing.assert_array_equal(getattr(array, name), getattr(back, name))


def test_sizes_are_those_of_the_gguf_package() -> None:
    sizes = {kind.value: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {number: (block.size, block.bytes) for number, block in BLOCKS.items()} == {
        number: sizes[number] for number in BLOCKS
    }


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_real_files_decode_to_the_same_bits(model: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(model)
    file = read_gguf(path)
    seen = set()
    for stored in file.tensors.values():
        if stored.type.name in seen or stored.type.name == "F32":
            continue
        seen.add(stored.type.name)
        rows = file.rows(stored)[:64]
        number = next(number for number, block in BLOCKS.items() if block is stored.type)
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(number))
        np.testing.assert_array_equal(stored.type.decode_rows(rows).decode(), expected)
    assert seen == {"smollm2": {"Q4_1", "Q8_0"}, "gemma3": {"Q5_0", "Q4_K", "Q6_K", "Q8_0"}}[model]
