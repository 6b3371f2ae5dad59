"""Captured graphs compute what the Hugging Face models compute, and what can't be captured is refused."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from cpu.models.architectures import BOUNDS, reference_logits, sequences, tensors, tiny_config
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from toolkit.compiler.interpret import from_tensors, interpret
from toolkit.compiler.ir import Graph
from toolkit.compiler.shapes import Bounds, Sym
from toolkit.compiler.verify import find_problems
from toolkit.models import capture as capturing
from toolkit.models.aten import HANDLERS
from toolkit.models.audit import find_missing
from toolkit.models.capture import capture
from toolkit.runtime.errors import InternalError, UserError

LENGTHS = (21, 5, 13)
DEPENDING_ON_LENGTH = ("phi3 longrope", "llama dynamic rope")
"""Their frequencies are others in sequences longer than 16 and 12 tokens."""


def capture_now(case: str, *, dtype: str = "float32", bounds: Bounds = BOUNDS, stamp: bool = True) -> Graph:
    weights = tensors(case)
    return capture(tiny_config(case), dtype=dtype, bounds=bounds, has_weight=weights.__contains__, stamp=stamp)


captured = cache(capture_now)
"""For tests that share graphs; those which patch a model call `capture_now`."""


def logits_error(case: str, graph: Graph) -> float:
    """Largest difference from Hugging Face over some rows of a batch packed from several sequences."""
    prompts = sequences(case, LENGTHS)
    rows = np.array([38, 0, 20, 7, 25, 24, 26, 21], np.int32)
    inputs = {
        "tokens": np.concatenate(prompts).astype(np.int32),
        "positions": np.concatenate([np.arange(n) for n in LENGTHS]).astype(np.int32),
        "rows": rows,
    }
    found = interpret(graph, inputs, from_tensors(tensors(case)))["logits"]
    expected = np.concatenate([reference_logits(case, prompt) for prompt in prompts])[rows]
    assert found.shape == expected.shape
    assert np.abs(expected).max() > 0.1
    return float(np.abs(found - expected).max())


@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt_bigcode", "falcon alibi", *DEPENDING_ON_LENGTH])
def test_the_graph_of_a_packed_batch_means_what_hugging_face_computes(case: str) -> None:
    graph = captured(case)
    assert find_problems(graph) == []
    inputs = ["tokens", "positions", "rows"] + ["lengths"] * (case in DEPENDING_ON_LENGTH)
    assert [str(value) for value in graph.inputs] == [
        f"%{name}: int32[{'R' if name == 'rows' else 'T'}]" for name in inputs
    ]
    assert [str(value) for value in graph.outputs] == [f"%logits: float32[R, {tiny_config(case).vocab_size}]"]
    assert logits_error(case, graph) <= 1e-4


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "qwen2 window", "smollm3", "gpt2", "ministral3"])
def test_stamped_layers_equal_traced_ones(case: str) -> None:
    assert captured(case, stamp=True) == captured(case, stamp=False)


@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt2"])
def test_the_graph_of_a_bfloat16_model_has_the_same_ops(case: str) -> None:
    half, single = captured(case, dtype="bfloat16"), captured(case)
    assert [op.kind for op in half.ops] == [op.kind for op in single.ops]
    assert {value.type.dtype for value in half.values()} == {"float32", "int32"}


def test_bfloat16_models_round_their_own_constants() -> None:
    config = copy.deepcopy(tiny_config("gemma3_text"))
    config.hidden_size = 72
    scales = []
    for dtype in ("float32", "bfloat16"):
        graph = capture(config, dtype=dtype, bounds=BOUNDS, has_weight=lambda name: name != "lm_head.weight")
        scales.append(next(op.attrs["scalar"] for op in graph.ops if op.kind == "mul"))
    assert scales == [float(np.float32(72**0.5)), 8.5]


def test_layers_that_compute_by_their_number_are_traced_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    original = modeling_llama.LlamaAttention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out, weights = original(self, *args, **kwargs)
        return out * (1 + self.layer_idx), weights

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    graph = capture_now("llama")
    assert [op.attrs["scalar"] for op in graph.ops if op.kind == "mul" and len(op.inputs) == 1] == [2.0, 3.0, 4.0]
    assert logits_error("llama", graph) <= 1e-4


# --- the form of the graph --------------------------------------------------------------------------------------------


def test_smollm2_becomes_few_ops_quickly() -> None:
    config = AutoConfig.for_model(
        "llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    begin = time.process_time()
    bounds = Bounds(max_tokens=512, max_sequences=64, max_rows=64, max_context=8192)
    graph = capture(config, dtype="float32", bounds=bounds, has_weight=lambda name: name != "lm_head.weight")
    assert time.process_time() - begin < 15
    assert Counter(op.kind for op in graph.ops) == {
        "embedding": 3,
        "linear": 7 * 30 + 1,
        "norm": 2 * 30 + 1,
        "rope": 2 * 30,
        "attention": 30,
        "reshape": 4 * 30,
        "activation": 30,
        "mul": 30,
        "add": 2 * 30,
        "take_rows": 1,
    }
    assert len(graph.params) == 9 * 30 + 2 + 2
    assert graph.inputs[0].type.shape == (Sym("T", 512),)
    assert graph.outputs[0].type.shape == (Sym("R", 64), 49152)


def test_rows_are_taken_before_the_last_norm_and_the_head() -> None:
    for case in ("llama", "gemma2", "gpt2", "opt"):
        kinds = [op.kind for op in captured(case).ops]
        assert kinds[kinds.index("take_rows") :][:3] == ["take_rows", "norm", "linear"]


def test_tied_embeddings_are_one_parameter() -> None:
    graph = captured("llama tied")
    readers = [op.kind for op in graph.ops if any(v.name == "model.embed_tokens.weight" for v in op.inputs)]
    assert readers == ["embedding", "linear"]
    assert "lm_head.weight" not in {piece.tensor for param in graph.params for piece in param.recipe.pieces}


@pytest.mark.parametrize("present", [("lm_head.weight",), ("lm_head.weight", "model.embed_tokens.weight")])
def test_tied_embeddings_are_named_as_in_the_checkpoint(present: tuple[str, ...]) -> None:
    names = set(tensors("llama tied")) - {"model.embed_tokens.weight"} | set(present)
    graph = capture(tiny_config("llama tied"), dtype="float32", bounds=BOUNDS, has_weight=names.__contains__)
    assert {piece.tensor for param in graph.params for piece in param.recipe.pieces} == names


def test_rotary_tables_are_computed_and_shared() -> None:
    tables: dict[str, dict[str, Any]] = {
        case: {p.value.name: p.recipe.constant.array for p in captured(case).params if p.recipe.constant is not None}
        for case in ("llama", "gemma3_text", "phi3 partial")
    }
    assert {case: [t.shape for t in found.values()] for case, found in tables.items()} == {
        "llama": [(128, 8)] * 2,
        "gemma3_text": [(128, 8)] * 4,
        "phi3 partial": [(128, 4)] * 2,
    }
    angles = np.arange(128)[:, None] * 10000.0 ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(tables["llama"]["rope.cos"], np.cos(angles), atol=2e-5)
    np.testing.assert_allclose(tables["llama"]["rope.sin"], np.sin(angles), atol=2e-5)


def test_windows_reach_the_attention_ops() -> None:
    windows = [op.attrs["window"] for op in captured("gemma3_text").ops if op.kind == "attention"]
    assert windows == [8, 8, 8, 8, 8, 0]
    assert {op.attrs["window"] for op in captured("mistral").ops if op.kind == "attention"} == {8}
    assert {op.attrs["softcap"] for op in captured("gemma2").ops if op.kind == "attention"} == {50.0}


def test_transposed_weights_are_recipes() -> None:
    pieces = {piece.tensor: piece.transpose for param in captured("gpt2").params for piece in param.recipe.pieces}
    assert pieces["transformer.h.0.attn.c_attn.weight"]
    assert not pieces["transformer.wte.weight"]
    assert [p.start for param in captured("opt").params for p in param.recipe.pieces if p.start] == [2]


def test_every_op_knows_where_it_came_from() -> None:
    for case in ("llama", "gpt2", "gemma2"):
        for op in captured(case).ops:
            assert re.fullmatch(r"modeling_\w+\.py:\d+", op.source.line) or op.source.module


# --- refusals ---------------------------------------------------------------------------------------------------------

_SMALL = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("kind", "values", "reasons"),
    [
        ("mixtral", {"intermediate_size": 80, "num_key_value_heads": 2}, ["MixtralExperts"]),
        ("bloom", {"n_layer": 2, "n_head": 4}, ["computes attention itself", "aten.baddbmm"]),
        ("mamba", {"state_size": 8}, ["torch.export failed|aten|attention"]),
        ("bert", {"is_decoder": True}, ["aten.embedding .*integers computed from the positions"]),
    ],
)
def test_unsupported_architectures_are_refused(kind: str, values: dict[str, Any], reasons: list[str]) -> None:
    config = AutoConfig.for_model(kind, **(_SMALL | values))
    with pytest.raises(UserError, match=f"{kind} models can't be compiled yet") as raised:
        capture(config, dtype="float32", bounds=BOUNDS, has_weight=lambda name: True)
    for reason in reasons:
        assert re.search(reason, str(raised.value))


def test_models_without_a_head_are_refused() -> None:
    with pytest.raises(UserError, match=r"vit models can't be compiled: .* no causal language model"):
        capture(AutoConfig.for_model("vit"), dtype="float32", bounds=BOUNDS, has_weight=lambda name: True)


def test_configurations_that_make_no_model_are_refused() -> None:
    config = copy.deepcopy(tiny_config("llama"))
    config.hidden_size = -1
    with pytest.raises(UserError, match="transformers can't build a llama model from this config"):
        capture(config, dtype="float32", bounds=BOUNDS, has_weight=lambda name: True)


def test_everything_that_is_missing_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Norm(modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return self.weight * hidden_states / hidden_states.abs().mean(-1, keepdim=True)

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q * cos.unsqueeze(1) + sin.unsqueeze(1), k * cos.unsqueeze(1)

    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(torch.erfinv(self.gate_proj(x).cumsum(-1)))
        return out

    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", Norm)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    with pytest.raises(UserError) as raised:
        capture_now("llama")
    text = str(raised.value)
    for part in ("norm Norm matches no known formula, in model.layers.0.input_layernorm,", "rotates in an unknown way"):
        assert part in text
    assert "aten.cumsum" in text
    assert "aten.erfinv" in text


def remove_gate(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.down_proj(self.act_fn(self.up_proj(x)))
    return out


def skip_attention(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    return hidden_states + self.mlp(self.post_attention_layernorm(self.input_layernorm(hidden_states)))


@pytest.mark.parametrize(
    ("owner", "function", "reasons"),
    [
        ("LlamaMLP", remove_gate, ["4 parameters are read by no op: model.layers.0.mlp.gate_proj.weight, "]),
        ("LlamaDecoderLayer", skip_attention, ["has 4 layers, but 0 attention ops were found", "no op: .*q_proj"]),
        ("LlamaMLP", lambda self, x: x, ["4 of 4 layers have no linear op that reads 96 columns"]),
        ("LlamaRMSNorm", lambda self, x: x, ["norm LlamaRMSNorm matches no known formula, in .* and 7 more"]),
    ],
)
def test_a_graph_that_lacks_parts_is_an_error(
    owner: str, function: Callable[..., Any], reasons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getattr(modeling_llama, owner), "forward", function)
    with pytest.raises(UserError) as raised:
        capture_now("llama")
    for reason in reasons:
        assert re.search(reason, str(raised.value))


@pytest.mark.parametrize(
    "case",
    ["llama", "gpt2", "falcon alibi", "smollm3", "nanochat", "gemma4_text"],
)
def test_a_graph_that_lost_any_attention_norm_rotation_or_matrix_is_an_error(case: str) -> None:
    with patch.object(capturing, "find_missing", wraps=find_missing) as spy:
        graph = capture_now(case)
    _, config, *rest = spy.call_args.args
    assert find_missing(graph, config, *rest) == []
    for index, op in enumerate(graph.ops):
        if op.kind in ("attention", "norm", "rope", "linear", "take_rows"):
            assert find_missing(without(graph, index), config, *rest), op


def without(graph: Graph, index: int) -> Graph:
    """The graph without one op: what reads its result reads its first input."""
    lost = graph.ops[index]
    instead = {lost.output: lost.inputs[0]}
    ops = [replace(op, inputs=tuple(instead.get(x, x) for x in op.inputs)) for op in graph.ops if op is not lost]
    read = {value for op in ops for value in op.inputs}
    return replace(graph, ops=tuple(ops), params=tuple(param for param in graph.params if param.value in read))


def test_layers_without_rotation_are_those_that_the_configuration_names() -> None:
    config = copy.deepcopy(tiny_config("smollm3"))
    assert [count_ropes(captured("smollm3"), layer) for layer in range(5)] == [2, 2, 2, 0, 2]
    with patch.object(capturing, "find_missing", wraps=find_missing) as spy:
        capture_now("smollm3")
    graph, _, *rest = spy.call_args.args
    config.no_rope_layers = [1, 1, 0, 1, 1]
    (problem,) = find_missing(graph, config, *rest)
    assert problem == "1 of 5 layers rotate no query and key, and the configuration doesn't say so"


def count_ropes(graph: Graph, layer: int) -> int:
    return sum(op.kind == "rope" and op.source.module.startswith(f"model.layers.{layer}.") for op in graph.ops)


def test_absent_tensors_are_listed() -> None:
    config = tiny_config("llama")
    with pytest.raises(UserError, match="lacks 4 of 39 tensors") as raised:
        capture(config, dtype="float32", bounds=BOUNDS, has_weight=lambda name: name[-13:] != "k_proj.weight")
    assert "model.layers.3.self_attn.k_proj.weight" in str(raised.value)
    with pytest.raises(UserError, match=r"the checkpoint lacks 39 of 39 tensors: lm_head.weight, .* and 31 more"):
        capture(config, dtype="float32", bounds=BOUNDS, has_weight=lambda name: False)


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(UserError, match="expected dtype float32, bfloat16, float16, found 'int8'"):
        capture_now("llama", dtype="int8")


class OddError(Exception):
    """Has no text, or one of many lines."""


def raising(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    "error",
    [OddError(), OddError("first\nsecond"), KeyError("x"), AssertionError(), StopIteration(), RecursionError("deep")],
    ids=repr,
)
@pytest.mark.parametrize(
    ("owner", "name", "place"),
    [
        (modeling_llama.LlamaMLP, "forward", "in model.layers.0.mlp"),
        (modeling_llama.LlamaModel, "forward", "in model"),
        (modeling_llama.LlamaAttention, "forward", "in model.layers.0.self_attn"),
    ],
)
def test_a_model_that_fails_oddly_is_named(
    owner: Any, name: str, place: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, raising(error))
    with pytest.raises(UserError, match="llama models can't be compiled yet") as raised:
        capture_now("llama")
    (problem,) = raised.value.problems  # type: ignore[attr-defined]
    assert problem.startswith("the model can't be traced")
    assert type(error).__name__ in problem
    assert problem.endswith(place)
    assert "\n" not in problem


def test_a_translation_that_fails_oddly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HANDLERS, "aten.mul", raising(KeyError("x")))
    with pytest.raises(
        UserError, match=r"aten.mul \(modeling_llama.py:\d+\) can't be translated: KeyError: 'x', in model"
    ):
        capture_now("llama")


@pytest.mark.parametrize("part", ["Hooks", "find_missing", "_fake", "Translator"])
def test_faults_of_our_own_say_what_was_captured(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, part, raising(OddError("first\nsecond")))
    with pytest.raises(InternalError, match=r"^capturing LlamaForCausalLM, of type llama, failed: OddError: first$"):
        capture_now("llama")


def test_models_with_more_than_a_decoder_are_explained() -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**tiny_config("gemma3_text").to_dict(), "model_type": "gemma3_text"}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    with pytest.raises(UserError, match="parts beside the language model are not supported: vision_config"):
        capture(config, dtype="float32", bounds=BOUNDS, has_weight=lambda name: True)


def test_large_parameters_take_no_memory() -> None:
    """Not even for a moment: the address space has room for a tenth of the model."""
    program = """
