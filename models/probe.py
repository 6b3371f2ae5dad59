"""Numeric classification of norms, activations, rotary embeddings and masks.

Modeling code uses the same names for different maths, so nothing here trusts a name: a module or function is run on
random inputs and compared with reference formulas. The answer is a kind of the op table, or None if none agrees.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOLERANCE = 2e-5
"""Largest difference, relative to the largest value, at which two float32 computations count as the same formula."""

TINY = 1e-10
"""Scale of inputs that are small next to any epsilon."""

WIDTH = (16,)
"""Shape of a row for norms that take any."""

Layout = Literal["cat", "repeat", "whole"]

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
}
"""Kinds of the `activation` op that models have as modules."""


@dataclass(frozen=True)
class NormKind:
    """What a norm computes: attributes of the `norm` op."""

    kind: Literal["rms", "layer", "l2"]
    eps: float
    offset: float = 0.0


@dataclass(frozen=True)
class RopeKind:
    """How an apply function uses its tables: attributes of the `rope` op, and which columns of the tables it reads."""

    style: Literal["half", "pair"]
    layout: Layout
    """The tables have each column twice, one half after the other ("cat") or side by side ("repeat"), or once."""
    sign: float = 1.0
    """-1 if it rotates the other way."""

    def columns(self, table: Tensor) -> Tensor:
        """The distinct columns of a table [.., W]."""
        half = table.shape[-1] // 2
        return {"cat": table[..., :half], "repeat": table[..., ::2], "whole": table}[self.layout]


@dataclass(frozen=True)
class MaskKind:
    """What a mask does besides hiding later tokens: attributes of the `attention` op."""

    slopes: Tensor | None
    """ALiBi [H], float32: a head's scores sink by its slope for each token of distance."""


def agree(found: Tensor, expected: Tensor) -> bool:
    """Whether two results come from the same formula. NaN and different shapes never agree."""
    if found.shape != expected.shape:
        return False
    difference = (found.double() - expected.double()).abs().max()
    return bool(difference <= TOLERANCE * expected.double().abs().max())


# --- norms ------------------------------------------------------------------------------------------------------------


def norm_parameters(module: nn.Module) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    """A norm's weight and bias."""
    own = dict(module.named_parameters(recurse=False))
    bias = own.pop("bias", None)
    return next(iter(own.values()), None), bias


def reference_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: NormKind) -> Tensor:
    """The `norm` op in float64 over the last axis."""
    wide = x.double()
    if kind.kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    squares = wide.square()
    total = squares.sum(-1, keepdim=True) if kind.kind == "l2" else squares.mean(-1, keepdim=True)
    out = wide * torch.rsqrt(total + kind.eps)
    out = out if weight is None else out * (weight.double() + kind.offset)
    return out if bias is None else out + bias.double()


def classify_norm(module: nn.Module) -> NormKind | None:
    """The kind of a norm, its parameters on meta or not, or None.

    The epsilon is measured: for an input far smaller than it, y = x * w / sqrt(eps).
    """
    random = torch.Generator().manual_seed(0)
    probe = _randomized(module, random)
    weight, bias = norm_parameters(probe)
    if len(list(probe.parameters())) != (weight is not None) + (bias is not None):
        return None
    shape = weight.shape if weight is not None else getattr(module, "normalized_shape", WIDTH)
    x = torch.randn(7, *shape, generator=random)
    y = _run(probe, x)
    if bias is not None:
        probe.bias = nn.Parameter(torch.zeros_like(bias), requires_grad=False)  # beside it a tiny y would lose digits
    tiny = _run(probe, x * TINY)
    if y is None or tiny is None:
        return None
    kinds: tuple[Literal["rms", "layer", "l2"], ...] = ("rms", "layer", "l2")
    for kind, offset in product(kinds, (0.0, 1.0) if weight is not None else (0.0,)):
        unit = reference_norm(x * TINY, weight, None, NormKind(kind, 1.0, offset))
        guess = NormKind(kind, _epsilon(tiny, unit), offset)
        expected = reference_norm(x, weight, bias, guess), reference_norm(x * TINY, weight, None, guess)
        if agree(y, expected[0]) and agree(tiny, expected[1]):
            return guess
    return None


def _randomized(module: nn.Module, random: torch.Generator) -> nn.Module:
    """A float32 copy with random parameters in 0.25 .. 1.25."""
    probe = copy.deepcopy(module)
    for name, parameter in module.named_parameters(recurse=False):
        setattr(probe, name, nn.Parameter(torch.rand(parameter.shape, generator=random) + 0.25, requires_grad=False))
    return probe.eval()


def _run(function: Callable[..., object], *inputs: Tensor) -> Tensor | None:
    """The result of a call whose result should look like its first input, or None if it can't be made or doesn't."""
    try:
        with torch.no_grad():
            found = function(*inputs)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return None
    return found if isinstance(found, Tensor) and found.shape == inputs[0].shape else None


