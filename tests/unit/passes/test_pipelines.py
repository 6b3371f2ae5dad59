"""The whole pipeline keeps what a graph computes, fuses what it should, and is stable under repetition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from toolkit.compiler.check import find_difference
from toolkit.compiler.ir import Graph
from toolkit.compiler.pass_ import Pass, run_passes
from toolkit.compiler.targets import CPU
from toolkit.passes.pipelines import LEVELS, pipeline
from toolkit.passes.quantization import Quantization
from toolkit.runtime.encodings import FLOAT32, INT8, Q5_0, Encoding
from toolkit.runtime.errors import UserError

Make = Callable[..., Any]
VARIANTS: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {"bias": True},
    "qwen3": {"qk_norm": "head"},
    "olmo2": {"qk_norm": "full", "post_norm": True},
    "gemma": {"softcap": 9.0, "tied": False},
    "gpt2": {"rope": False, "gated": False, "bias": True},
    "opt": {"rope": False, "gated": False, "query_scale": 0.25},
    "nanochat": {"qk_norm": "late"},
}


def passes(encoding_of: Callable[[str], Encoding] = lambda name: FLOAT32, level: int = 2) -> tuple[Pass, ...]:
    return pipeline(CPU, quant=Quantization.parse("keep"), encoding_of=encoding_of, level=level)


def kinds(graph: Graph) -> Counter[str]:
    return Counter(op.kind for op in graph.ops)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("level", LEVELS)
def test_every_pass_keeps_the_meaning(decoder: Make, variant: str, level: int) -> None:
    graph = decoder(**VARIANTS[variant]).graph()
    fused, _ = run_passes(graph, passes(level=level), check=True)
    assert find_difference(graph, fused) == ""


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_pass_is_idempotent(decoder: Make, variant: str) -> None:
    graph = decoder(**VARIANTS[variant]).graph()
    for each in passes(level=3):
        graph = each(graph)
        again = each.run(graph)
        assert again.graph == graph, each.name
        assert again.matches == 0, each.name


def test_llama_becomes_eight_ops_a_layer(decoder: Make) -> None:
    fused, reports = run_passes(decoder().graph(), passes())
    assert kinds(fused) == {
        "embedding": 3, "rope_kv_write": 2, "paged_attention": 2, "linear": 9, "add_norm": 4, "norm": 1, "reshape": 2,
         "take_rows": 1,
    }  # fmt: skip
    assert [note for report in reports for note in report.notes] == []
    assert fused.outputs[0].name == "logits"


def test_qk_norm_and_biases_are_fused(decoder: Make) -> None:
    for variant in ("qwen2", "qwen3"):
        fused, _ = run_passes(decoder(**VARIANTS[variant]).graph(), passes())
        assert kinds(fused)["rope_kv_write"] == 2
        assert kinds(fused)["rope"] == kinds(fused)["slice"] == 0


def test_a_full_width_norm_falls_back_and_says_so(decoder: Make) -> None:
    fused, reports = run_passes(decoder(**VARIANTS["olmo2"]).graph(), passes())
    assert kinds(fused)["rope_kv_write"] == 0
    assert kinds(fused)["kv_write"] == kinds(fused)["paged_attention"] == 2
    notes = [note for report in reports for note in report.notes]
    assert len(notes) == 2
    assert "layers.0.attn: rotation and cache write are not fused: " in notes[0]
    assert "comes from norm" in notes[0]


def test_gpt2_uses_epilogues_and_a_cache_write_without_rotation(decoder: Make) -> None:
    fused, _ = run_passes(decoder(**VARIANTS["gpt2"]).graph(), passes())
    epilogues = Counter(str(op.attrs["epilogue"]) for op in fused.ops if op.kind == "linear")
    assert epilogues["(gelu_tanh in0)"] == 2
    assert all(not op.attrs["has_rope"] for op in fused.ops if op.kind == "rope_kv_write")
    assert kinds(fused)["activation"] == kinds(fused)["add"] == 0


def test_softcap_is_an_epilogue_of_the_head(decoder: Make) -> None:
    fused, _ = run_passes(decoder(**VARIANTS["gemma"]).graph(), passes())
    assert fused.ops[-1].attrs["epilogue"] == "(mul (tanh (div in0 9.0)) 9.0)"


def test_differing_encodings_are_not_merged(decoder: Make) -> None:
    def encoding_of(name: str) -> Encoding:
        return Q5_0 if ".v." in name or "layers.1.mlp.up" in name else INT8

    graph = decoder().graph()
    fused, reports = run_passes(graph, passes(encoding_of))
    assert find_difference(graph, fused) == ""
    assert kinds(fused)["kv_write"] == 2
    epilogues = [(op.attrs["gated"], op.attrs["epilogue"]) for op in fused.ops if op.attrs.get("epilogue")]
    assert epilogues == [(True, "(mul (silu in0) in1)"), (False, "(mul (silu in0) in1)")]
    merge = next(report for report in reports if report.name == "merge_linear")
    assert merge.matches == 1
    assert len(merge.notes) == 3
    assert merge.notes[0].endswith("not merged: their weights are stored as a5g32, a8g32")


def test_level_3_takes_rows_behind_the_last_attention(decoder: Make) -> None:
    fused, _ = run_passes(decoder().graph(), passes(level=3))
    assert [op.inputs[0].name for op in fused.ops if op.kind == "take_rows"] == ["add_1", "reshape_7"]
    after = [op for op in fused.ops if str(op.outputs[0].type).startswith("float32[R")]
    assert kinds(replace(fused, ops=tuple(after))) == {"take_rows": 2, "linear": 4, "add_norm": 2}


@pytest.mark.parametrize("variant", ["opt", "nanochat"])
def test_level_3_lets_attention_be_fused(decoder: Make, variant: str) -> None:
    graph = decoder(**VARIANTS[variant]).graph()
    before, _ = run_passes(graph, passes())
    after, reports = run_passes(graph, passes(level=3), check=True)
    assert (kinds(before)["rope_kv_write"], kinds(after)["rope_kv_write"]) == (0, 2)
    assert [note for report in reports for note in report.notes] == []


def test_unknown_levels_are_refused() -> None:
    with pytest.raises(UserError, match="-O expects a level from 0 to 3, found 4"):
        passes(level=4)