import resource
from pathlib import Path
from transformers import AutoConfig
from toolkit.models.source import parameter_shapes
sizes = {"hidden_size": 8192, "intermediate_size": 32768, "num_hidden_layers": 1, "vocab_size": 200000}
parameter_shapes(AutoConfig.for_model("llama", **sizes | {"hidden_size": 64}))
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (700 << 20), resource.RLIM_INFINITY))
assert parameter_shapes(AutoConfig.for_model("llama", **sizes))["lm_head.weight"] == (200000, 8192)
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_nothing_is_left_behind() -> None:
    before = modeling_llama.apply_rotary_pos_emb
    config = copy.deepcopy(tiny_config("llama"))
    capture_now("llama")
    with pytest.raises(UserError):
        capture(tiny_config("llama"), dtype="float32", bounds=BOUNDS, has_weight=lambda name: False)
    assert "toolkit" not in ALL_ATTENTION_FUNCTIONS
    assert modeling_llama.apply_rotary_pos_emb is before
    assert tiny_config("llama").to_dict() == config.to_dict()


# --- ops that write to their operands ---------------------------------------------------------------------------------


def fresh(x: Tensor) -> Tensor:
    return (x + 1).mul_(x).relu()


def chosen_by_mask(x: Tensor) -> Tensor:
    return (x + 1).masked_fill_(x > 0, 3.0)


