"""Export-time replacements: norms, activations, rotary embeddings, attention and repeated layers become one op each.

Instead of matching patterns after the export, the model is changed before it, at the places that implementations
share: the attention registry, modules that are norms, activations or rotary tables, the `apply_rotary*` functions of a
modeling file, the head, and the list of layers. The replacements call the ops defined here, which exist for tracing.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import SymInt, Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .probe import RopeKind, classify_activation, classify_norm, classify_rope, norm_parameters

ATTENTION = "toolkit"
"""Name of our function in the attention registry. The mask registry lacks it, so models build no masks."""

Result = TypeVar("Result")


# --- ops that exist only for tracing ----------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("toolkit", "DEF")
OPS: Any = torch.ops.toolkit


def _define(schema: str, shape: Callable[..., object]) -> None:
    """An op without a body: `shape` makes its empty results."""
    _LIBRARY.define(schema)
    torch.library.register_fake("toolkit::" + schema.partition("(")[0], shape, lib=_LIBRARY)


def _like_first(x: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _table_shapes(positions: Tensor, table: int, width: int) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, width)
    return positions.new_empty(shape, dtype=torch.float32), positions.new_empty(shape, dtype=torch.float32)


_define("norm(Tensor x, Tensor? weight, Tensor? bias, *, str kind, float eps, float offset) -> Tensor", _like_first)
_define("activation(Tensor x, str kind) -> Tensor", _like_first)
_define("rope_table(Tensor positions, int table, int width) -> (Tensor, Tensor)", _table_shapes)
_define("rope(Tensor x, Tensor cos, Tensor sin, *, int site) -> Tensor", _like_first)
_define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, *, int layer, float scale, int window, float softcap, "
    "bool causal) -> Tensor",
    lambda q, k, v, *_, **__: q.new_empty((*q.shape[:-1], v.shape[-1])),
)
_define("take_rows(Tensor x, Tensor rows) -> Tensor", lambda x, rows: x.new_empty((1, rows.shape[0], x.shape[-1])))
_define("layer_begin(Tensor x, int like, int index) -> Tensor", _like_first)
_define("layer_end(Tensor x, int like, int index) -> Tensor", _like_first)
_define("layer_repeat(Tensor x, int like, int index) -> Tensor", _like_first)


# --- what the replacements leave behind for the translation -----------------------------------------------------------


@dataclass(frozen=True)
class RopeTable:
    """cos and sin [max_context, W], float32, as a rotary module computes them."""

    module: str
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class RopeSite:
    """A way in which the model applies rotary tables: one function, one of its tensors."""

    function: Callable[..., Any]
    argument: str
    """The parameter that takes the tensor to rotate."""
    others: tuple[str, ...]
    """Parameters that take other tensors to rotate."""
    options: tuple[tuple[str, object], ...]
    """Arguments that are no tensors."""
    dim: int
    time_axis: int
    """Axis of the tokens in the function's 4-D tensors, 1 or 2."""

    @property
    def name(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def classify(self, table: Tensor) -> RopeKind | None:
        """How the function rotates, given tables of this form."""
        return classify_rope(self._apply, self.dim, table)

    def _apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The function for x[1, H, T, D] and tables [1, T, W]."""
        swap = self.time_axis == 1
        inputs = dict.fromkeys((self.argument, *self.others), x.transpose(1, 2) if swap else x)
        found = self.function(**inputs, cos=cos, sin=sin, **dict(self.options))
        if self.others:
            found = found[min(len(found) - 1, self._order.index(self.argument))]
        assert isinstance(found, Tensor)
        return found.transpose(1, 2) if swap else found

    @property
    def _order(self) -> list[str]:
        rotated = (self.argument, *self.others)
        return [name for name in inspect.signature(self.function).parameters if name in rotated]


def outside_tracing(function: Callable[[], Result]) -> Result:
    """Call a function on real tensors while a model is being traced: in another thread, as tracing belongs to one."""
    results: list[Result] = []
    errors: list[BaseException] = []

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


# --- the replacements -------------------------------------------------------------------------------------------------


class Hooks:
    """The replacements in one model, and what they recorded.

    `model` has real buffers and parameters on any device. With `stamp`, a layer like two earlier ones is not traced but
    becomes one `layer_repeat`. `problems` are sentences about what can't be captured.
    """

    def __init__(self, model: PreTrainedModel, max_context: int, *, stamp: bool) -> None:
        self.max_context = max_context
        self.tables: list[RopeTable] = []
        self.sites: list[RopeSite] = []
        self.problems: list[str] = []
        self.norms: set[str] = set()
        """Module paths of the norms."""
        config: Any = model.config
        self._widths = (config.hidden_size, getattr(config, "head_dim", None) or 16)
        self.layers = _layer_list(model) if stamp else None
        """Path of the list of layers, if one is stamped out."""
        self._rows: Tensor | None = None
        self._table_numbers: dict[object, int] = {}
        self._originals: dict[object, list[int]] = {}
        self._replace_modules(model)
        self._replace_head(model)
        if self.layers is not None:
            self._replace_layers(model, self.layers)

    def begin(self, rows: Tensor) -> None:
        """Start a forward pass whose head sees the hidden states of `rows` only."""
        self._rows = rows
        self._originals.clear()

    @contextmanager
    def installed(self, model: PreTrainedModel) -> Iterator[None]:
        """The replacements that are global: the attention function, and the rope functions of the model's files."""
        configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
        for config in configs.values():
            config._attn_implementation = ATTENTION
        with ExitStack() as undo:
            ALL_ATTENTION_FUNCTIONS[ATTENTION] = self.attention
            undo.callback(ALL_ATTENTION_FUNCTIONS.pop, ATTENTION)
            names = {type(module).__module__ for module in model.modules()}
            for module in (sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")):
                for name, function in list(vars(module).items()):
                    if name.startswith("apply_rotary") and inspect.isfunction(function):
                        undo.callback(setattr, module, name, function)
                        setattr(module, name, self._rope(function))
            yield

    # norms, activations, rotary tables

    def _replace_modules(self, model: nn.Module) -> None:
        for path, module in model.named_modules():
            name = type(module).__name__
            if next(module.children(), None) is not None:
                continue
            if "norm" in name.lower():
                self._replace_norm(path, module)
            elif "rotary" in name.lower():
                self._replace_rotary(path, module)
            elif type(module).__module__ in ("transformers.activations", "torch.nn.modules.activation"):
                self._replace_activation(module)

    def _replace_norm(self, path: str, module: nn.Module) -> None:
        kinds = (classify_norm(module, width) for width in self._widths)
        kind = next((kind for kind in kinds if kind is not None), None)
        if kind is None:
            self._problem(f"norm {type(module).__name__} ({path}) matches no known formula")
            return
        self.norms.add(path)
        attrs = asdict(kind)
        module.forward = lambda x, *_, **__: OPS.norm(x, *norm_parameters(module), **attrs)

    def _replace_activation(self, module: nn.Module) -> None:
        kind = classify_activation(module)
        if kind is not None:
            module.forward = lambda x: OPS.activation(x, kind)

    def _replace_rotary(self, path: str, module: nn.Module) -> None:
        original = copy.deepcopy(module)

        def forward(*args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
            values = [*args, *kwargs.values()]
            key = (path, *(repr(value) for value in values if not isinstance(value, Tensor)))
            if key not in self._table_numbers:
                self._table_numbers[key] = len(self.tables)
                self.tables.append(outside_tracing(lambda: self._table(path, original, args, kwargs)))
            number = self._table_numbers[key]
            positions = next(v for v in values if isinstance(v, Tensor) and not v.is_floating_point())
            cos, sin = OPS.rope_table(positions, number, self.tables[number].cos.shape[-1])
            return cos, sin

        module.forward = forward

    def _table(self, path: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> RopeTable:
        """Run a rotary module for every position, with float32 in place of the hidden states."""
        positions = torch.arange(self.max_context)[None]

        def real(value: object) -> object:
            if not isinstance(value, Tensor):
                return value
            return torch.zeros(1, 1, 1) if value.is_floating_point() else positions

        found = module(*map(real, args), **{name: real(value) for name, value in kwargs.items()})
        shape = (1, self.max_context)
        if isinstance(found, tuple) and len(found) == 2 and all(t.is_floating_point() and t.ndim == 3 for t in found):
            cos, sin = (t.float() for t in found)
            if cos.shape == sin.shape and cos.shape[:2] == shape:
                return RopeTable(path, cos[0], sin[0])
        raise ValueError(f"rotary module {type(module).__name__} ({path}) doesn't return cos and sin [1, T, W]")

    # rotation

    def _rope(self, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def apply(*args: object, **kwargs: object) -> object:
            given = signature.bind(*args, **kwargs).arguments
            cos, sin = given.pop("cos", None), given.pop("sin", None)
            rotated = {name: x for name, x in given.items() if isinstance(x, Tensor)}
            options = tuple((name, x) for name, x in given.items() if not isinstance(x, Tensor))
            if not isinstance(cos, Tensor) or not isinstance(sin, Tensor) or any(x.ndim != 4 for x in rotated.values()):
                self._problem(f"{function.__module__}.{function.__name__} doesn't take 4-D tensors with cos and sin")
                return function(*args, **kwargs)
            results = []
            for name, x in rotated.items():
                axis = 1 if isinstance(x.shape[1], SymInt) else 2
                others = tuple(other for other in rotated if other != name)
                site = RopeSite(function, name, others, options, int(x.shape[-1]), axis)
                results.append(self._rotate(x, cos, sin, site))
            return tuple(results) if len(results) > 1 else results[0]

        return apply

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor, site: RopeSite) -> Tensor:
        if site not in self.sites:
            self.sites.append(site)
        number = self.sites.index(site)
        if site.time_axis == 1:
            return OPS.rope(x, cos, sin, site=number)
        return OPS.rope(x.transpose(1, 2), cos, sin, site=number).transpose(1, 2)

    # attention

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """What models call instead of attention: q[1, Hq, T, D], k[1, Hk, T, D], v[1, Hk, T, Dv] -> [1, T, Hq, Dv]."""
        layer: Any = getattr(module, "layer_idx", None)
        unknown = [name for name, x in kwargs.items() if isinstance(x, Tensor) and name != "position_ids"]
        if attention_mask is not None:
            unknown.append("attention_mask")
        if unknown:
            self._problem(f"attention in {type(module).__name__} is given {', '.join(unknown)}")
        if layer is None:
            self._problem(f"attention in {type(module).__name__} doesn't know its layer")
        self._check_window(module, layer, sliding_window)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        attrs = {"layer": int(layer or 0), "scale": float(scale), "window": int(sliding_window or 0)}
        out = OPS.attention(q, k, v, s_aux, **attrs, softcap=float(softcap or 0.0), causal=bool(causal))
        return out, None

    def _check_window(self, module: nn.Module, layer: int | None, window: int | None) -> None:
        types = getattr(getattr(module, "config", None), "layer_types", None)
        if layer is None or not types or layer >= len(types):
            return
        if types[layer] not in ("full_attention", "sliding_attention"):
            self._problem(f"layers of type {types[layer]} are not supported")
        elif (types[layer] == "sliding_attention") != bool(window):
            self._problem(f"layer {layer} is of type {types[layer]}, but its attention is given window {window}")

    # head and layers

    def _replace_head(self, model: PreTrainedModel) -> None:
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Module):
            self._problem(f"{type(model).__name__} has no output embeddings")
            return
        head.register_forward_pre_hook(lambda _, args: (OPS.take_rows(args[0], self._rows), *args[1:]))

    def _replace_layers(self, model: PreTrainedModel, path: str) -> None:
        layers = list(model.get_submodule(path).children())
        lists = {k: v for k, v in model.config.to_dict().items() if isinstance(v, list) and len(v) == len(layers)}
        for index, layer in enumerate(layers):
            structure = _structure(layer, {name: values[index] for name, values in lists.items()})
            layer.forward = self._layer(layer.forward, index, structure)

    def _layer(self, original: Callable[..., Any], index: int, structure: object) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: object) -> object:
            if not args:
                return original(**kwargs)
            hidden, *args = args
            key = (structure, _identity(args), _identity(kwargs))
            same = self._originals.setdefault(key, [])
            same.append(index)
            # the second one is traced too, to see that it is the same
            if len(same) > 2:
                return OPS.layer_repeat(hidden, same[0], index)
            out = original(OPS.layer_begin(hidden, same[0], index), *args, **kwargs)
            if not isinstance(out, Tensor):
                self._originals.pop(key)  # not repeated: only one result can be
                return out
            return OPS.layer_end(out, same[0], index)

        return forward

    def _problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)


def _layer_list(model: PreTrainedModel) -> str | None:
    """The path of the module list that holds the layers."""
    count = getattr(model.config, "num_hidden_layers", None)
    lists = [(p, m) for p, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    return lists[0][0] if lists else None


def _structure(layer: nn.Module, config: dict[str, Any]) -> str:
    """A text that is equal for layers which differ only in their number and the values of their parameters.

    `config` has this layer's entry of every list with one per layer.
    """
    modules = [
        (
            path,
            type(module).__qualname__,
            *(f"{name}={_state(x)}" for name, x in sorted(vars(module).items()) if _tells(name)),
            *(f"{name}:{tuple(p.shape)}" for name, p in module.named_parameters(recurse=False)),
            *(f"{name}:{_digest(b)}" for name, b in module.named_buffers(recurse=False)),
        )
        for path, module in layer.named_modules()
    ]
    return repr((config, modules))


def _tells(name: str) -> bool:
    """Whether an attribute says what a module computes: the layer's number and torch's own state don't."""
    return not name.startswith("_") and name not in ("layer_idx", "layer_id", "layer_index", "layer_number", "forward")


def _state(value: object) -> str:
    """An attribute of a module for comparison."""
    return repr(value) if isinstance(value, (int, float, str, bool, list, tuple, dict, type(None))) else ""


def _digest(buffer: Tensor) -> str:
    return hashlib.sha256(buffer.detach().float().numpy().tobytes()).hexdigest()


def _identity(value: object) -> object:
    """Arguments for comparison within one trace: the same tensor is the same object."""
    if isinstance(value, (list, tuple)):
        return tuple(_identity(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _identity(item)) for name, item in value.items())
    return (id(value),) if isinstance(value, Tensor) else repr(value)
