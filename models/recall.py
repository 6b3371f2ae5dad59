"""Captured graphs, remembered: a second compilation of a model does without torch's export.

A graph is kept in the cache of compiled objects as its text and constants, under a hash of all that decides it: the
configuration, the checkpoint's tensor names, the bounds, the sources of the model's implementation and of this package,
and the versions of the packages that capture runs on.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from ..compiler.cache import cached, content_key, package_digest
from ..compiler.ir import Graph
from ..compiler.shapes import Bounds
from ..compiler.text import constants, parse_graph, print_graph

PACKAGES = ("torch", "transformers", "accelerate", "numpy")


def captured_graph(
    config: PreTrainedConfig, *, dtype: str, bounds: Bounds, tensors: Iterable[str], reuse: bool = True
) -> Graph:
    """The graph that `models.capture` makes of a model whose checkpoint has these tensors; raises what it raises.
    Without `reuse` it is captured in any case.

    Architectures that transformers does not bring itself are captured each time: their sources may be anywhere.
    """
    names = frozenset(tensors)

    def capture() -> Graph:
        from .capture import capture

        return capture(config, dtype=dtype, bounds=bounds, has_weight=names.__contains__)

    implementation = _implementation(config)
    if implementation is None:
        return capture()
    key = content_key("graph", *_decided_by(config, implementation), dtype, repr(bounds), *sorted(names))

    def make(path: Path) -> None:
        _write(capture(), path)

    path = cached(key, ".graph", make, again=not reuse)
    try:
        return _read(path)
    except (OSError, ValueError):  # damaged
        return _read(cached(key, ".graph", make, again=True))


def _write(graph: Graph, path: Path) -> None:
    arrays: dict[str, Any] = {"text": np.frombuffer(print_graph(graph).encode(), np.uint8), **constants(graph)}
    archive = BytesIO()
    np.savez(archive, **arrays)
    path.write_bytes(hashlib.sha256(archive.getbuffer()).digest() + archive.getbuffer())


def _read(path: Path) -> Graph:
    """Raises ValueError if the file is damaged."""
    with open(path, "rb") as stream:
        digest, archive = stream.read(32), stream.read()
    if hashlib.sha256(archive).digest() != digest:
        raise ValueError(f"{path} is damaged")
    with np.load(BytesIO(archive)) as stored:
        arrays = dict(stored)
    return parse_graph(arrays.pop("text").tobytes().decode(), arrays)


def _implementation(config: PreTrainedConfig) -> Path | None:
    """The folder of the architecture's sources in transformers."""
    module = type(config).__module__
    return Path(str(sys.modules[module].__file__)).parent if module.startswith("transformers.models.") else None


def _decided_by(config: PreTrainedConfig, implementation: Path) -> Iterator[str]:
    values = json.loads(config.to_json_string(use_diff=False))
    values.pop("_name_or_path", None)  # where it was found
    yield json.dumps(values, sort_keys=True)
    for path in sorted(implementation.rglob("*.py")):
        yield f"{path.relative_to(implementation)} {hashlib.sha256(path.read_bytes()).hexdigest()}"
    yield package_digest()
    yield from (f"{name} {version(name)}" for name in PACKAGES)
