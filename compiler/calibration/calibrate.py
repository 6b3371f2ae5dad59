"""Calibration: one walk through a model on a text, in which each layer's weights are rounded for what the layer reads.

The graph is executed op by op for all windows of the text. Where a value reaches linear layers whose weights are to be
rounded, the walk stops: their inputs are known, computed with the weights that are rounded already, and say how to
round these. In memory are one stage's weights and the values that later stages read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from ...runtime.encodings import FLOAT32, EncodedArray, Encoding
from ...runtime.errors import UserError
from ..interpret import evaluate_op
from ..ir import Graph, Op
from ..op_spec import Array, Packing
from ..quantize import Float32, encode
from ..weights import TensorSource
from ..weights_pack import read_chunks, resolve_encodings
from .fold import Folds, Index, Target
from .gptq import Compensation, Float64, compensation, gptq
from .scaling import candidates, losses
from .store import CalibratedSource

Method = Literal["awq", "gptq", "awq+gptq"]
SAMPLE = 256
"""Tokens on which products are compared for the report."""


@dataclass(frozen=True)
class Stage:
    """Ops up to a value that layers with weights to round read, and these layers."""

    ops: tuple[Op, ...]
    layers: tuple[Op, ...]


def calibrate(
    graph: Graph,
    source: TensorSource,
    windows: Sequence[Sequence[int]],
    *,
    method: Method,
    folder: Path,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[CalibratedSource, tuple[str, ...]]:
    """The checkpoint with rounded weights for a captured graph whose encodings are chosen, and what there is to say.

    The affine weights of linear layers are rounded for the inputs that they get on `windows` of token ids. The graph
    stays: the source yields other numbers under the same names, in the encodings that were chosen, from files in
    `folder`. `progress` gets (layer, weights done, of). Raises UserError if there is no weight to round.
    """
    chosen = {param.value.name for param in graph.params if param.recipe.encoding is not None}
    walk = _Walk(resolve_encodings(graph, source), source, windows, method, folder)
    stages = make_stages(walk.graph, walk.roundable(chosen))
    total, done = sum(len(stage.layers) for stage in stages), 0
    if not total:
        raise UserError("calibration needs weights to round: choose an integer encoding such as --quant int4")
    for stage in stages:
        if progress is not None:
            progress(stage.layers[0].source.module, done, total)
        walk.compute(stage.ops)
        walk.round(stage.layers)
        done += len(stage.layers)
    return walk.store, walk.notes()


def make_stages(graph: Graph, weights: set[str]) -> list[Stage]:
    """The graph's ops, cut where the first of the layers with these weights reads a value, up to the last cut."""
    layers: dict[str, list[Op]] = defaultdict(list)
    for op in graph.ops:
        if op.kind == "linear" and op.inputs[1].name in weights:
            layers[op.inputs[0].name].append(op)
    stages, ops = [], list[Op]()
    for op in graph.ops:
        if op.kind == "linear" and op.inputs[1].name in weights and op.inputs[0].name in layers:
            stages.append(Stage(tuple(ops), tuple(layers.pop(op.inputs[0].name))))
            ops = []
        ops.append(op)
    return stages


