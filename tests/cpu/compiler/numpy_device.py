"""A CUDA plan's launch programs, run by numpy in the place of a GPU: kernels by what the catalog says they mean.

It takes every pointer from the plan's arguments as a GPU would, so a wrong buffer, offset, stride, weight or dimension
gives wrong numbers. Activations must be float32, caches too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from cpu.kernels.triton_interpreter import Interpreter

from toolkit.kernels_templates import expression as ex
from toolkit.kernels_templates.catalog import KernelSpec, ParamValue
from toolkit.kernels_templates.packing import layout_bytes, unpack
from toolkit.kernels_templates.reference import PagedCache, attention
from toolkit.kernels_templates.registry import CUDA_FAMILIES, is_triton
from toolkit.kernels_templates.render import arguments
from toolkit.runtime.device.base import Ticket, find_bucket
from toolkit.runtime.plan import ArenaArg, CacheArg, ConstArg, DimArg, InputArg, Launch, Plan, WeightArg
from toolkit.runtime.step import StepBatch, StepResult

Array = npt.NDArray[Any]
PAGES = 40


class NumpyDevice:
    """As much of a `Device` as running steps takes."""

    def __init__(self, directory: Path, plan: Plan, interpreter: Interpreter | None = None) -> None:
        """`interpreter` runs what is written in Triton."""
        self.plan, self._interpreter = plan, interpreter
        self.used: list[str] = []
        """Names of the buckets that steps ran in."""
        stored = {file.file: np.fromfile(directory / file.file, np.uint8) for file in plan.weight_files}
        self._weights = {
            name: unpack(each.layout, each.encoding, each.shape, _exactly(stored[each.file], each)).decode()  # type: ignore[arg-type]
            for name, each in plan.weights.items()
        }
        self._caches = [
            [
                PagedCache.empty(
                    PAGES,
                    heads=cache.heads,
                    key_dim=cache.key_dim,
                    value_dim=cache.value_dim,
                    page_tokens=cache.page_tokens,
                    dtype=cache.dtype,
                    in_rows=True,
                )
                for _ in cache.layers
            ]
            for cache in plan.caches
        ]

    def submit(self, batch: StepBatch) -> Ticket:
        bucket = find_bucket(self.plan, batch)
        self.used.append(bucket.name)
        arena: Array = np.full(self.plan.memory.arena // 4, np.nan, np.float32)
        for launch in bucket.launches:
            self._launch(launch, batch, arena)
        return Ticket(len(self.used))

    def wait(self, ticket: Ticket) -> StepResult:
        return StepResult(np.zeros(0, np.void), np.zeros(0, np.int32), np.zeros(0, np.float32), 0.0)

    def close(self) -> None:
        """Nothing is held."""

    def _launch(self, launch: Launch, batch: StepBatch, arena: Array) -> None:
        kernel = self.plan.kernels[launch.kernel]
        spec = KernelSpec(kernel.family, kernel.params, kernel.shape)
        specs = arguments(CUDA_FAMILIES[kernel.family], spec)
        values = {each.name: self._value(arg, batch, arena) for each, arg in zip(specs, launch.args, strict=True)}
        if self._interpreter is not None and is_triton(spec):
            self._interpret(spec, values, [each.name for each in specs if each.role == "out"])
        else:
            meaning = KERNELS[kernel.family.removesuffix("_triton")]
            meaning(kernel.params, SimpleNamespace(**values), values)

    def _interpret(self, spec: KernelSpec, values: dict[str, Any], outputs: list[str]) -> None:
        """Run a Triton kernel over copies of its arguments, and take its outputs."""
        assert self._interpreter is not None
        for name, found in self._interpreter.run(
            spec, "sm80", **{n: _flat(n, each) for n, each in values.items()}
        ).items():
            written = ~np.isnan(found)
            values[name][written] = found[written]

    def _value(self, arg: Any, batch: StepBatch, arena: Array) -> Any:
        match arg:
            case ArenaArg(offset=offset, bytes=size):
                return arena[offset // 4 : (offset + size) // 4]
            case WeightArg(name=name):
                return self._weights[name]
            case CacheArg(group=group, slot=slot):
                return self._caches[group][slot]
            case InputArg(name="page_stride", group=group):
                return batch.pages[group].shape[1]
            case InputArg(name=("slots" | "pages") as name, group=group):
                return getattr(batch, name)[group]
            case InputArg(name=name):
                return getattr(batch, name, None)
            case DimArg(name=name, factor=factor):
                return factor * {"T": len(batch.tokens), "S": len(batch.context), "R": len(batch.rows)}[name]
            case ConstArg(value=value):
                return value


def _flat(name: str, value: Any) -> Any:
    """An argument as a pointer or a number."""
    if isinstance(value, PagedCache):
        return value.data.reshape(-1).view(np.float32)
    if name == "page_stride":
        return np.array([value], np.int32)
    if isinstance(value, np.ndarray):
        return np.array(value, np.float32 if value.dtype.kind == "f" else np.int32).reshape(-1)
    return value


def _exactly(data: Array, entry: Any) -> Array:
    """A weight's bytes without what pads them to a multiple of 64."""
    return data[entry.offset : entry.offset + layout_bytes(entry.layout, entry.encoding, entry.shape)]


