"""Opening models: directories, GGUF files, hub ids, and the sentence for each that can't be opened."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.models.source import end_tokens, open_model, parameter_shapes
from toolkit.runtime.encodings import BFLOAT16, FLOAT16, FLOAT32
from toolkit.runtime.errors import UserError

VALUES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def saved(directory: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, **values: Any) -> Any:
    factory: Any = AutoModelForCausalLM
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(values or VALUES))
    model = factory.from_config(config).to(dtype)
    model.save_pretrained(directory)
    return model


def test_a_directory(tmp_path: Path) -> None:
    model = saved(tmp_path / "tiny")
    opened = open_model(str(tmp_path / "tiny"))
    assert (opened.name, opened.dtype, opened.text) == ("tiny", "float32", None)
    assert (opened.eos_token_ids, opened.bos_token_id) == ((2,), 1)
    assert opened.config.model_type == "llama"
    expected = model.state_dict()
    assert set(opened.weights) == set(expected)
    for name in opened.weights:
        np.testing.assert_array_equal(opened.weights[name].read().decode(), expected[name].numpy())
    assert set(opened.hashes) == {"config.json", "generation_config.json", "model.safetensors"}
    for file, digest in opened.hashes.items():
        assert hashlib.sha256((tmp_path / "tiny" / file).read_bytes()).hexdigest() == digest


def test_generation_config_says_what_ends_an_answer(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert open_model(str(tmp_path)).eos_token_ids == (5, 6)


def test_a_sharded_checkpoint_of_the_bare_decoder(tmp_path: Path) -> None:
    small: dict[str, Any] = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    model = saved(tmp_path / "whole", "gpt2", **small)
    model.transformer.save_pretrained(tmp_path / "bare", max_shard_size="20KB")
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    (tmp_path / "bare" / "config.json").write_text(json.dumps(config))
    weights = open_model(str(tmp_path / "bare")).weights
    assert len(list((tmp_path / "bare").glob("*.safetensors"))) > 1
    for name, shape in parameter_shapes(model.config).items():
        assert weights[name].shape == shape
        np.testing.assert_array_equal(weights[name].read().decode(), model.state_dict()[name].numpy())


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bfloat16"), (torch.float16, "float16")])
def test_auto_dtype_is_the_checkpoints(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    saved(tmp_path, dtype=dtype)
    assert open_model(str(tmp_path)).dtype == name
    assert open_model(str(tmp_path), dtype="float32").dtype == "float32"
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_model(str(tmp_path)).dtype == name


def test_random_weights_need_a_config_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16", **VALUES}))
    opened = open_model(str(tmp_path), random=True)
    assert opened.dtype == "bfloat16"
    assert "lm_head.weight" in opened.weights
    for name, shape in parameter_shapes(opened.config).items():
        tensor = opened.weights[name]
        assert (tensor.shape, tensor.encoding) == (shape, BFLOAT16)
    half = open_model(str(tmp_path), random=True, dtype="float16")
    assert half.weights["lm_head.weight"].encoding == FLOAT16
    assert open_model(str(tmp_path), random=True, dtype="float32").weights["lm_head.weight"].encoding == FLOAT32


def test_tied_weights_are_one(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **VALUES, tie_word_embeddings=True)
    assert "lm_head.weight" not in parameter_shapes(config)
    assert parameter_shapes(config)["model.embed_tokens.weight"] == (96, 64)


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(model: Path | str, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        open_model(str(model), **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_nothing_there(tmp_path: Path) -> None:
    assert "give a directory, a .gguf file or a hub id" in refused(tmp_path / "none")


def test_no_config(tmp_path: Path) -> None:
    assert "has no config.json" in refused(tmp_path)


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "\x00"])
def test_config_that_is_no_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert "config.json is not valid JSON" in refused(tmp_path)


def test_config_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    assert "should be a JSON object, found list" in refused(tmp_path)


@pytest.mark.parametrize("kind", ["hologram", None, "clip", "t5", ["llama"], {"llama": 1}, 3])
def test_unknown_model_type(tmp_path: Path, kind: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert f"has model_type {kind!r}, which is no language model" in refused(tmp_path)


def test_config_with_a_bad_value(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **VALUES, "hidden_size": "wide"}))
    assert "is no valid llama config" in refused(tmp_path, random=True)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("llama", {"max_position_embeddings": 2**40}),
        ("llama", {"hidden_size": 10**400}),
        ("llama", {"vocab_size": -1}),
        ("qwen3", {"num_hidden_layers": 2**62}),
        ("gpt2", {"n_layer": 2**62}),
        ("gpt2", {"n_inner": 2**40}),
        ("phi3", {"partial_rotary_factor": 2**31}),
        ("gpt_neox", {"rotary_pct": 1e9}),
        ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e9}}),
        ("gemma3", {"text_config": {"model_type": "gemma3_text", "num_hidden_layers": 2**62}}),
    ],
)
def test_sizes_that_no_model_has(
    kind: str, values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused before transformers, which would not come to an end with some of them, sees them."""
    monkeypatch.delattr(AutoConfig, "from_pretrained")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **VALUES, **values}))
    assert "which no model has; correct it" in refused(tmp_path, random=True)


def test_foreign_quantization(tmp_path: Path) -> None:
    values = {"model_type": "llama", **VALUES, "quantization_config": {"quant_method": "quip", "bits": 2}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert "is quantized by 'quip', which is not supported" in refused(tmp_path)


def test_config_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **VALUES}))
    assert "has no safetensors weights" in refused(tmp_path)


def test_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello there")
    assert "is not a GGUF file" in refused(tmp_path / "notes.txt")


def test_bad_dtype(tmp_path: Path) -> None:
    assert "--dtype must be auto, float32" in refused(tmp_path, dtype="int3")


# --- hub --------------------------------------------------------------------------------------------------------------


def test_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    asked: list[Any] = []

    def download(model: str, allow_patterns: list[str]) -> str:
        asked.append((model, "*.safetensors" in allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert open_model("someone/tiny").name == "someone/tiny"
    open_model("someone/tiny", random=True)
    assert asked == [("someone/tiny", True), ("someone/tiny", False)]


def test_offline_says_so_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    message = refused("someone/tiny")
    assert "cannot be fetched from the hub" in message
    assert "or download it elsewhere and give its directory" in message


# --- ends of an answer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "ends"),
    [
        ({}, ()),
        ({"tokenizer.ggml.eos_token_id": 2}, (2,)),
        ({"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 1}, (0, 1)),
        ({"tokenizer.ggml.eos_token_id": 0, "tokenizer.chat_template": "x<|im_end|>y"}, (0, 1)),
        ({"tokenizer.ggml.eos_token_id": 1, "tokenizer.chat_template": "x<|im_end|>y"}, (1,)),
    ],
)
def test_end_tokens(metadata: dict[str, Any], ends: tuple[int, ...]) -> None:
    assert end_tokens({"tokenizer.ggml.tokens": ["<end>", "<|im_end|>", "a"], **metadata}) == ends
