"""Rules choose encodings: by name, by recipe, by what a matrix is for; what can't be quantized is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.compiler.ir import Graph
from toolkit.compiler.ops import GraphBuilder
from toolkit.compiler.shapes import Sym
from toolkit.kernels_templates.packing import panel_encodings
from toolkit.passes.quantization import FLOATS, GROUPS, Quantization, parse_encoding
from toolkit.passes.quantize_weights import QuantizeWeights
from toolkit.runtime.encodings import BFLOAT16, FLOAT16, FLOAT32, INT4, INT8, Q4_1, Q5_1, Encoding
from toolkit.runtime.errors import UserError

Make = Callable[..., Any]
INT4_G64 = Encoding("affine", bits=4, group=64, zero=8)
FLOAT8_G64 = Encoding("affine", bits=8, group=64, scale="float32", levels="e4m3")


def encodings(graph: Graph, quantization: Quantization) -> dict[str, Encoding | None]:
    result = QuantizeWeights(quantization).run(graph)
    assert QuantizeWeights(quantization).run(result.graph).matches == 0
    return {param.value.name: param.recipe.encoding for param in result.graph.params}


def recipe(folder: Path, text: str) -> Quantization:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return Quantization.parse(str(path), "bfloat16")


@pytest.mark.parametrize(
    ("name", "linear", "table"),
    [
        ("keep", None, None),
        ("none", BFLOAT16, BFLOAT16),
        ("fp16", FLOAT16, FLOAT16),
        ("bf16", BFLOAT16, BFLOAT16),
        ("int8", INT8, INT8),
        ("fp8", FLOAT8_G64, FLOAT8_G64),
        ("int4", INT4, INT8),
        ("int4-asym", Q4_1, INT8),
        ("int4-g64", INT4_G64, INT8),
        ("int5-g32-asym", Q5_1, INT8),
    ],
)
def test_names(decoder: Make, name: str, linear: Encoding | None, table: Encoding | None) -> None:
    graph = decoder(tied=False, softcap=5.0, bias=True, qk_norm="head").graph()
    found = encodings(graph, Quantization.parse(name, "bfloat16"))
    assert found["layers.0.attn.q.weight"] == linear
    assert found["embed.weight"] == found["lm_head.weight"] == table
    for other in ("layers.0.attn.norm.weight", "layers.0.attn.q_norm", "layers.0.attn.q.bias", "cos.table"):
        assert found[other] == FLOAT32


def test_every_name_is_an_encoding_that_kernels_take() -> None:
    names = [f"int{bits}-g{group}{asym}" for bits in (4, 5, 6, 8) for group in GROUPS for asym in ("", "-asym")]
    found = {parse_encoding(name) for name in names}
    assert len(found) == len(names)
    assert {encoding.name for encoding in (*found, *map(parse_encoding, FLOATS))} <= set(panel_encodings())


def test_a_tied_head_follows_the_table(decoder: Make) -> None:
    assert encodings(decoder().graph(), Quantization.parse("int4"))["embed.weight"] == INT8


def test_the_first_rule_that_matches_decides(decoder: Make, tmp_path: Path) -> None:
    text = (
        "- {match: 'layers\\.0\\..*v\\.weight', encoding: int8}\n"
        "- {match: 'attn', encoding: int4}\n"
        "- {match: 'mlp.down', encoding: none}\n"
    )
    found = encodings(decoder().graph(), recipe(tmp_path, text))
    assert found["layers.0.attn.v.weight"] == INT8
    assert found["layers.1.attn.v.weight"] == found["layers.0.attn.q.weight"] == INT4
    assert found["layers.0.mlp.down.weight"] == BFLOAT16
    assert found["layers.0.mlp.up.weight"] is None
    assert found["layers.0.attn.norm.weight"] == FLOAT32


def test_head_embedding_and_linear_layers_have_rules_of_their_own(decoder: Make, tmp_path: Path) -> None:
    text = (
        "- {role: head, encoding: int8}\n"
        "- {role: [embedding], encoding: fp16}\n"
        "- {role: linear, match: mlp, encoding: int4-g64}\n"
        "- {encoding: bf16}\n"
    )
    found = encodings(decoder(tied=False).graph(), recipe(tmp_path, text))
    assert found["lm_head.weight"] == INT8
    assert found["embed.weight"] == FLOAT16
    assert found["layers.0.mlp.up.weight"] == INT4_G64
    assert found["layers.0.attn.q.weight"] == BFLOAT16
    assert encodings(decoder(tied=True).graph(), recipe(tmp_path, text))["embed.weight"] == INT8


def test_rules_that_decide_about_nothing_are_reported(decoder: Make, tmp_path: Path) -> None:
    text = "- {match: atn, encoding: int8}\n- {encoding: int4}\n- {role: head, encoding: int8}\n"
    notes = QuantizeWeights(recipe(tmp_path, text)).run(decoder().graph()).notes
    assert notes[:2] == (
        "rule 1 of recipe.yaml decides about no weight",
        "rule 3 of recipe.yaml decides about no weight",
    )


def test_columns_that_do_not_fit_get_a_smaller_group_or_the_dtype_and_are_reported() -> None:
    build = GraphBuilder()
    x = build.input("x", "float32", (Sym("T", 8), 48))
    for rows, columns in ((192, 48), (192, 192), (64, 192), (32, 64)):
        x = build.op("linear", x, build.param(f"w{columns}to{rows}", (rows, columns)))
    graph = build.build(build.op("reshape", x, shape=(-1, 2, 16)))
    outcome = QuantizeWeights(Quantization.parse("int4-g128", "bfloat16")).run(graph)
    assert [param.recipe.encoding for param in outcome.graph.params] == [BFLOAT16, INT4_G64, INT4_G64, INT4_G64]
    assert outcome.notes == (
        "w48to192: bfloat16 instead of int4-g128, since 48 columns are no multiple of 128",
        "w192to192 and 1 more: groups of 64 instead of int4-g128, since 192 columns are no multiple of 128",
        "w64to32: groups of 64 instead of int4-g128, since 64 columns are no multiple of 128",
    )


def test_a_weight_that_other_ops_read_stays_float() -> None:
    build = GraphBuilder()
    x = build.input("x", "float32", (Sym("T", 8), 32))
    weight = build.param("w", (32, 32))
    graph = build.build(build.op("bmm", build.op("linear", x, weight), weight))
    assert encodings(graph, Quantization.parse("int8")) == {"w": FLOAT32}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("match: a", "must be a list of rules such as .* found dict"),
        ("- {match: a}", "rule 1 of recipe.yaml must have `encoding`, and may have `match` and `role`, found"),
        ("- {match: a, encoding: int4}\n- 7", "rule 2 of recipe.yaml must have"),
        ("- {encoding: int4, group: 64}", "rule 1 of recipe.yaml must have"),
        ("- {match: a, encoding: int3}", "encoding of rule 1 of recipe.yaml expects keep .* found 'int3'"),
        ("- {match: a, encoding: int4-g48}", "as -g64 or -g128 .* found 'int4-g48'"),
        ("- {match: '(', encoding: int4}", r"has match '\(', which is no regular expression"),
        ("- {match: 5, encoding: int4}", "has match 5, which is no regular expression"),
        ("- {role: tail, encoding: int4}", "has role 'tail', expected embedding, head, linear or a list of these"),
        ("- {role: [], encoding: int4}", "has role"),
        ("- {match: [", "is not YAML"),
    ],
)
def test_bad_recipes_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe(tmp_path, text)


def test_unknown_names_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--quant expects keep .* or the path of a .yaml recipe; found 'int3'"):
        Quantization.parse("int3")
    with pytest.raises(UserError, match="can't read the recipe"):
        Quantization.parse(str(tmp_path / "none.yaml"))
