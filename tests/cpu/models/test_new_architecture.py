"""An architecture that the toolkit has never seen, made of parts that it knows, compiles without a line for it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cpu.compiler.plan_runner import PlanRunner
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from toolkit.cli.driver import compile as compile_model
from toolkit.compiler.codegen import cpu as codegen


class NovelConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    model_type = "novel"

    vocab_size: int = 99
    hidden_size: int = 64
    intermediate_size: int = 96
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    max_position_embeddings: int = 128
    window: int = 6
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2


class ScaleNorm(nn.Module):
    """An RMS norm whose weight is a deviation from 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 3e-6).rsqrt() * (1 + self.gain)


class RotaryAngles(nn.Module):
    """cos and sin [1, T, 4], each angle once: half of a head's columns rotate."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", 50.0 ** -(torch.arange(4) / 4), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.get_buffer("steps")
        return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighbors among the first columns of x[1, T, H, D]."""
    turned, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    even, odd = turned[..., ::2], turned[..., 1::2]
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat([torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2), rest], -1)


def eager_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    """The reference, with a window."""
    repeat, count = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * options["scaling"]
    distance = torch.arange(count)[:, None] - torch.arange(count)
    hidden = (distance < 0) | (distance >= (options["sliding_window"] or count))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2), None


class NovelAttention(nn.Module):
    def __init__(self, config: NovelConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.width = config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.fused = nn.Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.width, bias=True)
        self.out = nn.Linear(self.heads * self.width, config.hidden_size, bias=False)
        self.query_norm, self.key_norm = ScaleNorm(self.width), ScaleNorm(self.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        sizes = [count * self.width for count in (self.kv_heads, self.heads, self.kv_heads)]
        k, q, v = (part.unflatten(-1, (-1, self.width)) for part in self.fused(x).split(sizes, -1))
        q, k = apply_rotary(self.query_norm(q), cos, sin), apply_rotary(self.key_norm(k), cos, sin)
        attend: Any = eager_attention
        if self.config._attn_implementation != "eager":
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        heads = (y.transpose(1, 2) for y in (q, k, v))
        window = self.config.window if self.layer_idx % 2 else None
        out, _ = attend(self, *heads, None, scaling=0.3, sliding_window=window)
        return self.out(out.flatten(-2))  # type: ignore[no-any-return]


class NovelMLP(nn.Module):
    def __init__(self, config: NovelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN["gelu_pytorch_tanh"]

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.up(x).chunk(2, -1)
        return self.down(self.act(gate) * up)  # type: ignore[no-any-return]


class NovelLayer(nn.Module):
    """Attention and MLP side by side, each between two norms."""

    def __init__(self, config: NovelConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention, self.mlp = NovelAttention(config, layer_idx), NovelMLP(config)
        self.norms = nn.ModuleDict({name: ScaleNorm(config.hidden_size) for name in ("before", "after", "mlp")})

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norms["before"](x)
        out: Tensor = x + 0.7 * self.norms["after"](self.attention(h, cos, sin)) + self.norms["mlp"](self.mlp(h))
        return out


class NovelForCausalLM(PreTrainedModel):  # type: ignore[no-untyped-call]
    config_class = NovelConfig
    _supports_attention_backend = True
    _tied_weights_keys: ClassVar[dict[str, str]] = {"head.weight": "embedding.weight"}  # type: ignore[misc]

    def __init__(self, config: NovelConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.angles = RotaryAngles()
        self.layers = nn.ModuleList([NovelLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = ScaleNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> CausalLMOutput:
        positions = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        x = self.embedding(input_ids) * 8.0
        cos, sin = self.angles(x, positions)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return CausalLMOutput(logits=torch.tanh(self.head(self.norm(x)) / 5.0) * 5.0)


@pytest.fixture
def registered() -> Iterator[None]:
    AutoConfig.register("novel", NovelConfig)
    AutoModelForCausalLM.register(NovelConfig, NovelForCausalLM)
    yield
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    CONFIG_MAPPING._extra_content.pop("novel")
    AutoModelForCausalLM._model_mapping._extra_content.pop(NovelConfig)


@pytest.mark.usefixtures("registered")
def test_a_new_architecture_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codegen, "build_libraries", partial(codegen.build_libraries, levels=codegen.ISA_LEVELS[:1]))
    config = NovelConfig(tie_word_embeddings=True, dtype="float32")  # type: ignore[call-arg]
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()  # type: ignore[no-untyped-call]
    random = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.data = 0.15 * torch.randn(parameter.shape, generator=random)
    model.save_pretrained(tmp_path / "model")
    runner = PlanRunner(compile_model(tmp_path / "model", output=tmp_path / "plan"), threads=1)
    try:
        tokens = np.random.default_rng(0).integers(3, 99, 21).tolist()
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1).numpy()
        packed, _ = runner.step([("a", tokens), ("b", tokens[::-1])])
        steps = [runner.step([("c", tokens[start:stop])])[0] for start, stop in [(0, 5), (5, 17), (17, 18), (18, 21)]]
    finally:
        runner.close()
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(packed, expected, atol=1e-4)
    np.testing.assert_allclose(np.concatenate(steps), expected, atol=1e-4)