# --- kernels ----------------------------------------------------------------------------------------------------------

Params = Mapping[str, ParamValue]


def _matrix(flat: Array, rows: int, width: int) -> Array:
    return flat.reshape(-1)[: rows * width].reshape(rows, width)


def _put(out: Array, values: Array) -> None:
    out[: values.size] = values.reshape(-1)


def _norm(p: Params, a: Any, named: Mapping[str, Any]) -> None:
    x = _matrix(a.x, a.rows, a.W).astype(np.float64)
    if "residual" in named:
        x = x + _matrix(a.residual, a.rows, a.W)
        _put(a.sum_out, x.astype(np.float32))
    if p["kind"] == "layer":
        x = x - x.mean(axis=1, keepdims=True)
    if p["kind"] == "l2":
        x = x / np.sqrt((x * x).sum(axis=1, keepdims=True) + a.eps)
    else:
        x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + a.eps)
    row = np.arange(a.rows) % a.weight_rows
    if "weight" in named:
        x = x * (a.weight.reshape(a.weight_rows, a.W)[row] + a.offset)
    if "bias" in named:
        x = x + a.bias.reshape(a.weight_rows, a.W)[row]
    _put(a.out, x)


def _embedding(p: Params, a: Any, named: Mapping[str, Any]) -> None:
    _put(a.out, a.scale * a.weight.reshape(a.V, a.W)[a.ids[: a.T]])


