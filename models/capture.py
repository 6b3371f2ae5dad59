"""Capture a model: a Hugging Face configuration becomes a Graph, through torch.export and a translation of its ops."""

from __future__ import annotations

import copy
import logging
import math
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..compiler.ir import Graph
from ..compiler.shapes import Bounds, Sym
from ..runtime.errors import InternalError, UserError
from .aten import HANDLERS
from .audit import find_missing, other_parts
from .emitter import UNKNOWN, Emitter, LayersDiffer
from .hooks import Hooks
from .problems import error_text
from .translate import WRAPPER, Operand, Positional, Traced, Translator, Weight

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LARGEST_REAL = 1 << 22
"""Numbers in a tensor that a model may make on the CPU while it is built."""
EXAMPLE_TOKENS, EXAMPLE_ROWS = 13, 5
"""Sizes of the example inputs; the export treats them as unknown."""


def capture(
    config: PreTrainedConfig, *, dtype: str, bounds: Bounds, has_weight: Callable[[str], bool], stamp: bool = True
) -> Graph:
    """The graph of one step of a causal language model: inputs tokens[T], positions[T], rows[R]; output logits[R, V].

    `dtype` is what the model computes in, which decides how its own constants are rounded; values of the graph are
    float32. `has_weight` says whether the checkpoint has a tensor: tied weights become one parameter, named as the
    tensor that is there. With `stamp`, layers like earlier ones are copied instead of traced.

    Raises MissingPartsError, listing everything that is missing, if the architecture can't be captured.
    """
    try:
        try:
            return _Capture(config, dtype, bounds, has_weight, stamp).graph()
        except LayersDiffer:
            return _Capture(config, dtype, bounds, has_weight, stamp=False).graph()
    except (UserError, InternalError):
        raise
    except Exception as error:
        models: Any = AutoModelForCausalLM._model_mapping
        model = f"{models[type(config)].__name__}, of type {config.model_type},"
        raise InternalError(f"capturing {model} failed{_modeling_line(error)}: {error_text(error)}") from error


class MissingPartsError(UserError):
    """A model can't be captured: `problems` say why, and `found` counts the ops of each kind that could be."""

    def __init__(self, model_type: str, problems: Sequence[str], found: Mapping[str, int]) -> None:
        self.problems, self.found = tuple(problems), dict(found)
        count = "1 thing is" if len(problems) == 1 else f"{len(problems)} things are"
        lines = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"{model_type} models can't be compiled yet: {count} missing:{lines}")