@dataclass(frozen=True)
class Inputs:
    """What is known of the values [T, K] that layers read on the text."""

    hessian: Float64
    """XᵀX / T [K, K]."""
    magnitude: Float32
    """Mean of |x| [K]."""
    sample: Float32
    """Some of them [S, K], evenly spread."""

    @classmethod
    def of(cls, parts: Sequence[Float32]) -> Inputs:
        """From the values of each window."""
        count, columns = sum(map(len, parts)), parts[0].shape[1]
        hessian, magnitude = np.zeros((columns, columns)), np.zeros(columns)
        for x in parts:
            hessian += x.T @ x
            magnitude += np.abs(x).sum(axis=0)
        sample = np.concatenate([x[:: max(1, count // SAMPLE)] for x in parts])
        return cls(hessian / count, (magnitude / count).astype(np.float32), sample)

    def divided(self, scale: Float32) -> Inputs:
        """The same, had every channel been divided by its scale [K]."""
        return Inputs(self.hessian / np.outer(scale, scale), self.magnitude / scale, self.sample / scale)

    @property
    def importance(self) -> Float32:
        """Mean square of each channel [K]."""
        result: Float32 = self.hessian.diagonal().astype(np.float32)
        return result


class _Walk:
    """The state of the walk: what is known of every window, and which weights are rounded."""

    def __init__(
        self, graph: Graph, source: TensorSource, windows: Sequence[Sequence[int]], method: Method, folder: Path
    ) -> None:
        self.graph = graph
        self.store = CalibratedSource(source, folder)
        self._method = method
        self._folds = Folds(graph)
        self._params = {param.value.name: param for param in graph.params}
        self._users = graph.uses()
        self._last_use = {value.name: op for op in graph.ops for value in op.inputs}
        self._packings = [Packing((0, len(window)), (len(window),), (0,)) for window in windows]
        self._states = [_step_inputs(*each) for each in zip(windows, self._packings, strict=True)]
        self._errors: list[Float64] = []
        self._unscaled: list[str] = []

    def roundable(self, names: set[str]) -> set[str]:
        """Those of the weights that are affine, are read by linear layers alone, and can be replaced."""
        return {
            name
            for name in names
            if self._encoding(name).kind == "affine"
            and all(op.kind == "linear" for op in self._users[name])
            and self._folds.replaceable(self._params[name])
        }

    def _encoding(self, name: str) -> Encoding:
        encoding = self._params[name].recipe.encoding
        assert encoding is not None
        return encoding

    def _chunks(self, name: str, encoding: Encoding | None = None) -> Iterator[EncodedArray]:
        """A parameter by pieces of its rows: as it is now, in the encoding it will have or another one."""
        param = self._params[name]
        recipe = replace(param.recipe, encoding=encoding or param.recipe.encoding)
        return read_chunks(replace(param, recipe=recipe), self.store)

    # --- computing ----------------------------------------------------------------------------------------------------

    def compute(self, ops: Sequence[Op]) -> None:
        """Execute ops for all windows."""
        read = {value.name for op in ops if op.kind != "embedding" for value in op.inputs} & self._params.keys()
        weights = {name: np.concatenate([chunk.decode() for chunk in self._chunks(name)]) for name in sorted(read)}
        tables = {op.output.name: self._table(op) for op in ops if op.kind == "embedding"}
        for state, packing in zip(self._states, self._packings, strict=True):
            for op in ops:
                if op.kind == "embedding":
                    ids, rows = tables[op.output.name]
                    inputs = [rows, np.searchsorted(ids, state[op.inputs[1].name])]
                else:
                    inputs = [weights[v.name] if v.name in weights else state[v.name] for v in op.inputs]
                results = evaluate_op(op, inputs, packing)
                state.update({value.name: result for value, result in zip(op.outputs, results, strict=True)})
                for value in op.inputs:
                    if self._last_use[value.name] is op:
                        state.pop(value.name, None)

    def _table(self, op: Op) -> tuple[Array, Float32]:
        """The rows of an embedding's table that the text needs: their ids, ascending, and the rows."""
        table, ids = op.inputs
        wanted = np.unique(np.concatenate([state[ids.name] for state in self._states]))
        rows, start = [], 0
        for chunk in self._chunks(table.name):
            inside = wanted[(wanted >= start) & (wanted < start + chunk.shape[0])] - start
            rows += [chunk.rows(row, row + 1).decode() for row in inside.tolist()]
            start += chunk.shape[0]
        return wanted, np.concatenate(rows)

    # --- rounding -----------------------------------------------------------------------------------------------------

    def round(self, layers: Sequence[Op]) -> None:
        """Round the weights of layers that read one value."""
        value = layers[0].inputs[0]
        inputs = Inputs.of([state[value.name].reshape(-1, state[value.name].shape[-1]) for state in self._states])
        scale = np.ones_like(inputs.magnitude)
        if "awq" in self._method:
            scale = self._scale(layers, inputs)
            inputs = inputs.divided(scale)
        how = compensation(inputs.hessian) if "gptq" in self._method else None
        for op in layers:
            name = op.inputs[1].name
            self.store.put(self._params[name], self._encoding(name), self._rounded(name, scale, inputs, how))

    def _rounded(self, name: str, scale: Float32, inputs: Inputs, how: Compensation | None) -> Iterator[EncodedArray]:
        """A weight with its columns multiplied by `scale`, rounded for the inputs that it will get."""
        encoding, error = self._encoding(name), np.zeros(3)
        for chunk in self._chunks(name, FLOAT32):
            values = chunk.decode()
            plain, scaled = encode(values, encoding).decode() * scale, values * scale
            if how is None:
                result = encode(scaled, encoding, inputs.importance)
            else:
                result = gptq(scaled, how, encoding, inputs.importance)
            differences = (scaled, plain - scaled, result.decode() - scaled)
            error += [np.square(inputs.sample @ rows.T).sum(dtype=np.float64) for rows in differences]
            yield result
        self._errors.append(error[1:] / max(error[0], 1e-30))

    def _scale(self, layers: Sequence[Op], inputs: Inputs) -> Float32:
        """By how much the columns of the layers' weights are to grow; what makes their inputs is divided by it.

        1 where that can't be done.
        """
        value = layers[0].inputs[0]
        fold = self._folds.of(value) if self._users[value.name] == list(layers) else None
        if fold is None:
            self._unscaled.append(layers[0].source.module or value.name)
            return np.ones_like(inputs.magnitude)
        scales = candidates(inputs.magnitude, fold.rows)
        found = np.zeros(len(scales))
        for op in layers:
            name = op.inputs[1].name
            rows = (chunk.decode() for chunk in self._chunks(name, FLOAT32))
            found += losses(scales, rows, inputs.importance, self._encoding(name))
        scale = scales[int(found.argmin())]
        for target in fold.targets:
            self._divide(target, fold.rows, scale)
        for state in self._states:
            state[value.name] = state[value.name] / scale
        return scale

    def _divide(self, target: Target, rows: Index, scale: Float32) -> None:
        """Divide rows of a parameter by the scales of the channels that they make."""
        name = target.param.value.name
        chunks = list(self._chunks(name))
        ends = np.cumsum([chunk.shape[0] for chunk in chunks])
        divisor = np.ones(ends[-1], np.float32)
        divisor[rows] = scale
        parts = zip(chunks, np.split(divisor, ends[:-1]), strict=True)
        self.store.put(
            target.param, self._encoding(name), [_divided(chunk, part, target.offset) for chunk, part in parts]
        )

    def notes(self) -> tuple[str, ...]:
        """What calibration did, and what it could not do."""
        tokens = sum(packing.seq_start[-1] for packing in self._packings)
        plain, calibrated = np.sqrt(np.mean(self._errors, axis=0))
        said = [
            f"{len(self._errors)} weights calibrated on {tokens} tokens by {self._method}: relative error of their "
            f"products {calibrated:.2%} instead of {plain:.2%}"
        ]
        if self._unscaled:
            first, *rest = self._unscaled
            more = f" and {len(rest)} more" if rest else ""
            said.append(f"the inputs of {first}{more} are not scaled: what makes them can't be divided")
        return tuple(said)


def _step_inputs(window: Sequence[int], packing: Packing) -> dict[str, Any]:
    every = np.arange(len(window), dtype=np.int32)
    return {"tokens": np.array(window, np.int32), "positions": every, "rows": every, "lengths": packing.lengths()}


def _divided(chunk: EncodedArray, divisor: Float32, offset: float) -> EncodedArray:
    """Rows divided; of affine ones only scales and minima change, and the codes stay."""
    if chunk.encoding.kind != "affine":
        moved, wide = np.float32(offset), divisor.reshape(-1, *[1] * (chunk.data.ndim - 1))
        return encode((chunk.decode() + moved) / wide - moved, chunk.encoding)

    def shrunk(numbers: Array | None) -> Array | None:
        return None if numbers is None else (numbers.astype(np.float32) / divisor[:, None]).astype(numbers.dtype)

    return msgspec.structs.replace(chunk, scale=shrunk(chunk.scale), minimum=shrunk(chunk.minimum))
