"""Rules choose encodings: by preset, by file, by kind of layer; what can't be quantized is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.compiler.ir import Graph
from toolkit.compiler.ops import GraphBuilder
from toolkit.compiler.shapes import Sym
from toolkit.passes.quantize_weights import Quantization, QuantizationRule, QuantizeWeights
from toolkit.runtime.encodings import BFLOAT16, FLOAT32, INT4, INT8, Encoding
from toolkit.runtime.errors import UserError

Make = Callable[..., Any]


def encodings(graph: Graph, quantization: Quantization) -> dict[str, Encoding | None]:
    result = QuantizeWeights(quantization).run(graph)
    assert QuantizeWeights(quantization).run(result.graph).matches == 0
    return {param.value.name: param.recipe.encoding for param in result.graph.params}


@pytest.mark.parametrize(
    ("preset", "linear", "table"),
    [("keep", None, None), ("none", BFLOAT16, BFLOAT16), ("int8", INT8, INT8), ("int4", INT4, INT8)],
)
def test_presets(decoder: Make, preset: str, linear: Encoding | None, table: Encoding | None) -> None:
    graph = decoder(tied=False, softcap=5.0, bias=True, qk_norm="head").graph()
    found = encodings(graph, Quantization.parse(preset, "bfloat16"))
    assert found["layers.0.attn.q.weight"] == found["layers.1.mlp.down.weight"] == linear
    assert found["embed.weight"] == found["lm_head.weight"] == table
    for name in ("layers.0.attn.norm.weight", "layers.0.attn.q_norm", "layers.0.attn.q.bias", "cos.table"):
        assert found[name] == FLOAT32


def test_a_tied_head_follows_the_table(decoder: Make) -> None:
    assert encodings(decoder().graph(), Quantization.parse("int4"))["embed.weight"] == INT8


def test_the_first_rule_that_matches_decides(decoder: Make, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "- {match: 'layers\\.0\\..*v\\.weight', encoding: int8}\n"
        "- {match: 'attn', encoding: int4}\n"
        "- {match: 'mlp.down', encoding: none}\n"
    )
    found = encodings(decoder().graph(), Quantization.parse(str(path), "float32"))
    assert found["layers.0.attn.v.weight"] == INT8
    assert found["layers.1.attn.v.weight"] == found["layers.0.attn.q.weight"] == INT4
    assert found["layers.0.mlp.down.weight"] == FLOAT32
    assert found["layers.0.mlp.up.weight"] is None
    assert found["layers.0.attn.norm.weight"] == FLOAT32


def test_odd_columns_stay_at_the_dtype_and_are_reported() -> None:
    build = GraphBuilder()
    x = build.input("x", "float32", (Sym("T", 8), 48))
    y = build.op("linear", x, build.param("narrow", (64, 48)))
    graph = build.build(build.op("reshape", build.op("linear", y, build.param("wide", (64, 64))), shape=(-1, 2, 32)))
    outcome = QuantizeWeights(Quantization.parse("int4", "bfloat16")).run(graph)
    assert [param.recipe.encoding for param in outcome.graph.params] == [BFLOAT16, INT4]
    assert outcome.notes == ("narrow stays bfloat16: its 48 columns are no multiple of 32",)


def test_a_weight_that_other_ops_read_stays_float() -> None:
    build = GraphBuilder()
    x = build.input("x", "float32", (Sym("T", 8), 32))
    weight = build.param("w", (32, 32))
    graph = build.build(build.op("bmm", build.op("linear", x, weight), weight))
    assert encodings(graph, Quantization.parse("int8")) == {"w": FLOAT32}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("match: a", "must be a list of rules with `match` and `encoding`, found dict"),
        ("- {match: a}", "rule 1 of .* must have `match` and `encoding`, found"),
        ("- {match: a, encoding: int4}\n- 7", "rule 2 of .* must have"),
        ("- {match: a, encoding: int3}", "has encoding 'int3', expected one of keep, none, float32"),
        ("- {match: '(', encoding: int4}", r"has match '\(', which is no regular expression"),
        ("- {match: 5, encoding: int4}", "has match 5, which is no regular expression"),
        ("- {match: [", "is not YAML"),
    ],
)
def test_bad_rule_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        Quantization.parse(str(path))


def test_unknown_presets_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--quant expects keep, none, int8, int4 or a "):
        Quantization.parse("int5")
    with pytest.raises(UserError, match="can't read the quantization rules"):
        Quantization.parse(str(tmp_path / "none.yaml"))


def test_rules_match_anywhere_in_the_name() -> None:
    quantization = Quantization((QuantizationRule("mlp", "int8"),), linear="int4", table="none")
    assert quantization.choice("model.mlp.up", table=True) == "int8"
    assert quantization.choice("model.attn", table=False) == "int4"
    assert quantization.choice("model.embed", table=True) == "none"
