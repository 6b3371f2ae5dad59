"""The walk: weights rounded on a text keep a model's outputs closer than rounding alone, one stage at a time."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from unit.compiler.memory_source import Memory
from unit.passes.conftest import Decoder

from toolkit.compiler.calibration.calibrate import Method, calibrate, make_stages
from toolkit.compiler.calibration.store import CalibratedSource
from toolkit.compiler.interpret import from_source, interpret
from toolkit.compiler.ir import Graph, Param, Value
from toolkit.compiler.quantize import encode
from toolkit.compiler.shapes import TensorType
from toolkit.compiler.weights import Piece, Recipe, TensorSource
from toolkit.compiler.weights_pack import read_chunks, resolve_encodings
from toolkit.passes.quantization import Quantization, Rule
from toolkit.passes.quantize_weights import QuantizeWeights
from toolkit.runtime.encodings import FLOAT32, INT4, Q4_K, EncodedArray
from toolkit.runtime.errors import UserError

Floats = npt.NDArray[np.float32]
WINDOWS = [np.random.default_rng(seed).integers(0, 80, 32).tolist() for seed in range(12)]
HELD_OUT = np.random.default_rng(99).integers(0, 80, (4, 32)).astype(np.int32)


def weights(graph: Graph) -> Memory:
    """Random weights whose columns differ much in size, as those of trained models do."""
    rng = np.random.default_rng(1)
    arrays = {}
    for param in graph.params:
        if param.recipe.constant is None:
            shape = tuple(size for size in param.value.type.shape if isinstance(size, int))
            values = rng.standard_normal(shape) / np.sqrt(shape[-1])
            if len(shape) == 1:
                values = rng.lognormal(0, 0.7, shape)
            arrays[param.recipe.pieces[0].tensor] = EncodedArray(FLOAT32, values.astype(np.float32))
    return Memory(arrays)


def chosen(graph: Graph, *rules: Rule) -> Graph:
    quantization = Quantization(rules) if rules else Quantization.parse("int4")
    return QuantizeWeights(quantization)(graph)


def outputs(graph: Graph, source: TensorSource) -> Floats:
    """Logits on texts that calibration has not seen, by the weights as a plan would store them."""
    resolved = resolve_encodings(graph, source)

    def stored(param: Param) -> Floats:
        return np.concatenate([chunk.decode() for chunk in read_chunks(param, source)])

    every = np.arange(HELD_OUT.shape[1], dtype=np.int32)
    steps = [{"tokens": text, "positions": every, "rows": every} for text in HELD_OUT]
    return np.concatenate([logits for step in steps for logits in interpret(resolved, step, stored).values()])


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen": {"bias": True, "qk_norm": "head", "tied": False},
    "gpt2": {"rope": False, "gated": False, "bias": True},
    "olmo2": {"post_norm": True, "qk_norm": "full", "layers": 1},  # norms of random layers enlarge any error
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", ["awq", "gptq", "awq+gptq"])
def test_outputs_are_closer_than_by_rounding_alone(variant: str, method: Method, tmp_path: Path) -> None:
    captured = Decoder(**VARIANTS[variant]).graph()
    graph, source = chosen(captured), weights(captured)
    exact = outputs(captured, source)
    plain = float(np.square(outputs(graph, source) - exact).mean())
    found, notes = calibrate(graph, source, WINDOWS, method=method, folder=tmp_path)
    assert float(np.square(outputs(graph, found) - exact).mean()) < plain
    assert f"weights calibrated on 384 tokens by {method}" in notes[0]
    for param in graph.params:
        tensor = param.recipe.pieces[0].tensor if param.recipe.pieces else ""
        if param.recipe.encoding == INT4:
            assert found[tensor].encoding == INT4  # packing keeps the codes


def test_what_can_not_be_scaled_is_reported(tmp_path: Path) -> None:
    captured = Decoder(**VARIANTS["olmo2"]).graph()
    _, notes = calibrate(chosen(captured), weights(captured), WINDOWS, method="awq", folder=tmp_path)
    assert notes[1:] == ("the inputs of layers.0.attn.q and 1 more are not scaled: what makes them can't be divided",)


def test_scales_go_into_weights_that_are_not_rounded(tmp_path: Path) -> None:
    """Down and o are rounded; up and v, which take their scales, stay floats or keep their codes."""
    captured = Decoder(layers=1).graph()
    graph = chosen(captured, Rule("int8", match="down|attn.o"), Rule("keep"))
    source = weights(captured)
    values = np.random.default_rng(2).standard_normal((32, 64)).astype(np.float32)
    source.arrays["layers.0.attn.v.weight"] = encode(values, INT4)
    exact = outputs(captured, source)
    found, notes = calibrate(graph, source, WINDOWS, method="awq", folder=tmp_path)
    assert len(notes) == 1
    # A scale that only one side took would be off by far more than 8 bits are.
    assert np.square(outputs(graph, found) - exact).mean() < 1e-4 * np.square(exact).mean()
    after, before = found["layers.0.attn.v.weight"].read(), source["layers.0.attn.v.weight"].read()
    np.testing.assert_array_equal(after.data, before.data)
    assert not np.array_equal(after.decode(), before.decode())
    assert found["layers.0.mlp.up.weight"].encoding == FLOAT32


def test_stages_hold_every_op_once_and_end_before_their_layers() -> None:
    graph = Decoder().graph()
    names = {op.inputs[1].name for op in graph.ops if op.kind == "linear" and op.inputs[1].name != "embed.weight"}
    stages = make_stages(graph, names)
    assert [len(stage.layers) for stage in stages] == [3, 1, 2, 1] * 2
    walked = [op for stage in stages for op in stage.ops]
    assert walked == list(graph.ops[: len(walked)])
    done: set[str] = set()
    for stage in stages:
        done |= {value.name for op in stage.ops for value in op.outputs}
        for op in stage.layers:
            assert op.inputs[0].name in done
            assert op.output.name not in done


def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    peaks = []
    for layers in (2, 8):
        captured = Decoder(layers=layers).graph()
        graph, source = chosen(captured), weights(captured)
        folder = tmp_path / str(layers)
        folder.mkdir()
        tracemalloc.start()
        calibrate(graph, source, WINDOWS[:2], method="awq+gptq", folder=folder)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_nothing_to_round_is_refused(tmp_path: Path) -> None:
    captured = Decoder().graph()
    with pytest.raises(UserError, match="choose an integer encoding such as --quant int4"):
        calibrate(chosen(captured, Rule("bf16")), weights(captured), WINDOWS, method="awq", folder=tmp_path)


# --- the store --------------------------------------------------------------------------------------------------------


def param(shape: tuple[int, ...], piece: Piece) -> Param:
    return Param(Value("w", TensorType("float32", shape)), Recipe((piece,)))


def test_spooled_rows_come_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((40, 64)).astype(np.float32)
    factors = rng.integers(1, 64, (40, 8)).astype(np.int8)
    halves = rng.standard_normal((2, 40, 1)).astype(np.float16)
    codes = rng.integers(0, 16, (40, 256)).astype(np.uint8)
    blocks = EncodedArray(Q4_K, codes, halves[0], halves[1], factors, factors.view(np.uint8))
    for stored in (EncodedArray(FLOAT32, values), encode(values, INT4), blocks):
        source = CalibratedSource(Memory({"w": EncodedArray(FLOAT32, values)}), tmp_path)
        chunks = [stored.rows(0, 16), stored.rows(16, 40)]
        source.put(param(stored.shape, Piece("w")), stored.encoding, chunks)
        np.testing.assert_array_equal(source["w"].read().decode(), stored.decode())
        np.testing.assert_array_equal(source["w"].read(13, 29).decode(), stored.rows(13, 29).decode())


def test_a_second_version_replaces_the_first_and_nothing_else(tmp_path: Path) -> None:
    arrays = {name: EncodedArray(FLOAT32, np.full((4, 32), number, np.float32)) for number, name in enumerate("abc")}
    source = CalibratedSource(Memory(arrays), tmp_path)
    for name, value in (("a", 5.0), ("a", 6.0), ("b", 7.0)):
        source.put(param((4, 32), Piece(name)), FLOAT32, [EncodedArray(FLOAT32, np.full((4, 32), value, np.float32))])
    assert [float(source[name].read().decode()[0, 0]) for name in "abc"] == [6.0, 7.0, 2.0]


def test_a_matrix_that_is_stored_turned_keeps_its_codes(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((48, 64)).astype(np.float32)
    source = CalibratedSource(Memory({"w": EncodedArray(FLOAT32, np.ascontiguousarray(values.T))}), tmp_path)
    item = param((48, 64), Piece("w", transpose=True))
    made = encode(values, INT4)
    source.put(item, INT4, [made])
    assert source["w"].shape == (64, 48)
    graph = Graph((), (Param(item.value, Recipe(item.recipe.pieces, INT4)),), (), ())
    (resolved,) = resolve_encodings(graph, source).params
    (chunk,) = read_chunks(resolved, source)
    np.testing.assert_array_equal(chunk.data, made.data)
    np.testing.assert_array_equal(from_source(source)(item), made.decode())
