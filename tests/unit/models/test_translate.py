"""Every torch op that is translated means what torch computes, for more tokens than it was exported with."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from toolkit.compiler.interpret import from_tensors, interpret
from toolkit.compiler.ir import Graph
from toolkit.compiler.shapes import Sym
from toolkit.compiler.verify import find_problems
from toolkit.models.aten import HANDLERS
from toolkit.models.emitter import Emitter
from toolkit.models.problems import Problems
from toolkit.models.rope import RopeHooks
from toolkit.models.translate import WRAPPER, Operand, Positional, Traced, Translator, Weight

CONTEXT = 32


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(3)
        self.square = nn.Parameter(torch.randn(8, 8, generator=random))
        self.wide = nn.Parameter(torch.randn(8, 12, generator=random))
        self.table = nn.Parameter(torch.randn(CONTEXT + 4, 8, generator=random))
        self.vector = nn.Parameter(torch.randn(8, generator=random))
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("row", torch.linspace(0.5, 2.0, 8))


class Step(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = Model()
        self.function = function

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.function(self.model, x, positions)


def translate(step: Step) -> tuple[Graph | None, list[str]]:
    example = torch.randn(1, 5, 8), torch.arange(5)[None]
    count = Dim("count", min=2, max=1 << 20)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(step, example, dynamic_shapes=({1: count}, {1: count}), strict=False)
    emitter, tokens = Emitter(), Sym("T", 64)
    x = emitter.input("x", "float32", (tokens, 8))
    positions = emitter.input("positions", "int32", (tokens,))
    inputs = iter((Traced(x, 0), Positional.table(torch.arange(CONTEXT)[None])))
    operands: dict[str, Operand] = {}
    for spec in program.graph_signature.input_specs:
        target = (spec.target or "").removeprefix(WRAPPER + ".")
        tensor: Any = getattr(step.model, target, None)
        if tensor is None:
            operands[spec.arg.name] = next(inputs) if spec.target is None else program.constants[spec.target]
        elif isinstance(tensor, nn.Parameter):
            operands[spec.arg.name] = Weight(target, tuple(tensor.shape))
        else:
            operands[spec.arg.name] = tensor
    program.graph.eliminate_dead_code()
    shapes = [node.meta["val"].shape for node in program.graph.nodes if node.op == "placeholder"]
    problems = Problems()
    rope, symbols = RopeHooks(CONTEXT, problems.add), {shapes[-1][1].node.expr: tokens}
    translator = Translator(emitter, rope, HANDLERS, symbols, positions, problems=problems)
    result = translator.run(program.graph, operands)
    graph = emitter.finish(result, "y") if result is not None and not problems else None
    return graph, problems.sentences()


CASES: dict[str, Callable[..., Tensor]] = {
    "linear": lambda m, x, p: F.linear(x, m.square),
    "linear bias": lambda m, x, p: F.linear(x, m.square, m.vector),
    "addmm": lambda m, x, p: torch.addmm(m.vector, x.view(-1, 8), m.square).view(x.shape),
    "matmul parameter": lambda m, x, p: x @ m.wide,
    "matmul": lambda m, x, p: (x[..., None] @ x[:, :, None]).flatten(2),
    "embedding": lambda m, x, p: F.embedding(p, m.table) + x,
    "embedding shifted": lambda m, x, p: F.embedding(p + 2, m.table) + x,
    "position table": lambda m, x, p: x * torch.log(1 + torch.floor(p / 4))[..., None],
    "position gather": lambda m, x, p: x + m.row[p % 8][..., None],
    "position heads": lambda m, x, p: x.view(1, -1, 2, 4).transpose(1, 2) * p.sqrt()[:, None, :, None],
    "scalars": lambda m, x, p: (2 - x) / 3 + 1 / (x.abs() + 1) - x * 2,
    "constants": lambda m, x, p: x * m.scale + m.row * 2 - torch.tensor(0.25),
    "subtract scaled": lambda m, x, p: torch.sub(x, 0.5, alpha=3),
    "powers": lambda m, x, p: x**2 + (x.abs() + 0.1) ** 1.5 + 2**x + x**1,
    "vectors": lambda m, x, p: (x + m.vector) * m.vector - x / (m.vector + 4),
    "maxima": lambda m, x, p: torch.maximum(x, m.vector) + torch.minimum(x, -x) + torch.min(x, m.row),
    "functions": lambda m, x, p: x.exp() + x.neg().tanh() + (x.abs() + 1).log() + x.abs().sqrt() + x.expm1(),
    "rsqrt": lambda m, x, p: (x.square() + 1).rsqrt() + x.sin() + x.cos(),
    "activations": lambda m, x, p: F.silu(x) + F.gelu(x) + F.gelu(x, approximate="tanh") + F.relu(x) + x.sigmoid(),
    "softplus": lambda m, x, p: F.softplus(x),
    "softmax": lambda m, x, p: x.softmax(-1, dtype=torch.float32),
    "softmax heads": lambda m, x, p: x.view(1, -1, 2, 4).softmax(2),
    "means": lambda m, x, p: x - x.mean(-1, keepdim=True),
    "sums": lambda m, x, p: x.view(1, -1, 2, 4).sum(2),
    "maximum along": lambda m, x, p: x.view(1, -1, 2, 4).amax((3,)),
    "layer norm": lambda m, x, p: F.layer_norm(x, (8,), m.vector, m.vector),
    "layer norm plain": lambda m, x, p: F.layer_norm(x, (8,)),
    "rms norm": lambda m, x, p: F.rms_norm(x, (8,), m.vector, 1e-6),
    "rms norm plain": lambda m, x, p: F.rms_norm(x, (8,)),
    "comparison": lambda m, x, p: torch.where(x > 0, x, m.vector * x) + (x <= m.vector).float(),
    "clamps": lambda m, x, p: x.clamp(-0.5, 0.5) + x.clamp(min=0.1) + x.clamp_max(0.2),
    "casts": lambda m, x, p: x.to(torch.float64).to(torch.float32).contiguous().clone() * 2,
    "transposes": lambda m, x, p: x.view(1, -1, 2, 4).transpose(1, 2).transpose(-1, -2),
    "permutes": lambda m, x, p: x.view(1, -1, 2, 4).permute(2, 0, 3, 1),
    "squeezes": lambda m, x, p: x.squeeze(0).unsqueeze(1).unsqueeze(0).squeeze(2) * 2,
    "slices": lambda m, x, p: x[..., 2:6] + x[:, :, -4:],
    "all of it": lambda m, x, p: x[:, 0:][:, :, :8] * 2,
    "selects": lambda m, x, p: x.view(1, -1, 2, 4)[:, :, 1] + x[0, :, 3][..., None],
    "transposed parameter": lambda m, x, p: (x @ m.square.T) + F.linear(x, m.square.transpose(0, 1)),
    "expands a part": lambda m, x, p: x.view(1, -1, 4, 1, 2).expand(-1, -1, -1, 3, -1).flatten(2),
    "broadcasts": lambda m, x, p: torch.broadcast_to(x[..., :1], x.shape) * 2,
    "repeats": lambda m, x, p: x.repeat(1, 1, 3) + x[..., 1:2].repeat_interleave(24, -1),
    "repeats each": lambda m, x, p: x.view(1, -1, 2, 4).repeat_interleave(3, 2),
    "gathers": lambda m, x, p: x[..., [-2, 3, 3]] + x[:, :, [1]],
    "splits": lambda m, x, p: torch.cat([x.split(4, -1)[1], x.chunk(2, -1)[0], x.split([2, 6], -1)[1]], -1),
    "stacks": lambda m, x, p: torch.stack((x[..., ::1], -x), -1).flatten(-2),
    "stack in front": lambda m, x, p: torch.stack((x, -x), 0),
    "expands": lambda m, x, p: x.view(1, -1, 2, 4).expand(1, -1, 2, 4) * 2,
    "interleaved heads": lambda m, x, p: x.view(1, -1, 2, 4).transpose(1, 2)[..., :2].neg().transpose(1, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_means_what_torch_computes(name: str) -> None:
    step = Step(CASES[name])
    graph, problems = translate(step)
    assert problems == []
    assert graph is not None
    assert find_problems(graph) == []
    for tokens in (3, 11):
        random = torch.Generator().manual_seed(tokens)
        x = torch.randn(1, tokens, 8, generator=random)
        positions = torch.randperm(CONTEXT, generator=random)[None, :tokens]
        with torch.no_grad():
            expected = step(x, positions).numpy()
        inputs = {"x": x[0].numpy(), "positions": positions[0].numpy().astype(np.int32)}
        weights = {key: value.detach().numpy() for key, value in step.model.named_parameters()}
        (found,) = interpret(graph, inputs, from_tensors(weights)).values()
        assert math.prod(found.shape) == math.prod(expected.shape)
        np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x, p: x.cumsum(-1), "aten.cumsum.*no IR op is known"),
        (lambda m, x, p: x[..., ::2], "slices with a step"),
        (lambda m, x, p: x[:, :2] * 2, "along the tokens"),
        (lambda m, x, p: x * p.cumsum(-1)[..., None], "positions of several tokens"),
        (lambda m, x, p: x * torch.arange(x.shape[1])[:, None], "positions of several tokens"),
        (lambda m, x, p: x * (p == p.max())[..., None], "no table over the positions"),
        (lambda m, x, p: x.expand(3, -1, -1), "works along the batch"),
        (lambda m, x, p: x[:, :1].expand(-1, x.shape[1], -1), "along the tokens"),
        (lambda m, x, p: x[:, m.row[:3].long()], "among the tokens"),
        (lambda m, x, p: F.scaled_dot_product_attention(x, x, x), r"expected q\[1, Hq, T, D\]"),
        (
            lambda m, x, p: F.scaled_dot_product_attention(*[x.view(1, -1, 2, 4).transpose(1, 2)] * 3)[:, 0],
            "in none of the layers",
        ),
        (lambda m, x, p: F.layer_norm(x.view(1, -1, 2, 4), (2, 4)), "over 2 axes"),
    ],
)
def test_refuses_what_it_does_not_know(function: Callable[..., Tensor], reason: str) -> None:
    graph, problems = translate(Step(function))
    assert graph is None
    (problem,) = problems
    assert re.search(reason, problem)


def test_names_everything_that_is_missing() -> None:
    def function(m: Model, x: Tensor, p: Tensor) -> Tensor:
        values, _ = (x.cumsum(-1) * 2).topk(2, -1)
        return values + x.erfinv().sum(-1, keepdim=True)

    graph, problems = translate(Step(function))
    assert graph is None
    assert [problem.partition(" ")[0] for problem in problems] == ["aten.cumsum", "aten.topk", "aten.erfinv"]
    assert all("test_translate.py:" in problem for problem in problems)
