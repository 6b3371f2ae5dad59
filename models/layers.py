"""Hooks for repeated layers: only the first two of each kind are traced, the others become copies of the first.

The second is traced to see that it is the same. Two layers are of one kind if their modules have the same classes,
shapes, attributes and buffers, the configuration says the same of them, and they are called with the same arguments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from .tracing import OPS

_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number")
"""Attributes that number a layer."""


class LayerHooks:
    """Marks the layers of one model in the trace: `layer_begin`, `layer_end` and, with `stamp`, `layer_repeat`."""

    def __init__(self, model: PreTrainedModel, *, stamp: bool) -> None:
        self.path = _layer_list(model)
        """Module path of the list of layers, "" if there is none."""
        self._like: dict[object, list[int]] = {}
        self._results: dict[int, Callable[[Tensor], Any]] = {}
        self._seen: list[Tensor] = []
        if self.path and stamp:
            self._replace(model)

    def begin(self) -> None:
        """Start a trace."""
        self._like.clear()
        self._seen.clear()

    def _replace(self, model: PreTrainedModel) -> None:
        layers = list(model.get_submodule(self.path).children())
        config = {k: v for k, v in model.config.to_dict().items() if isinstance(v, list) and len(v) == len(layers)}
        for index, layer in enumerate(layers):
            structure = _structure(layer, {name: values[index] for name, values in config.items()})
            layer.forward = self._hooked(layer.forward, index, structure)

    def _hooked(self, original: Callable[..., Any], index: int, structure: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: object) -> Any:
            if not args or not isinstance(args[0], Tensor):
                return original(*args, **kwargs)
            hidden, *rest = args
            same = self._like.setdefault((structure, self._identity(rest), self._identity(kwargs)), [])
            same.append(index)
            if len(same) > 2:
                return self._results[same[0]](OPS.layer_repeat(hidden, same[0], index))
            out = original(OPS.layer_begin(hidden, same[0], index), *rest, **kwargs)
            if isinstance(out, tuple) and isinstance(out[0], Tensor):
                # The rest is for looking at. Were it passed to other layers, no three of these would be called alike.
                nothing = (None,) * (len(out) - 1)
                self._results[index] = lambda x: (x, *nothing)
                return OPS.layer_end(out[0], same[0], index), *out[1:]
            if not isinstance(out, Tensor):
                same.clear()
                return out
            self._results[index] = lambda x: x
            return OPS.layer_end(out, same[0], index)

        return forward

    def _identity(self, value: object) -> object:
        """Arguments for comparison within a trace, where the same tensor is the same object."""
        if isinstance(value, (list, tuple)):
            return tuple(self._identity(item) for item in value)
        if isinstance(value, dict):
            return tuple((name, self._identity(item)) for name, item in value.items())
        if isinstance(value, Tensor):
            self._seen.append(value)  # kept, so that no other gets its id
            return ("tensor", id(value))
        return repr(value)


def _layer_list(model: PreTrainedModel) -> str:
    """The path of the module list that holds the layers."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = (path for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    return next(lists, "")


def _structure(layer: nn.Module, config: dict[str, Any]) -> str:
    """A text that is equal for layers which differ only in their number and the values of their parameters.

    `config` has this layer's entry of every list with one per layer.
    """
    modules = [
        (
            path,
            type(module).__qualname__,
            *(f"{name}={_state(x)}" for name, x in sorted(vars(module).items()) if _matters(name)),
            *(f"{name}:{tuple(p.shape)}" for name, p in module.named_parameters(recurse=False)),
            *(f"{name}:{_digest(b)}" for name, b in module.named_buffers(recurse=False)),
        )
        for path, module in layer.named_modules()
    ]
    return repr((config, modules))


def _matters(name: str) -> bool:
    """Whether an attribute says what a module computes: torch's own state and the layer's number don't."""
    return not name.startswith("_") and name not in (*_NUMBERS, "forward")


def _state(value: object) -> str:
    """An attribute for comparison."""
    return repr(value) if isinstance(value, (int, float, str, list, tuple, dict, type(None))) else ""


def _digest(buffer: Tensor) -> str:
    return hashlib.sha256(buffer.detach().float().numpy().tobytes()).hexdigest()
