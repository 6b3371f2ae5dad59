"""Ops that exist only while a model is traced: what the hooks put in place of modules, and `aten.py` translates."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

_make_library: Any = torch.library.Library
_LIBRARY = _make_library("toolkit", "DEF")
OPS: Any = torch.ops.toolkit
"""The ops by name."""


def _define(schema: str, shape: Callable[..., object]) -> None:
    """An op without a body: `shape` makes its empty results."""
    _LIBRARY.define(schema)
    torch.library.register_fake("toolkit::" + schema.partition("(")[0], shape, lib=_LIBRARY)


def _like_first(x: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _tables(positions: Tensor, table: int, width: int) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, width)
    return positions.new_empty(shape, dtype=torch.float32), positions.new_empty(shape, dtype=torch.float32)


def _attended(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _square(x: Tensor) -> Tensor:
    return x.new_empty((1, 1, x.shape[1], x.shape[1]), dtype=torch.bool)


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty((1, rows.shape[0], x.shape[-1]))


_define("norm(Tensor x, Tensor? weight, Tensor? bias, *, str kind, float eps, float offset) -> Tensor", _like_first)
_define("activation(Tensor x, str kind) -> Tensor", _like_first)
_define("experts(Tensor x) -> Tensor", _like_first)
_define("rope_table(Tensor positions, int table, int width) -> (Tensor, Tensor)", _tables)
_define("rope(Tensor x, Tensor cos, Tensor sin, *, int site) -> Tensor", _like_first)
_define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, *, int layer, float scale, int window, float softcap, "
    "bool causal) -> Tensor",
    _attended,
)
_define("causal_mask(Tensor x) -> Tensor", _square)
_define("take_rows(Tensor x, Tensor rows) -> Tensor", _rows)
_define("layer_begin(Tensor x, int like, int index) -> Tensor", _like_first)
_define("layer_end(Tensor x, int like, int index) -> Tensor", _like_first)
_define("layer_repeat(Tensor x, int like, int index) -> Tensor", _like_first)


def outside_tracing(function: Callable[[], Result]) -> Result:
    """Call a function on real tensors while a model is being traced: in another thread, as tracing belongs to one."""
    results: list[Result] = []
    errors: list[Exception] = []

    def call() -> None:
        try:
            with torch.no_grad():
                results.append(function())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