def _take_rows(p: Params, a: Any, named: Mapping[str, Any]) -> None:
    _put(a.out, _matrix(a.x, a.x.size // a.W, a.W)[a.rows["token"][: a.R]])


def _spread(p: Params, named: Mapping[str, Any], rows: int, width: int) -> list[Array]:
    """The inputs of an expression, as matrices that broadcast."""
    shapes = {"t": (rows, width), "n": (1, width), "1": (rows, 1), "s": (1, 1)}
    forms = [(f"in{index}", p.get(f"in{index}")) for index in range(8)]
    return [_matrix(named[name], *shapes[str(form)]) for name, form in forms if form]


def _pointwise(p: Params, a: Any, named: Mapping[str, Any]) -> None:
    result = ex.evaluate(ex.parse(str(p["expr"])), _spread(p, named, a.rows, a.W))
    _put(a.out, np.broadcast_to(result, (a.rows, a.W)))


def _reduction(p: Params, a: Any, named: Mapping[str, Any]) -> None:
    inputs = _spread(p, named, a.rows, a.W)
    results = [ex.evaluate(body, inputs) for body in ex.parse_all(str(p["exprs"]))]
    _put(a.out, np.broadcast_to(results[-1], (a.rows, 1 if p["column"] else a.W)))
    if p["first_out"]:
        _put(a.first, np.broadcast_to(results[0], (a.rows, a.W)))


def _linear(p: Params, a: Any, named: Mapping[str, Any]) -> None:
    product = _matrix(a.x, a.rows, a.K).astype(np.float64) @ a.weight.reshape(a.N, a.K).T
    if p.get("norm_in"):
        squares = _matrix(a.squares, a.rows, a.K // 16).sum(axis=1, keepdims=True)
        product = product / np.sqrt(squares / a.K + a.eps)
    if "bias" in named:
        product = product + a.bias
    parts = np.split(product, 2, axis=1) if p["gated"] else [product]
    width = parts[0].shape[1]
    shapes = {"t": (a.rows, width), "n": (1, width)}
    for index in range(1, 5):
        if p[f"extra{index}"]:
            parts.append(_matrix(named[f"extra{index}"], *shapes[str(p[f"extra{index}"])]).astype(np.float64))
    result = np.asarray(ex.evaluate(ex.parse(str(p["epilogue"])), parts) if p["epilogue"] else product)
    if p.get("norm_out"):
        total = result + _matrix(a.residual, a.rows, width)
        _put(a.sum_out, total)
        _put(a.squares_out, (total**2).reshape(a.rows, -1, 16).sum(axis=2))
        result = total * (a.norm_weight.reshape(1, width) + a.offset)
    _put(a.out, result)


def _rotated(x: Array, cos: Array, sin: Array, style: ParamValue) -> Array:
    """x[T, heads, dim] with the first 2 * cos.shape[1] columns rotated."""
    half = cos.shape[1]
    x, cos, sin = x.copy(), cos[:, None], sin[:, None]
    first, second = (
        (slice(0, half), slice(half, 2 * half))
        if style == "half"
        else (
            slice(0, 2 * half, 2),
            slice(1, 2 * half, 2),
        )
    )
    one, two = x[..., first].copy(), x[..., second].copy()
    x[..., first], x[..., second] = one * cos - two * sin, two * cos + one * sin
    return x


def _rope_table(p: Params, a: Any, named: Mapping[str, Any]) -> None:
    rows = np.clip(a.lengths[: a.T] - a.first, 0, a.last)
    angles = a.positions[: a.T, None].astype(np.float64) * a.frequencies.reshape(-1, a.W)[rows]
    _put(a.out, a.scale * (np.cos if p["function"] == "cos" else np.sin)(angles))


def _rope(p: Params, a: Any, named: Mapping[str, Any]) -> None:
    size, half = int(p["head_dim"]), int(p["rotary"]) // 2
    rows = np.lib.stride_tricks.as_strided(a.x, (a.T, a.heads * size), (4 * a.x_stride, 4))
    cos, sin = _matrix(a.cos, a.T, half), _matrix(a.sin, a.T, half)
    _put(a.out, _rotated(rows.reshape(a.T, a.heads, size), cos, sin, p["style"]))


def _rope_kv_write(p: Params, a: Any, named: Mapping[str, Any]) -> None:
    size, half = int(p["head_dim"]), int(p["rotary"]) // 2
    heads = _matrix(a.qkv, a.T, (a.heads + 2 * a.kv_heads) * size).reshape(a.T, -1, size)
    q, k, v = np.split(heads, [a.heads, a.heads + a.kv_heads], axis=1)
    if p["qk_norm"]:
        q, k = (_head_norm(p, a, x, w) for x, w in ((q, a.q_weight), (k, a.k_weight)))
    if p["has_rope"]:
        cos, sin = _matrix(a.cos, a.T, half), _matrix(a.sin, a.T, half)
        q, k = (_rotated(x, cos, sin, p["style"]) for x in (q, k))
    a.cache.write(k, v, a.slots[: a.T])
    _put(a.out, q)


def _head_norm(p: Params, a: Any, x: Array, weight: Array) -> Array:
    x = x.astype(np.float64)
    if p["qk_norm"] == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    weights = weight.reshape(-1, x.shape[-1]) if a.weight_stride else weight.reshape(1, -1)
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + a.eps) * (weights + a.offset))


def _kv_write(p: Params, a: Any, named: Mapping[str, Any]) -> None:
    def rows(x: Array, stride: int, size: int) -> Array:
        strided = np.lib.stride_tricks.as_strided(x, (a.T, a.kv_heads * size), (4 * stride, 4))
        return strided.reshape(a.T, a.kv_heads, size)

    k, v = rows(a.k, a.k_stride, int(p["key_dim"])), rows(a.v, a.v_stride, int(p["value_dim"]))
    a.cache.write(k, v, a.slots[: a.T])


def _attention(p: Params, a: Any, named: Mapping[str, Any]) -> None:
    tokens = int(a.seq_start[a.S])
    q = _matrix(a.q, tokens, a.heads * int(p["key_dim"])).reshape(tokens, a.heads, -1)
    assert a.page_stride == a.pages.shape[1]
    options = {name: named[name] for name in ("window", "softcap", "sinks", "slopes") if name in named}
    _put(a.out, attention(q, a.cache, a.pages, a.seq_start, a.context, scale=a.scale, **options))


def _decode_and_write(p: Params, a: Any, named: Mapping[str, Any]) -> None:
    tokens = int(a.seq_start[a.S])
    q = np.empty(tokens * a.heads * int(p["key_dim"]), np.float32)
    first = {**named, "qkv": a.q, "T": tokens, "out": q}
    _rope_kv_write({**p, "head_dim": p["key_dim"]}, SimpleNamespace(**first), first)
    second = {**named, "q": q}
    _attention(p, SimpleNamespace(**second), second)


def _copy(p: Params, a: Any, named: Mapping[str, Any]) -> None:
    shape = (a.rows, a.width)
    source = np.lib.stride_tricks.as_strided(a.x[a.x_offset :], shape, (4 * a.x_stride, 4))
    np.lib.stride_tricks.as_strided(a.out[a.out_offset :], shape, (4 * a.out_stride, 4))[...] = source


def _reduce(p: Params, a: Any, named: Mapping[str, Any]) -> None:
    how: Mapping[str, Callable[..., Array]] = {"sum": np.sum, "mean": np.mean, "max": np.max}
    _put(a.out, how[str(p["op"])](_matrix(a.x, a.rows, a.W), axis=1))


def _softmax(p: Params, a: Any, named: Mapping[str, Any]) -> None:
    x = _matrix(a.x, a.rows, a.W).astype(np.float64)
    x = np.exp(x - x.max(axis=1, keepdims=True))
    _put(a.out, x / x.sum(axis=1, keepdims=True))


def _sample_measure(p: Params, a: Any, named: Mapping[str, Any]) -> None:
    """`_sample` needs nothing of it."""


def _sample(p: Params, a: Any, named: Mapping[str, Any]) -> None:
    """Writes the log-probabilities that rows ask for; draws nothing."""
    logits = _matrix(a.logits, a.R, a.V).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    found = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)
    for row, address in enumerate(a.rows["logprobs"]):
        ctypes.memmove(int(address), found[row].ctypes.data, found[row].nbytes)


KERNELS: Mapping[str, Callable[[Params, Any, Mapping[str, Any]], None]] = {
    "norm": _norm,
    "embedding": _embedding,
    "take_rows": _take_rows,
    "pointwise": _pointwise,
    "reduction": _reduction,
    "linear": _linear,
    "linear_exact": _linear,
    "linear_skinny": _linear,
    "rope_table": _rope_table,
    "rope": _rope,
    "rope_kv_write": _rope_kv_write,
    "kv_write": _kv_write,
    "attention_prefill": _attention,
    "attention_decode": _attention,
    "attention_decode_write": _decode_and_write,
    "copy": _copy,
    "reduce": _reduce,
    "softmax": _softmax,
    "sample_measure": _sample_measure,
    "sample": _sample,
}
