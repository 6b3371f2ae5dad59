"""Export-time replacements: norms, activations, rotary embeddings, attention and repeated layers become one op each.

Instead of matching patterns after the export, the model is changed before it, at the places that implementations
share: the attention registry, modules that are norms, activations or rotary tables, the `apply_rotary*` functions of a
modeling file, the head, and the list of layers.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import PreTrainedModel

from .layers import LayerHooks
from .probe import classify_activation, classify_norm, norm_parameters
from .problems import Problems
from .rope import RopeHooks
from .tracing import OPS

REGISTRY = "ALL_ATTENTION_FUNCTIONS"
"""Name of the attention registry in modeling files."""
ATTENTION = "toolkit"
"""Name of our function in the attention registry. The mask registry lacks it, so models build no masks."""
FALLBACK = "sdpa"
"""The implementation of models that don't use the registry: one torch op, which is translated."""
_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")


class Hooks:
    """The replacements in one model, and what they recorded.

    Parameters may be on meta, buffers must be real. With `stamp`, a layer like two earlier ones is not traced.
    `problems` gets what can't be captured.
    """

    def __init__(self, model: PreTrainedModel, max_context: int, *, stamp: bool) -> None:
        self.problems = Problems()
        self.norms: Counter[str] = Counter()
        """Module paths of the norms, and how often the trace called each: never in a layer that is a copy."""
        self.unsupported: set[str] = set()
        """Module paths of parts that were reported as a whole."""
        self.entered: list[str] = []
        """Module paths of the calls that the trace is in, which tell where it failed."""
        self.rope = RopeHooks(max_context, self.problems.add)
        self.layers = LayerHooks(model, stamp=stamp)
        self._rows: Tensor | None = None
        self._modeling = _modeling_files(model)
        self._exchangeable = any(hasattr(module, REGISTRY) for module in self._modeling)
        if not self._exchangeable and not model._supports_sdpa:
            self.problems.add(f"{type(model).__name__} computes attention itself, in no op that could be captured")
        self._replace_modules(model)
        self._replace_head(model)

    def begin(self, rows: Tensor) -> None:
        """Start a forward pass whose head sees the hidden states of `rows` only."""
        self._rows = rows
        self.norms = Counter(dict.fromkeys(self.norms, 0))
        self.layers.begin()

    @contextmanager
    def installed(self, model: PreTrainedModel) -> Iterator[None]:
        """The replacements that are global: the attention function, and functions of the model's files."""
        configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        for config in configs.values():
            config._attn_implementation = ATTENTION if self._exchangeable else FALLBACK
        paths = {id(module): path for path, module in model.named_modules()}
        registries = {
            id(found): found for file in self._modeling if (found := getattr(file, REGISTRY, None)) is not None
        }
        with ExitStack() as undo:
            for registry in registries.values():
                registry[ATTENTION] = self.attention
                undo.callback(registry.pop, ATTENTION)
            for watch in (
                register_module_forward_pre_hook(lambda module, _: self.entered.append(paths.get(id(module), ""))),
                register_module_forward_hook(lambda *_: self._leave()),
            ):
                undo.callback(watch.remove)
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

    def _leave(self) -> None:
        self.entered.pop()

    def _causal_mask(self, config: object, inputs_embeds: Tensor, attention_mask: object, **kwargs: object) -> Tensor:
        """What models that use no registry call to make a mask."""
        if attention_mask is not None or any(kwargs.get(f"{word}_mask_function") for word in ("or", "and")):
            self.problems.add("a mask is more than causal")
        mask: Tensor = OPS.causal_mask(inputs_embeds)
        return mask

    def _replace_modules(self, model: PreTrainedModel) -> None:
        for path, module in model.named_modules():
            name = type(module).__name__
            if name.endswith("Experts"):
                self.problems.add(f"mixtures of experts ({name}) are not supported", path)
                self.unsupported |= {path, self._block(path)}
                module.forward = lambda x, *_, **__: OPS.experts(x)
            elif next(module.children(), None) is not None:
                continue
            elif "norm" in name.lower():
                self._replace_norm(path, module)
            elif "rotary" in name.lower():
                self.rope.replace_module(path, module)
            elif type(module).__module__ in _ACTIVATIONS and (kind := classify_activation(module)) is not None:
                module.forward = lambda x, kind=kind: OPS.activation(x, kind)

    def _block(self, path: str) -> str:
        """The module around experts, which is a part of a layer, or the experts themselves."""
        block = path.rpartition(".")[0]
        return path if block.rpartition(".")[0] in (self.layers.path, "") else block

    def _replace_norm(self, path: str, module: nn.Module) -> None:
        kind = classify_norm(module)
        if kind is None:
            self.problems.add(f"norm {type(module).__name__} matches no known formula", path)
            return
        self.norms[path] = 0
        attrs = asdict(kind)

        def forward(x: Tensor, *_: object, **__: object) -> Any:
            self.norms[path] += 1
            return OPS.norm(x, *norm_parameters(module), **attrs)

        module.forward = forward

    def _replace_head(self, model: PreTrainedModel) -> None:
        any_model: Any = model
        head = any_model.get_output_embeddings()
        if not isinstance(head, nn.Module):
            self.problems.add(f"{type(model).__name__} has no output embeddings")
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
            self.problems.add(f"attention is given {', '.join(unknown)}", self.entered[-1])
        if layer is None:
            self.problems.add("attention doesn't know its layer", self.entered[-1])
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
            self.problems.add(f"layers of type {types[layer]} are not supported", self.entered[-1])
        elif (types[layer] == "sliding_attention") != bool(window):
            text = f"attention in a layer of type {types[layer]} is given window {window}"
            self.problems.add(text, self.entered[-1])


def _modeling_files(model: PreTrainedModel) -> list[ModuleType]:
    """The files that define the model's parts: modules of torch and of transformers itself are shared by all models."""
    names = {type(module).__module__ for module in model.modules()}
    shared = ("torch.", "transformers.")
    return [sys.modules[x] for x in sorted(names) if x.startswith("transformers.models.") or not x.startswith(shared)]
