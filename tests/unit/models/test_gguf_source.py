"""GGUF files of every architecture: config, names and values give the logits of the model they were written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from unit.models.gguf_writer import ARCHS, Q8_0, write_gguf

from toolkit.compiler.ir import Graph, Param, Value
from toolkit.compiler.shapes import TensorType
from toolkit.compiler.targets import CPU, parse_target
from toolkit.compiler.weights import Piece, Recipe
from toolkit.compiler.weights_pack import read_chunks, resolve_encodings
from toolkit.models.gguf_file import read_gguf
from toolkit.models.gguf_models import ARCHITECTURES
from toolkit.models.gguf_source import growth_notes
from toolkit.models.source import open_model, parameter_shapes
from toolkit.runtime.encodings import FLOAT32
from toolkit.runtime.encodings import Q8_0 as Q8_0_ENCODING
from toolkit.runtime.errors import UserError

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
ROPE = {"rope_theta": 5000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **ROPE}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.01 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 64,
    **ROPE,
}
GPT2 = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
PLAIN = {key: value for key, value in SMALL.items() if key != "head_dim"}
PARTIAL = {**PLAIN, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
FALCON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**SMALL, "rope_parameters": ROPE, "tie_word_embeddings": True}),
    "llama biases": ("llama", {**SMALL, "attention_bias": True, "mlp_bias": True}),
    "llama linear": ("llama", {**SMALL, "rope_parameters": {"rope_type": "linear", "factor": 2.0, **ROPE}}),
    "llama3": ("llama", {**SMALL, "rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {**SMALL, "rope_parameters": YARN, "head_dim": 16}),
    "qwen3": ("qwen3", {**SMALL, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {**SMALL, "head_dim": 16}),
    "phi3": ("phi3", {**SMALL, "head_dim": 16, "sliding_window": 5, "pad_token_id": 0}),
    "phi3 longrope": (
        "phi3",
        {**SMALL, "head_dim": 16, "rope_parameters": LONG, "original_max_position_embeddings": 64, "pad_token_id": 0},
    ),
    "gemma2": ("gemma2", {**SMALL, "query_pre_attn_scalar": 32, "sliding_window": 6}),
    "gemma3": ("gemma3_text", {**SMALL, "num_hidden_layers": 7, "query_pre_attn_scalar": 32, "sliding_window": 6}),
    "gpt2": ("gpt2", GPT2),
    "gemma": ("gemma", SMALL),
    "phi2": ("phi", {**PARTIAL, "num_key_value_heads": 4}),
    "gpt_neox": ("gpt_neox", PARTIAL),
    "gpt_neox serial": ("gpt_neox", {**PARTIAL, "use_parallel_residual": False}),
    "starcoder": ("gpt_bigcode", GPT2),
    "starcoder2": ("starcoder2", PLAIN),
    "falcon": ("falcon", FALCON),
    "falcon new": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon one norm": (
        "falcon",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "stablelm": ("stablelm", {**PARTIAL, "use_qkv_bias": True}),
    "stablelm parallel": ("stablelm", {**PARTIAL, "qk_layernorm": True, "use_parallel_residual": True}),
    "nemotron": ("nemotron", PARTIAL),
    "olmo": ("olmo", {**PLAIN, "clip_qkv": 1.0}),
    "olmo3": ("olmo3", {**PLAIN, "sliding_window": 6, "num_hidden_layers": 5}),
    "olmo3 yarn": ("olmo3", {**PLAIN, "sliding_window": 6, "num_hidden_layers": 5, "rope_parameters": YARN}),
    "granite": (
        "granite",
        {
            **PLAIN,
            "attention_multiplier": 0.1,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.5,
        },
    ),
    "cohere": ("cohere", {**PLAIN, "logit_scale": 0.5}),
    "cohere qk norm": ("cohere", {**PLAIN, "logit_scale": 0.5, "use_qk_norm": True}),
    "cohere2": ("cohere2", {**SMALL, "logit_scale": 0.5, "sliding_window": 6, "num_hidden_layers": 5}),
    "smollm3": ("smollm3", {**PLAIN, "num_hidden_layers": 5, "pad_token_id": 0}),
    "arcee": ("arcee", SMALL),
    "exaone4": ("exaone4", {**PLAIN, "sliding_window": 6, "num_hidden_layers": 5}),
    "exaone4 whole": ("exaone4", {**PLAIN, "sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "glm4": ("glm4", {**SMALL, "pad_token_id": 0}),
    "chatglm": ("glm", {**SMALL, "pad_token_id": 0}),
    "seed_oss": ("seed_oss", SMALL),
    "hunyuan": (
        "hunyuan_v1_dense",
        {**SMALL, "rope_parameters": {**ROPE, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    ),
    "ernie4_5": ("ernie4_5", SMALL),
    "jais2": ("jais2", SMALL),
    "ministral3": (
        "ministral3",
        {**SMALL, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
    ),
}
AS_LLAMA = {"internlm2": "llama", "exaone": "llama", "minicpm": "granite"}
"""GGUF architectures that transformers has no code for, and the one that computes the same."""


def tiny(kind: str, values: dict[str, Any]) -> Any:
    """A float32 model with weights large enough that every part of it shows in the logits."""
    factory: Any = AutoModelForCausalLM
    torch.manual_seed(0)
    model = factory.from_config(AutoConfig.for_model(kind, **values), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + 0.1)
    return model


def extra_tensors(values: dict[str, Any]) -> dict[str, Any]:
    rope = values.get("rope_parameters", {})
    if rope.get("rope_type") == "llama3":
        frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, 32, 2) / 32)
        wavelength = 2 * np.pi / frequencies
        low, high = 8192 / rope["low_freq_factor"], 8192 / rope["high_freq_factor"]
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        between = 1.0 / ((1 - smooth) / 8.0 + smooth)
        return {"rope_freqs.weight": np.where(wavelength < high, 1.0, np.where(wavelength > low, 8.0, between))}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{name}.weight": rope[f"{name}_factor"] for name in ("long", "short")}
    return {}


def rebuilt(path: Path) -> Any:
    """The model that an opened file describes, with its weights."""
    opened = open_model(str(path))
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(opened.config, attn_implementation="eager").eval()
    values = {name: torch.from_numpy(opened.weights[name].read().decode().copy()) for name in opened.weights}
    missing, unexpected = model.load_state_dict(values, strict=False)
    assert not unexpected
    assert missing in ([], ["lm_head.weight"])
    model.tie_weights()
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_model_that_was_written(case: str, tmp_path: Path) -> None:
    kind, values = CASES[case]
    model = tiny(kind, values)
    write_gguf(model, tmp_path / "m.gguf", extra=extra_tensors(values))
    tokens = torch.randint(0, 96, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = model(tokens).logits, rebuilt(tmp_path / "m.gguf")(tokens).logits
    assert expected.std() > 0.2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", AS_LLAMA)
def test_architectures_that_are_others_by_another_name(arch: str, tmp_path: Path) -> None:
    model = tiny(*CASES[AS_LLAMA[arch]])
    write_gguf(model, tmp_path / "m.gguf", arch=arch)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        expected, found = model(tokens).logits, rebuilt(tmp_path / "m.gguf")(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_every_architecture_is_tested() -> None:
    written = {ARCHS.get(kind, kind) for kind, _ in CASES.values()} | set(AS_LLAMA)
    assert written == {name for name in ARCHITECTURES if " " not in name and name != "olmo3"}


@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_values_are_those_that_transformers_reads(case: str, tmp_path: Path) -> None:
    write_gguf(tiny(*CASES[case]), tmp_path / "m.gguf", quantize=True)
    factory: Any = AutoModelForCausalLM
    expected = factory.from_pretrained(str(tmp_path), gguf_file="m.gguf").state_dict()
    weights = open_model(str(tmp_path / "m.gguf")).weights
    assert set(expected) - set(weights) <= {"lm_head.weight"}
    for name in weights:
        np.testing.assert_array_equal(weights[name].read().decode(), expected[name].numpy(), err_msg=name)


@pytest.mark.parametrize(
    ("quantize", "dtype", "expected"),
    [(True, "auto", "bfloat16"), (True, "float32", "float32"), (False, "auto", "float32")],
)
def test_what_a_file_of_integer_weights_computes_in_is_the_targets_choice(
    quantize: bool, dtype: str, expected: str, tmp_path: Path
) -> None:
    write_gguf(tiny(*CASES["llama"]), tmp_path / "m.gguf", quantize=quantize)
    opened = open_model(str(tmp_path / "m.gguf"), dtype=dtype, quantized_dtype=parse_target("sm90").quantized_dtype)
    assert opened.dtype == expected
    assert [note for note in opened.notes if "--dtype" in note] == (
        ["m.gguf has integer weights, so activations are bfloat16: --dtype chooses others"]
        if expected != "float32"
        else []
    )
    on_cpu = open_model(str(tmp_path / "m.gguf"), dtype=dtype, quantized_dtype=CPU.quantized_dtype)
    assert on_cpu.dtype == "float32"
    assert not on_cpu.notes


def test_quantized_matrices_keep_their_codes(tmp_path: Path) -> None:
    model = tiny(*CASES["llama"])
    write_gguf(model, tmp_path / "m.gguf", quantize=True)
    weights = open_model(str(tmp_path / "m.gguf")).weights
    query = weights["model.layers.0.self_attn.q_proj.weight"]
    original = model.state_dict()["model.layers.0.self_attn.q_proj.weight"].numpy()
    stored = gguf.quants.quantize(original, Q8_0).reshape(len(original), -1, 34)
    assert query.encoding == Q8_0_ENCODING
    np.testing.assert_array_equal(query.read().data, stored[:, :, 2:].view(np.int8).reshape(len(original), -1))
    assert weights["model.norm.weight"].encoding == FLOAT32


@settings(max_examples=60, deadline=None)
@given(start=st.integers(0, 130), stop=st.none() | st.integers(0, 140))
@pytest.mark.parametrize("name", ["self_attn.q_proj.weight", "self_attn.q_proj.bias", "mlp.up_proj.weight"])
def test_rows_are_those_of_the_whole(name: str, start: int, stop: int | None, biased: Any) -> None:
    tensor = biased[f"model.layers.1.{name}"]
    part, whole = tensor.read(start, stop), tensor.read()
    np.testing.assert_array_equal(part.data, whole.data[start:stop])
    if whole.scale is not None:
        np.testing.assert_array_equal(part.scale, whole.scale[start:stop])


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("biased") / "m.gguf"
    write_gguf(tiny(*CASES["llama biases"]), path, quantize=True)
    return open_model(str(path)).weights


def test_transposed_quantized_matrices_are_read_as_values(tmp_path: Path) -> None:
    model = tiny(*CASES["gpt2"])
    write_gguf(model, tmp_path / "m.gguf", quantize=True)
    tensor = open_model(str(tmp_path / "m.gguf")).weights["transformer.h.0.attn.c_attn.weight"]
    original = model.state_dict()["transformer.h.0.attn.c_attn.weight"].numpy()
    expected = gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(original.T), Q8_0), Q8_0).T
    assert tensor.encoding == FLOAT32
    np.testing.assert_array_equal(tensor.read(3, 9).decode(), expected[3:9])


def test_a_quantized_matrix_that_the_model_transposes_keeps_its_codes(tmp_path: Path) -> None:
    model = tiny(*CASES["gpt2"])
    write_gguf(model, tmp_path / "m.gguf", quantize=True)
    weights = open_model(str(tmp_path / "m.gguf")).weights
    name = "transformer.h.0.mlp.c_fc.weight"  # [in 64, out 256] in the model
    recipe = Recipe((Piece(name, transpose=True, start=16, stop=80),))
    param = Param(Value("w", TensorType("float32", (64, 64))), recipe)
    (resolved,) = resolve_encodings(Graph((), (param,), (), ()), weights).params
    (chunk,) = read_chunks(resolved, weights)
    original = np.ascontiguousarray(model.state_dict()[name].numpy().T[16:80])
    stored = gguf.quants.quantize(original, Q8_0).reshape(64, -1, 34)
    assert chunk.encoding == Q8_0_ENCODING
    np.testing.assert_array_equal(chunk.data, stored[:, :, 2:].view(np.int8).reshape(64, 64))


def test_the_real_models_have_every_parameter(smollm2: Path, gemma3: Path) -> None:
    for path, layers in ((smollm2, 30), (gemma3, 18)):
        opened = open_model(str(path))
        shapes = parameter_shapes(opened.config)
        assert opened.config.num_hidden_layers == layers
        assert {name: opened.weights[name].shape for name in opened.weights} == shapes


def test_types_whose_exact_form_is_much_larger_are_told(tmp_path: Path) -> None:
    types = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name, kind, size in (
        *(("a", types.IQ1_S, 50), ("b", types.Q4_0, 144), ("c", types.IQ2_XXS, 66), ("d", types.IQ2_XXS, 66)),
        *(("e", types.IQ4_XS, 136), ("f", types.Q2_K, 84)),
    ):
        writer.add_tensor(name, np.zeros((4, size), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert list(growth_notes(read_gguf(tmp_path / "m.gguf"))) == [
        "1 IQ1_S tensors have 1.6 bits a value in the file; kept exactly, they take 8-bit codes",
        "2 IQ2_XXS tensors have 2.1 bits a value in the file; kept exactly, they take 8-bit codes",
    ]


def written(path: Path, arch: str, values: dict[str, Any], tensors: dict[str, Any]) -> str:
    """A file with some hyperparameters and tensors, given by their values or their shape."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        add: Any = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{arch}.{key}", value)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.ones(shape, np.float32) if isinstance(shape, tuple) else shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