class _Capture:
    """One attempt: build the model without weights, export it, translate it, check the result."""

    def __init__(
        self, config: PreTrainedConfig, dtype: str, bounds: Bounds, has_weight: Callable[[str], bool], stamp: bool
    ) -> None:
        self.config, self.bounds, self.has_weight = config, bounds, has_weight
        self.model = build_model(config, dtype)
        self.buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.hooks = Hooks(self.model, bounds.max_context, stamp=stamp)
        for problem in other_parts(config):
            self.hooks.problems.add(problem)
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        _fake(self.model, self.fakes)
        _untie(self.model, has_weight)
        self.tensors = _parameter_tensors(self.model, has_weight)

    def graph(self) -> Graph:
        problems, emitter = self.hooks.problems, Emitter(self.hooks.layers.path)
        try:
            program = export(self.model, self.hooks, self.fakes)
        except Exception as error:
            problems.add(*_failure(error, self.hooks.entered))
            raise self._missing({"norm": len(self.hooks.norms)}) from error
        graph = self._translate(program, emitter)
        if graph is not None and not problems:
            for problem in find_missing(graph, self.config, self.hooks, self.tensors, self.has_weight):
                problems.add(problem)
        if graph is None or problems:
            ops = graph.ops if graph is not None else ()
            raise self._missing(Counter(op.kind for op in ops if op.kind != UNKNOWN))
        return graph

    def _missing(self, found: Mapping[str, int]) -> MissingPartsError:
        return MissingPartsError(self.config.model_type, self.hooks.problems.sentences(), found)

    def _translate(self, program: ExportedProgram, emitter: Emitter) -> Graph | None:
        count, row_count = Sym("T", self.bounds.max_tokens), Sym("R", self.bounds.max_rows)
        tokens = emitter.input("tokens", "int32", (count,))
        positions = emitter.input("positions", "int32", (count,))
        rows = emitter.input("rows", "int32", (row_count,))
        table = Positional.table(torch.arange(self.bounds.max_context)[None])
        inputs = iter((Traced(tokens, 0), table, Traced(rows)))
        operands: dict[str, Operand] = {}
        for spec in program.graph_signature.input_specs:
            name, target = spec.arg.name, (spec.target or "").removeprefix(WRAPPER + ".")
            if spec.kind == InputKind.USER_INPUT:
                operands[name] = next(inputs)
            elif spec.kind == InputKind.PARAMETER:
                operands[name] = Weight(self.tensors[target], tuple(self.model.get_parameter(target).shape))
            else:
                constant = self.buffers.get(target, program.constants.get(spec.target or ""))
                assert isinstance(constant, Tensor)
                operands[name] = constant
        program.graph.eliminate_dead_code()
        shapes = [node.meta["val"].shape for node in program.graph.nodes if node.op == "placeholder"]
        symbols = {shapes[-2][1].node.expr: count, shapes[-1][0].node.expr: row_count}
        hooks = self.hooks
        translator = Translator(
            *(emitter, hooks.rope, HANDLERS, symbols, positions),
            problems=hooks.problems,
            unsupported=hooks.unsupported,
        )
        logits = translator.run(program.graph, operands)
        return emitter.finish(logits, "logits") if logits is not None else None


def _failure(error: Exception, entered: Sequence[str]) -> tuple[str, str]:
    """Why an export failed, and in which module: `entered` are the calls it was in."""
    if "Constraints violated" in str(error):
        return "the model can't be traced for any number of tokens: it computes with a fixed one, in a loop perhaps", ""
    return f"the model can't be traced{_modeling_line(error)}: {error_text(error)}", entered[-1] if entered else ""


def _modeling_line(error: Exception) -> str:
    """Where in the modeling code an error happened, if it did there."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "modeling_" in frame.filename]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


# --- building and exporting -------------------------------------------------------------------------------------------


def build_model(config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    """The model with parameters on the meta device and real buffers. Raises UserError for an unknown model type."""
    if dtype not in DTYPES:
        raise UserError(f"expected dtype {', '.join(DTYPES)}, found {dtype!r}")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UserError(
            f"{config.model_type} models can't be compiled: transformers has no causal language model for them"
        )
    make: Any = AutoModelForCausalLM.from_config
    try:
        with warnings.catch_warnings(), init_empty_weights(include_buffers=False), _OnMeta():
            warnings.simplefilter("ignore")
            model: Any = make(copy.deepcopy(config), dtype=DTYPES[dtype], attn_implementation="eager")
        model.tie_weights()
        model.eval()
    except Exception as error:
        raise UserError(
            f"transformers can't build a {config.model_type} model from this config.json: {error_text(error)}"
        ) from error
    assert isinstance(model, PreTrainedModel)
    return model


class _OnMeta(TorchFunctionMode):
    """Large tensors that are made without numbers, as parameters are, are on meta from the start: else they would be
    for a moment on the CPU, where there may be no room."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        where = {}
        if function is torch.empty:
            size = args[0] if args and isinstance(args[0], Sequence) else args
            where = {"device": "meta"} if math.prod(size) > LARGEST_REAL else {}
        return function(*args, **(kwargs or {}) | where)


