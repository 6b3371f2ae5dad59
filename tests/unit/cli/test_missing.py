"""`compile --explain-missing`: everything that is missing at once, where it is, and what is understood."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

from toolkit.cli import main

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def write_config(folder: Path, kind: str, **values: Any) -> Path:
    """A directory that has a config.json and nothing else."""
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **SIZES, **values}))
    return folder


def explain(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, dict[str, Any]]:
    """The exit code, the text, and what `--json` prints."""
    code = main.run(["compile", str(folder), "--explain-missing"])
    text = capsys.readouterr().out
    assert main.run(["compile", str(folder), "--explain-missing", "--json"]) == code
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    return code, text, json.loads(capsys.readouterr().out)


def test_a_model_that_compiles_lacks_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, found = explain(write_config(tmp_path, "llama"), capsys)
    assert code == 0
    assert text == f"nothing is missing: {tmp_path.name} (llama) compiles for cpu\n"
    assert found["missing"] == []
    assert found["understood"]["attention"] == 3


def test_experts_are_one_thing_with_their_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, found = explain(write_config(tmp_path, "olmoe", num_experts=4, num_experts_per_tok=2), capsys)
    assert code == 2
    (sentence,) = found["missing"]
    places = "model.layers.0.mlp.experts, model.layers.1.mlp.experts and 1 more"
    assert sentence == f"mixtures of experts (OlmoeExperts) are not supported, in {places}"
    counts = {kind: found["understood"][kind] for kind in ("attention", "norm", "rope")}
    assert counts == {"attention": 3, "norm": 3 * 4 + 1, "rope": 3 * 2}
    assert "understood: 3 attention ops, 13 norms, 6 rotations, " in text


def test_one_blocker_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Norm(modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return self.weight * hidden_states / hidden_states.abs().mean(-1, keepdim=True)

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q * cos.unsqueeze(1) + sin.unsqueeze(1), k * cos.unsqueeze(1)

    def forward(self: Any, x: Tensor) -> Tensor:
        first = self.down_proj(self.gate_proj(x).cumsum(-1))
        out: Tensor = self.down_proj(torch.erfinv(self.up_proj(first)))[..., ::2].repeat(1, 1, 2)
        return out

    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", Norm)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    code, _, found = explain(write_config(tmp_path, "llama"), capsys)
    assert code == 2
    for part, place in (
        ("norm Norm matches no known formula", "model.layers.0.input_layernorm"),
        ("apply_rotary_pos_emb|rotates in an unknown way", "model.layers.0.self_attn"),
        ("aten.cumsum", "model.layers.0.mlp"),
        ("aten.erfinv", "model.layers.0.mlp"),
        ("aten.slice", "model.layers.0.mlp"),
    ):
        names = part.split("|")
        assert any(any(name in sentence for name in names) and place in sentence for sentence in found["missing"]), part


def test_an_op_without_a_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = modeling_llama.LlamaMLP.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = original(self, x)  # type: ignore[no-untyped-call]
        return out.view(1, -1, 8, 8).transpose(2, 3).reshape(out.shape)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    code, _, found = explain(write_config(tmp_path, "llama"), capsys)
    assert code == 2
    assert found["missing"]
    assert all(sentence.startswith("cpu has no kernel for transpose") for sentence in found["missing"])
    assert found["understood"]["attention"] == 3


def test_a_model_that_cannot_be_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, found = explain(write_config(tmp_path, "mamba", state_size=8), capsys)
    assert code == 2
    assert any("can't be traced" in sentence for sentence in found["missing"])
    assert "understood: 4 norms" in text


def test_a_configuration_that_contradicts_itself_is_said_in_words_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch logs errors of shapes with a traceback before it raises them."""
    logged = list[logging.LogRecord]()
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handle", logged.append)
    code, text, _ = explain(write_config(tmp_path, "helium", head_dim=24), capsys)
    assert code == 2
    assert "a and b must have same reduction dim" in text
    assert not logged


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, ""),
        ({"quant_method": "fp8"}, ""),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "is quantized by 'gptq' as 'marlin'"),
        ({"quant_method": "bitsandbytes"}, "is quantized by 'bitsandbytes'"),
    ],
)
def test_quantized_checkpoints(
    config: dict[str, Any], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, found = explain(write_config(tmp_path, "llama", quantization_config=config), capsys)
    assert code == (2 if problem else 0)
    assert [sentence for sentence in found["missing"] if problem in sentence] == found["missing"]
    assert bool(found["missing"]) == bool(problem)
