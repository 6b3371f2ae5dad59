"""Export-time replacements: norms, activations, rotary embeddings, attention and repeated layers become one op each.

Instead of matching patterns after the export, the model is changed before it, at the places that implementations
share: the attention registry, modules that are norms, activations or rotary tables, the `apply_rotary*` functions of a
modeling file, the head, and the list of layers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .layers import LayerHooks
from .probe import classify_activation, classify_norm, norm_parameters
from .rope import RopeHooks
from .tracing import OPS

ATTENTION = "toolkit"
"""Name of our function in the attention registry. The mask registry lacks it, so models build no masks."""
FALLBACK = "sdpa"
"""The implementation of models that don't use the registry: one torch op, which is translated."""
_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")


class Hooks:
    """The replacements in one model, and what they recorded.

    Parameters may be on meta, buffers must be real. With `stamp`, a layer like two earlier ones is not traced.
    `problems` are sentences about what can't be captured.
    """

    def __init__(self, model: PreTrainedModel, max_context: int, *, stamp: bool) -> None:
        self.problems: list[str] = []
        self.norms: set[str] = set()
        """Module paths of the norms."""
        self.rope = RopeHooks(max_context, self.report)
        self.layers = LayerHooks(model, stamp=stamp)
        self._rows: Tensor | None = None
        self._unknown: set[str] = set()
        self._modeling = _modeling_files(model)
        self._exchangeable = any(hasattr(module, "ALL_ATTENTION_FUNCTIONS") for module in self._modeling)
        if not self._exchangeable and not model._supports_sdpa:
            self.report(f"attention in {type(model).__name__} is not exchangeable")
        self._replace_modules(model)
        self._replace_head(model)

    def report(self, problem: str) -> None:
        """Add a problem, once."""
        if problem not in self.problems:
            self.problems.append(problem)

    def begin(self, rows: Tensor) -> None:
        """Start a forward pass whose head sees the hidden states of `rows` only."""
        self._rows = rows
        self.layers.begin()

    @contextmanager
    def installed(self, model: PreTrainedModel) -> Iterator[None]:
        """The replacements that are global: the attention function, and functions of the model's files."""
        configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        for config in configs.values():
            config._attn_implementation = ATTENTION if self._exchangeable else FALLBACK
        with ExitStack() as undo:
            ALL_ATTENTION_FUNCTIONS[ATTENTION] = self.attention
            undo.callback(ALL_ATTENTION_FUNCTIONS.pop, ATTENTION)
            for module in self._modeling:
                for name, function in list(vars(module).items()):
                    if not inspect.isfunction(function):
                        continue
                    if name.startswith("apply_rotary"):
                        undo.callback(setattr, module, name, function)
                        setattr(module, name, self.rope.replaced(function))
                    elif name == "create_causal_mask" and not self._exchangeable:
                        undo.callback(setattr, module, name, function)
                        setattr(module, name, self._causal_mask)
            yield

    def _causal_mask(self, config: object, inputs_embeds: Tensor, attention_mask: object, **kwargs: object) -> Tensor:
        """What models that use no registry call to make a mask."""
        if attention_mask is not None or any(kwargs.get(f"{word}_mask_function") for word in ("or", "and")):
            self.report("a mask that is more than causal")
        mask: Tensor = OPS.causal_mask(inputs_embeds)
        return mask

    def _replace_modules(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        widths = tuple(getattr(config, name, None) or 16 for name in ("hidden_size", "head_dim"))
        for path, module in model.named_modules():
            name = type(module).__name__
            if name.endswith("Experts"):
                self.report(f"mixtures of experts ({name}) are not supported")
                module.forward = lambda x, *_, **__: OPS.experts(x)
            elif next(module.children(), None) is not None:
                continue
            elif "norm" in name.lower():
                self._replace_norm(path, module, widths)
            elif "rotary" in name.lower():
                self.rope.replace_module(path, module)
            elif type(module).__module__ in _ACTIVATIONS and (kind := classify_activation(module)) is not None:
                module.forward = lambda x, kind=kind: OPS.activation(x, kind)

    def _replace_norm(self, path: str, module: nn.Module, widths: tuple[int, ...]) -> None:
        """`widths` are tried for a norm whose parameters don't tell."""
        kinds = (classify_norm(module, width) for width in widths)
        kind = next((kind for kind in kinds if kind is not None), None)
        if kind is None:
            name = type(module).__name__
            if name not in self._unknown:
                self._unknown.add(name)
                self.report(f"norm {name} ({path}) matches no known formula")
            return
        self.norms.add(path)
        attrs = asdict(kind)
        module.forward = lambda x, *_, **__: OPS.norm(x, *norm_parameters(module), **attrs)

    def _replace_head(self, model: PreTrainedModel) -> None:
        any_model: Any = model
        head = any_model.get_output_embeddings()
        if not isinstance(head, nn.Module):
            self.report(f"{type(model).__name__} has no output embeddings")
            return
        head.register_forward_pre_hook(lambda _, args: (OPS.take_rows(args[0], self._rows), *args[1:]))

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
            self.report(f"attention in {type(module).__name__} is given {', '.join(unknown)}")
        if layer is None:
            self.report(f"attention in {type(module).__name__} doesn't know its layer")
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
            self.report(f"layers of type {types[layer]} are not supported")
        elif (types[layer] == "sliding_attention") != bool(window):
            self.report(f"layer {layer} is of type {types[layer]}, but its attention is given window {window}")


def _modeling_files(model: PreTrainedModel) -> list[ModuleType]:
    """The modules of transformers that define the model's parts."""
    names = {type(module).__module__ for module in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]