HYPER: dict[str, Any] = {"context_length": 64, "embedding_length": 64, "block_count": 1, "feed_forward_length": 64}
HYPER |= {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}


def test_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"architecture 'rwkv6'; GGUF files of llama, .* can be compiled"):
        open_model(written(tmp_path / "m.gguf", "rwkv6", HYPER, {"token_embd.weight": (32, 64)}))


def test_missing_hyperparameter_is_named(tmp_path: Path) -> None:
    values = {key: value for key, value in HYPER.items() if key != "block_count"}
    with pytest.raises(UserError, match=r"should give llama\.block_count as one positive number, found None"):
        open_model(written(tmp_path / "m.gguf", "llama", values, {"token_embd.weight": (32, 64)}))


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "olmo2", "gpt2"])
def test_more_layers_than_any_model_has(arch: str, tmp_path: Path) -> None:
    """Transformers would make a list of them all."""
    values = {**HYPER, "block_count": 2**31, "attention.sliding_window": 8}
    file = written(tmp_path / "m.gguf", arch, values, {"token_embd.weight": (32, 64)})
    with pytest.raises(UserError, match="says that num_hidden_layers is 2147483648"):
        open_model(file)


def test_file_without_an_embedding(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lacks the tensor token_embd\.weight"):
        open_model(written(tmp_path / "m.gguf", "llama", HYPER, {"output_norm.weight": (64,)}))


def test_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": (32, 64), "blk.0.attn_sinks.weight": (2,)}
    with pytest.raises(UserError, match=r"blk\.0\.attn_sinks\.weight that has no place in a llama model"):
        open_model(written(tmp_path / "m.gguf", "llama", HYPER, tensors))


def test_heads_that_do_not_divide_the_rows(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": (32, 64), "blk.0.attn_q.weight": (63, 64)}
    with pytest.raises(UserError, match=r"blk\.0\.attn_q\.weight has 63 rows, which 2 and 2 heads do not share evenly"):
        open_model(written(tmp_path / "m.gguf", "llama", HYPER, tensors))


def test_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mixture of experts"):
        open_model(written(tmp_path / "m.gguf", "llama", {**HYPER, "expert_count": 8}, {"token_embd.weight": (32, 64)}))


def test_missing_tensor_is_named_when_asked_for(tmp_path: Path) -> None:
    opened = open_model(written(tmp_path / "m.gguf", "llama", HYPER, {"token_embd.weight": (32, 64)}))
    assert "model.norm.weight" not in opened.weights
    with pytest.raises(UserError, match=r"lacks the tensor model\.norm\.weight"):
        opened.weights["model.norm.weight"]


def test_unknown_rope_scaling(tmp_path: Path) -> None:
    values = {**HYPER, "rope.scaling.type": "spiral"}
    with pytest.raises(UserError, match="RoPE scaling 'spiral'"):
        open_model(written(tmp_path / "m.gguf", "llama", values, {"token_embd.weight": (32, 64)}))


def test_foreign_rope_frequencies(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {"token_embd.weight": (32, 64), "rope_freqs.weight": (16,)}
    path = written(tmp_path / "m.gguf", "llama", HYPER, tensors)
    open_model(path)  # all ones: no scaling
    tensors["rope_freqs.weight"] = np.linspace(9, 3, 16, dtype=np.float32)
    with pytest.raises(UserError, match="not of the llama3 kind"):
        open_model(written(tmp_path / "n.gguf", "llama", HYPER, tensors))