def _epsilon(tiny: Tensor, unit: Tensor) -> float:
    """The epsilon of a norm of tiny inputs, from its result and the result for an epsilon of 1: the simplest number
    that float32 results can't tell from the measured one.
    """
    measured = float((unit / tiny.double()).square().median())
    simple = (float(f"{measured:.{digits}e}") for digits in range(8))
    return next((eps for eps in simple if abs(eps - measured) <= 2e-6 * measured), measured)


# --- activations ------------------------------------------------------------------------------------------------------


def classify_activation(module: nn.Module) -> str | None:
    """The kind of an elementwise module without parameters, or None."""
    if any(True for _ in module.parameters()):
        return None
    x = torch.linspace(-6.0, 6.0, 241)
    found = _run(module, x)
    if found is None:
        return None
    return next((kind for kind, function in ACTIVATIONS.items() if agree(found, function(x))), None)


# --- rotary embeddings ------------------------------------------------------------------------------------------------


def reference_rope(x: Tensor, cos: Tensor, sin: Tensor, style: Literal["half", "pair"]) -> Tensor:
    """The `rope` op: x[.., T, D] with cos and sin [T, Dr/2]."""
    half = cos.shape[-1]
    rotated = x[..., : 2 * half]
    if style == "half":
        a, b = rotated[..., :half], rotated[..., half:]
        out = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    else:
        a, b = rotated[..., ::2], rotated[..., 1::2]
        out = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([out, x[..., 2 * half :]], -1)


def classify_rope(apply: Callable[[Tensor, Tensor, Tensor], Tensor], dim: int, table: Tensor) -> RopeKind | None:
    """How `apply(x[1, H, T, dim], cos[1, T, W], sin[1, T, W])` rotates, or None.

    `table` [P, W] is a real table: it shows how columns repeat. The rotation is probed with random ones laid out so.
    """
    random = torch.Generator().manual_seed(0)
    tokens, width = 5, table.shape[-1]
    x = torch.randn(1, 3, tokens, dim, generator=random)
    styles: tuple[Literal["half", "pair"], ...] = ("half", "pair")
    for layout in _layouts(table):
        distinct = width if layout == "whole" else width // 2
        cos, sin = torch.randn(2, tokens, distinct, generator=random)
        found = _run(apply, x, _widen(cos, layout), _widen(sin, layout))
        if found is None or 2 * distinct > dim:
            continue
        for style, sign in product(styles, (1.0, -1.0)):
            if agree(found, reference_rope(x, cos, sin * sign, style)):
                return RopeKind(style, layout, sign)
    return None


def _layouts(table: Tensor) -> tuple[Layout, ...]:
    """How a table's columns may repeat."""
    half = table.shape[-1] // 2
    if table.shape[-1] % 2 == 0 and torch.equal(table[:, :half], table[:, half:]):
        return ("cat", "whole")
    if table.shape[-1] % 2 == 0 and torch.equal(table[:, ::2], table[:, 1::2]):
        return ("repeat", "whole")
    return ("whole",)


def _widen(distinct: Tensor, layout: Layout) -> Tensor:
    """A table [1, T, W] from its distinct columns [T, ..]."""
    if layout == "cat":
        return distinct.repeat(1, 2)[None]
    return distinct.repeat_interleave(2 if layout == "repeat" else 1, 1)[None]


# --- masks ------------------------------------------------------------------------------------------------------------

HIDDEN = -5e3
"""What is added to a score to hide it is at most this."""
ROUNDING = 2.0**-7
"""Largest difference, relative to the largest value, at which a bias computed in bfloat16 counts as ALiBi."""


def classify_mask(mask: Tensor) -> MaskKind | None:
    """The kind of a mask [.., n, n] of one sequence, bool or added to the scores, or None.

    An ALiBi bias (https://arxiv.org/abs/2108.12409) may count from any token: softmax is the same for all of a row.
    """
    bias = torch.where(mask, 0.0, 2 * HIDDEN) if mask.dtype == torch.bool else mask.float()
    bias = bias.reshape(-1, *mask.shape[-2:])
    seen = torch.ones_like(bias[0], dtype=torch.bool).tril()
    if bias[:, ~seen].max() > HIDDEN:
        return None
    slopes = bias[:, 1, 1] - bias[:, 1, 0]
    place = torch.arange(bias.shape[-1])
    expected = slopes[:, None, None] * (place[None, :] - place[:, None]) + bias.diagonal(dim1=1, dim2=2)[..., None]
    difference = (bias - expected)[:, seen].abs().max()
    if not difference <= ROUNDING * bias[:, seen].abs().max():
        return None
    return MaskKind(slopes if slopes.any() else None)