def seen_after(x: Tensor) -> Tensor:
    y = x + 1
    return y.mul_(2) + y


def seen_through_a_view(x: Tensor) -> Tensor:
    y = x + 1
    view = y.transpose(0, 1)
    y.mul_(2)
    return view + 1


def written_through_a_view(x: Tensor) -> Tensor:
    y = x + 1
    y.transpose(0, 1).mul_(2)
    return y + 1


def of_another_type(x: Tensor) -> Tensor:
    return (x + 1).to(torch.bfloat16).add_(x)


def the_input(x: Tensor) -> Tensor:
    return x.mul_(2) + 1


@pytest.mark.parametrize(
    ("function", "simple"),
    [
        (fresh, True),
        (chosen_by_mask, False),
        (seen_after, True),
        (seen_through_a_view, False),
        (written_through_a_view, False),
        (of_another_type, False),
        (the_input, False),
    ],
)
def test_only_writes_that_nothing_else_sees_become_results(function: Callable[..., Tensor], simple: bool) -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    x = torch.randn(4, 4)
    program = torch.export.export(Module(), (x.clone(),), strict=False)
    assert capturing._make_functional(program.graph) == simple
    if simple:
        assert not any(capturing._mutates(node) for node in program.graph.nodes)
        program.graph_module.recompile()
        torch.testing.assert_close(program.module()(x.clone()), function(x.clone()), rtol=0, atol=0)
