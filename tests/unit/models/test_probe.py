"""Norms, activations, rotary embeddings and masks are recognized by what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.activations import ACT2FN

from toolkit.models.probe import (
    NormKind,
    RopeKind,
    classify_activation,
    classify_mask,
    classify_norm,
    classify_rope,
)


class Rms(nn.Module):
    def __init__(self, shape: tuple[int, ...], eps: float, *, offset: float = 0.0, power: float = 2.0) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(shape))
        self.eps, self.offset, self.power = eps, offset, power

    def forward(self, x: Tensor) -> Tensor:
        size = x.abs().pow(self.power).mean(-1, keepdim=True)
        return x * (size + self.eps).rsqrt() * (self.gain + self.offset)


class Layer1p(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        assert self.weight is not None
        return F.layer_norm(input, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class L2(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class TwoGains(Rms):
    def __init__(self) -> None:
        super().__init__((16,), 1e-6)
        self.other = nn.Parameter(torch.ones(16))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Rms((16,), 1e-5), NormKind("rms", 1e-5)),
        (Rms((16,), 1.5625e-07), NormKind("rms", 1.5625e-07)),
        (Rms((16,), 1e-6, offset=1.0), NormKind("rms", 1e-6, 1.0)),
        (Rms((3, 16), 1e-6), NormKind("rms", 1e-6)),
        (nn.RMSNorm(16, elementwise_affine=False, eps=1e-6), NormKind("rms", 1e-6)),
        (nn.LayerNorm(16), NormKind("layer", 1e-5)),
        (nn.LayerNorm(16, bias=False, eps=1e-6), NormKind("layer", 1e-6)),
        (nn.LayerNorm(16, elementwise_affine=False), NormKind("layer", 1e-5)),
        (Layer1p(16), NormKind("layer", 1e-5, 1.0)),
        (L2(), NormKind("l2", 1e-6)),
    ],
)
def test_norms(module: nn.Module, expected: NormKind) -> None:
    assert classify_norm(module) == expected
    assert classify_norm(module.to("meta")) == expected


@pytest.mark.parametrize("module", [Rms((16,), 1e-6, power=1.0), TwoGains(), nn.LayerNorm((3, 16)), nn.Linear(16, 16)])
def test_other_formulas_are_no_norms(module: nn.Module) -> None:
    assert classify_norm(module) is None


@settings(max_examples=50, deadline=None)
@given(exponent=st.integers(-12, -3), digit=st.integers(100, 999), offset=st.sampled_from([0.0, 1.0]))
def test_epsilons_are_measured(exponent: int, digit: int, offset: float) -> None:
    eps = float(f"{digit / 100}e{exponent}")
    assert classify_norm(Rms((24,), eps, offset=offset)) == NormKind("rms", eps, offset)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("silu", "silu"),
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("quick_gelu", "quick_gelu"),
        ("relu", "relu"),
        ("relu2", "relu2"),
        ("sigmoid", "sigmoid"),
        ("tanh", "tanh"),
        ("mish", None),
        ("leaky_relu", None),
    ],
)
def test_activations(name: str, kind: str | None) -> None:
    assert classify_activation(ACT2FN[name]) == kind


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    return torch.cat((turned * cos[:, None] + rotate_half(turned) * sin[:, None], rest), -1)


def pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    return torch.cat((turned * cos[:, None] + rotate_pairs(turned) * sin[:, None], rest), -1)


def repeated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    columns = cos.shape[-1] // 2
    cos, sin = (t[..., :columns].repeat_interleave(2, -1) for t in (cos, sin))
    return pairs(x, cos, sin)


def whole(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return half(x, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))


def backward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return half(x, cos, -sin)


def unknown(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return half(x, cos, sin.square())


@pytest.mark.parametrize(
    ("function", "layout", "dim", "expected"),
    [
        (half, "cat", 16, RopeKind("half", "cat")),
        (half, "cat", 24, RopeKind("half", "cat")),
        (pairs, "repeat", 16, RopeKind("pair", "repeat")),
        (pairs, "repeat", 40, RopeKind("pair", "repeat")),
        (repeated_pairs, "cat", 16, RopeKind("pair", "cat")),
        (whole, "whole", 32, RopeKind("half", "whole")),
        (backward, "cat", 16, RopeKind("half", "cat", -1.0)),
        (unknown, "cat", 16, None),
        (half, "cat", 8, None),
    ],
)
def test_rotations(function: Any, layout: str, dim: int, expected: RopeKind | None) -> None:
    angles = torch.arange(50.0)[:, None] * torch.logspace(0, -3, 8 if layout != "whole" else 16)
    table = {
        "cat": torch.cat((angles, angles), -1),
        "repeat": angles.repeat_interleave(2, -1),
        "whole": angles,
    }[layout]
    assert classify_rope(function, dim, table.cos()) == expected


# --- masks ------------------------------------------------------------------------------------------------------------

COUNT = 9
CAUSAL = torch.ones(COUNT, COUNT, dtype=torch.bool).tril()
SLOPES = torch.tensor([0.5, 0.25, 0.0625])


def alibi(keys: Tensor) -> Tensor:
    """A bias [1, 3, n, n] that grows with the keys' places, and hides later ones."""
    bias = (SLOPES[:, None, None] * keys).expand(3, COUNT, COUNT)
    return bias.masked_fill(~CAUSAL, torch.finfo(torch.float32).min)[None]


@pytest.mark.parametrize("hidden", [-1e4, -torch.inf])
def test_causal_masks(hidden: float) -> None:
    added = torch.zeros(COUNT, COUNT).masked_fill(~CAUSAL, hidden)
    for mask in (CAUSAL, CAUSAL[None, None], added[None], added[None, None] + 3.0):
        kind = classify_mask(mask)
        assert kind is not None
        assert kind.slopes is None


@pytest.mark.parametrize("origin", [0, 5, 2048])
def test_alibi_counts_from_any_token(origin: int) -> None:
    kind = classify_mask(alibi(torch.arange(COUNT) - origin))
    assert kind is not None
    assert kind.slopes is not None
    assert torch.equal(kind.slopes, SLOPES)


def test_alibi_rounded_to_bfloat16_is_alibi() -> None:
    slopes = torch.tensor([0.84, 0.3, 0.01]).bfloat16()
    bias = (slopes[:, None, None] * torch.arange(COUNT)).float().expand(3, COUNT, COUNT)
    kind = classify_mask(bias.masked_fill(~CAUSAL, -torch.inf)[None])
    assert kind is not None
    assert torch.equal(kind.slopes if kind.slopes is not None else SLOPES, slopes.float())


@pytest.mark.parametrize(
    "mask",
    [
        ~CAUSAL,
        torch.ones_like(CAUSAL),
        CAUSAL & ~CAUSAL.tril(-4),
        torch.zeros(COUNT, COUNT).masked_fill(~CAUSAL, -10.0),
        alibi(torch.arange(COUNT).square()),
        alibi(torch.arange(COUNT) * torch.arange(COUNT)[:, None]),
        torch.full((COUNT, COUNT), torch.nan),
    ],
    ids=["reversed", "all", "window", "weak", "squares", "by row", "nan"],
)
def test_other_masks_are_not_classified(mask: Tensor) -> None:
    assert classify_mask(mask) is None