class _Step(nn.Module):
    """What is exported: logits of the chosen rows of flattened tokens."""

    def __init__(self, model: PreTrainedModel, hooks: Hooks) -> None:
        super().__init__()
        self.model = model
        self.hooks = hooks

    def forward(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        self.hooks.begin(rows)
        logits: Tensor = self.model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        return logits


def export(model: PreTrainedModel, hooks: Hooks, fakes: FakeTensorMode) -> ExportedProgram:
    """Export a model of fake tensors for T tokens in a batch of 1 and R rows; no op writes to its inputs."""
    with fakes:
        tokens = torch.zeros(1, EXAMPLE_TOKENS, dtype=torch.long)
        rows = torch.zeros(EXAMPLE_ROWS, dtype=torch.long)
    count, row_count = Dim("T", min=2, max=1 << 20), Dim("R", min=2, max=1 << 20)
    with torch.no_grad(), hooks.installed(model), _quiet():
        program = torch.export.export(
            _Step(model, hooks),
            (tokens, tokens.clone(), rows),
            dynamic_shapes=({1: count}, {1: count}, {0: row_count}),
            strict=False,
        )
        return program if _make_functional(program.graph) else program.run_decompositions({})


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings, and without the traceback that torch logs of an error before it raises it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _fake(model: PreTrainedModel, fakes: FakeTensorMode) -> None:
    """Put fake tensors in place of parameters and buffers; tied parameters stay tied.

    Fakes claim to be on the CPU. On meta, constants that the model makes while it is traced would have no numbers.
    """
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            with fakes:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=False) if is_parameter else empty
        return made[id(tensor)]

    for module in model.modules():
        tensors: dict[str, Tensor | None]
        for tensors in (module._parameters, module._buffers):  # type: ignore[assignment]
            tensors |= {name: fake(tensor) for name, tensor in tensors.items() if tensor is not None}


def _make_functional(graph: fx.Graph) -> bool:
    """Where ops write to a value that nothing else sees, as `(x + y).mul_(z)` does, put those that return a new one.

    Whether that were all: others need another trace of the whole model.
    """
    storages = Counter(filter(None, map(_storage, graph.nodes)))
    found = [(node, _functional(node, storages)) for node in graph.nodes if _mutates(node)]
    for node, target in found:
        if target is not None:
            node.target = target
    return all(target is not None for _, target in found)


def _functional(node: fx.Node, storages: Mapping[int, int]) -> OpOverload | None:
    """The op that returns what this one writes to its first operand, if the operand has no other use and no alias, and
    no other dtype has a say in the result.
    """
    operand, target = node.args[0], node.target
    assert isinstance(target, OpOverload)
    packet = getattr(torch.ops.aten, target._schema.name.removeprefix("aten::").removesuffix("_"), None)
    found = getattr(packet, target._overloadname, None)
    if not isinstance(operand, fx.Node) or operand.op != "call_function" or list(operand.users) != [node]:
        return None
    if storages.get(_storage(operand) or 0) != 2:  # the operand and the result
        return None
    dtypes = {each.meta["val"].dtype for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)}
    return found if isinstance(found, OpOverload) and len(dtypes) == 1 else None


def _storage(node: fx.Node) -> int | None:
    """What tells apart the memory of a node's value."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _untie(model: PreTrainedModel, has_weight: Callable[[str], bool]) -> None:
    """Part tied parameters that the checkpoint has more than once: they may differ."""
    for tied in _tied_names(model):
        for name in [name for name in tied if has_weight(name)][1:]:
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, nn.Parameter(torch.empty_like(model.get_parameter(name))))


def _parameter_tensors(model: PreTrainedModel, has_weight: Callable[[str], bool]) -> dict[str, str]:
    """The checkpoint tensor of each parameter: of tied ones, the one that is there."""
    groups = ((tied, next(filter(has_weight, tied), tied[0])) for tied in _tied_names(model))
    return {name: tensor for tied, tensor in groups for name in tied}


def _tied_names(model: PreTrainedModel) -> list[list[str]]:
    """The names of each parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return list(groups.values())
