"""Lowering of hand-built graphs: which kernels, which arguments, which barriers; and that the memory checker agrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from toolkit.compiler.ir import Graph, Source, Value
from toolkit.compiler.lower import RULES, broadcast_forms, lower
from toolkit.compiler.lowered import Call, Lowered, View
from toolkit.compiler.lowering import GpuGenerator, Unsupported
from toolkit.compiler.ops import OPS, GraphBuilder
from toolkit.compiler.program import Program, make_programs
from toolkit.compiler.shapes import Bounds, Sym
from toolkit.compiler.targets import CPU, cuda_target
from toolkit.compiler.weights import Piece, Recipe
from toolkit.kernels_templates.packing import q8_row_bytes
from toolkit.kernels_templates.registry import CUDA_FAMILIES, FAMILIES
from toolkit.kernels_templates.render import arguments
from toolkit.runtime.encodings import BFLOAT16, FLOAT32, Q4_1, Q8_0, Encoding
from toolkit.runtime.errors import UserError
from toolkit.runtime.plan import ArchName, CacheArg, ConstArg, DimArg, InputArg, KvDType, WeightArg

FLOAT8 = Encoding("affine", 8, 32, scale="float32", levels="e4m3")
BOUNDS = Bounds(max_tokens=32, max_sequences=4, max_rows=8, max_context=64)
T, R = Sym("T", 32), Sym("R", 8)
H, HEADS, KV_HEADS, D, F, V = 64, 4, 2, 32, 96, 128


def weight(build: GraphBuilder, name: str, shape: tuple[int, ...], encoding: Encoding = FLOAT32) -> Value:
    return build.param(name, shape, Recipe((Piece(name),), encoding))


def llama(encoding: Encoding, layers: int = 2, window: int = 0) -> Graph:
    """A tiny fused llama: what passes make of one."""
    build = GraphBuilder()
    tokens, positions = build.input("tokens", "int32", (T,)), build.input("positions", "int32", (T,))
    rows = build.input("rows", "int32", (R,))
    table = build.constant("cos", np.ones((64, D // 2), np.float32))
    embed = weight(build, "embed", (V, H), encoding)
    cos, sin = (build.op("embedding", table, positions, name=name) for name in ("cos_t", "sin_t"))
    x = build.op("embedding", embed, tokens, name="x")
    h = build.op("norm", x, weight(build, "first_norm", (H,)), kind="rms", eps=1e-5, name="h")
    for layer in range(layers):
        where = Source(f"model.layers.{layer}")

        def matrix(name: str, n: int, k: int, layer: int = layer) -> Value:
            return weight(build, f"{name}{layer}", (n, k), encoding)

        qkv = build.op("linear", h, matrix("qkv", (HEADS + 2 * KV_HEADS) * D, H), name="qkv", source=where)
        cache = build.cache(layer, KV_HEADS, D, D, window=window if layer else 0)
        q, state = build.ops(
            "rope_kv_write", qkv, cos, sin, cache, names=("q", "state"), heads=HEADS, kv_heads=KV_HEADS, head_dim=D
        )
        a = build.op(
            "paged_attention",
            q,
            state,
            layer=layer,
            scale=0.25,
            kv_heads=KV_HEADS,
            value_dim=D,
            window=window if layer else 0,
            name="a",
        )
        a = build.op("reshape", a, shape=(-1, HEADS * D))
        o = build.op("linear", a, matrix("o", H, HEADS * D), name="o")
        x, h = build.ops("add_norm", o, x, weight(build, f"mid{layer}", (H,)), kind="rms", eps=1e-5, names=("x", "h"))
        gate_up = matrix("gate_up", 2 * F, H)
        m = build.op("linear", h, gate_up, gated=True, epilogue="(mul (silu in0) in1)", name="m")
        d = build.op("linear", m, matrix("down", H, F), name="d")
        x, h = build.ops("add_norm", d, x, weight(build, f"end{layer}", (H,)), kind="rms", eps=1e-5, names=("x", "h"))
    last = build.op("take_rows", h, rows, name="last")
    return build.build(build.op("linear", last, embed, name="logits", source=Source("lm_head")))


def checked(graph: Graph, kv_dtype: KvDType = "float32") -> Lowered:
    """The lowered graph, after its memory plan has passed the checker."""
    (program,) = make_programs(graph, CPU, BOUNDS, kv_dtype)
    return program.lowered


def families(calls: Sequence[Call]) -> list[str]:
    return [call.kernel.family for call in calls]


def args_of(call: Call) -> dict[str, object]:
    specs = arguments(FAMILIES[call.kernel.family], call.kernel)
    return {spec.name: arg for spec, arg in zip(specs, call.args, strict=True)}


def test_float_llama() -> None:
    lowered = checked(llama(FLOAT32, layers=1))
    assert families(lowered.forward) == [
        *("embedding", "embedding", "embedding", "norm", "linear", "rope_kv_write", "attention", "linear"),
        *("norm", "linear", "linear", "norm", "take_rows", "linear"),
    ]
    assert families(lowered.sample) == ["sample"]
    assert {name: item.layout for name, item in lowered.weights.items()} == {
        **dict.fromkeys(("embed", "qkv0", "o0", "gate_up0", "down0"), "panel16"),
        **dict.fromkeys(("cos", "first_norm", "mid0", "end0"), "rows"),
    }
    qkv = args_of(lowered.forward[4])
    assert qkv["weight"] == WeightArg("qkv0")
    assert (qkv["rows"], qkv["N"], qkv["K"]) == (DimArg("T"), ConstArg((HEADS + 2 * KV_HEADS) * D), ConstArg(H))
    rope = args_of(lowered.forward[5])
    assert (rope["slots"], rope["cache"]) == (InputArg("slots", 0), CacheArg(0, 0))
    assert lowered.forward[5].kernel.params["rotary"] == D
    head = lowered.forward[-1]
    assert head.op == "linear:lm_head"
    assert args_of(head)["rows"] == DimArg("R")
    assert head.flops == 2 * V * H
    assert head.bytes == V * H * 4 + H * 4


def test_barriers_only_where_data_crosses() -> None:
    lowered = checked(llama(FLOAT32, layers=1))
    barriers = dict(zip((call.op for call in lowered.calls), (call.barrier for call in lowered.calls), strict=True))
    assert [call.barrier for call in lowered.forward[:3]] == [False, False, True]
    assert barriers["linear:lm_head"], "the sampler reads the logits"
    assert not barriers["sample"]


def test_affine_layers_share_quantized_inputs() -> None:
    lowered = checked(llama(Q4_1, layers=2))
    calls = lowered.forward
    norms = [call for call in calls if call.kernel.family == "norm"]
    assert [(n.kernel.params["q8_out"], n.kernel.params["float_out"]) for n in norms] == [
        *[(True, False)] * 4,
        (False, True),  # the last one feeds take_rows
    ]
    gated = [call for call in calls if call.kernel.params.get("gated")]
    attention = [call for call in calls if call.kernel.family == "attention"]
    for call in (*gated, *attention):
        assert call.kernel.params["q8_out"], call.op
        assert not call.kernel.params["float_out"], call.op
    assert families(calls).count("quantize") == 1, "the rows of logits"
    assert lowered.buffers["h:q8"].bytes == 32 * q8_row_bytes(H)
    for call in calls:
        if call.kernel.family == "linear":
            x = args_of(call)["x"]
            assert isinstance(x, View)
            assert x.buffer.endswith(":q8")
    assert {call.kernel.params["encoding"] for call in calls if call.kernel.family == "linear"} == {"a4g32m"}


def test_one_quantize_serves_all_linear_layers_of_a_value() -> None:
    build = GraphBuilder()
    x = embedded(build)
    a = build.op("linear", x, weight(build, "a", (32, H), Q8_0))
    flat = build.op("reshape", x, shape=(-1, 1, H))
    b = build.op("linear", flat, weight(build, "b", (32, H), Q8_0))
    c = build.op("linear", x, weight(build, "c", (32, H), FLOAT32))
    total = build.op("add", build.op("add", a, build.op("reshape", b, shape=(-1, 32))), c)
    lowered = checked(build.build(total))
    assert families(lowered.forward).count("quantize") == 1
    xs = [args_of(call)["x"] for call in lowered.forward if call.kernel.family == "linear"]
    assert xs[0] == xs[1] == View("x:q8")
    assert xs[2] == View("x")


def test_a_reduction_gives_what_its_readers_want() -> None:
    build = GraphBuilder()
    x = embedded(build)
    residual = build.op("activation", x, kind="tanh")
    exprs = "(add in0 in1) (mul in0 (mean in1))"
    total, h = build.ops("reduction", x, residual, exprs=exprs, names=("total", "h"))
    (column,) = build.ops("reduction", h, exprs="(sqrt (max in0))", names=("column",))
    y = build.op("linear", h, weight(build, "w", (H, H), Q8_0))
    lowered = checked(build.build(build.op("mul", build.op("add", y, total), column)))
    first, second = (call for call in lowered.forward if call.kernel.family == "reduction")
    assert families(lowered.forward).count("quantize") == 0
    assert {"first", "out", "q8"} <= args_of(first).keys()
    assert second.kernel.params["column"] is True
    assert args_of(second).keys() == {"in0", "out", "rows", "W"}


def test_a_norm_that_others_read_too_gives_floats_and_codes() -> None:
    build = GraphBuilder()
    x = embedded(build)
    h = build.op("norm", x, weight(build, "n", (H,)), eps=1e-5, name="h")
    y = build.op("linear", h, weight(build, "w", (H, H), Q8_0))
    lowered = checked(build.build(build.op("add", y, h)))
    (norm,) = (call for call in lowered.forward if call.kernel.family == "norm")
    assert norm.kernel.params["q8_out"]
    assert norm.kernel.params["float_out"]


def test_cache_groups_by_shape_and_window() -> None:
    lowered = checked(llama(FLOAT32, layers=3, window=7), "float16")
    assert [(cache.layers, cache.window) for cache in lowered.caches] == [((0,), 0), ((1, 2), 7)]
    assert {cache.dtype for cache in lowered.caches} == {"float16"}
    attention = [call for call in lowered.forward if call.kernel.family == "attention"]
    assert [args_of(call)["cache"] for call in attention] == [CacheArg(0, 0), CacheArg(1, 0), CacheArg(1, 1)]
    assert [call.kernel.params["has_window"] for call in attention] == [False, True, True]
    assert args_of(attention[1])["window"] == ConstArg(7)
    assert args_of(attention[1])["pages"] == InputArg("pages", 1)


def embedded(build: GraphBuilder) -> Value:
    tokens = build.input("tokens", "int32", (T,))
    return build.op("embedding", weight(build, "embed", (V, H)), tokens, name="x", scale=2.0)


def test_slices_are_views_where_a_stride_is_taken_and_copies_elsewhere() -> None:
    build = GraphBuilder()
    x = embedded(build)
    positions = build.input("positions", "int32", (T,))
    cos = build.op("embedding", build.constant("table", np.ones((64, 8), np.float32)), positions)
    q, k, v = (build.op("slice", x, axis=1, start=i, stop=i + 16, name=f"s{i}") for i in (0, 16, 32))
    heads = [build.op("reshape", part, shape=(-1, 1, 16)) for part in (q, k, v)]
    rotated = build.op("rope", heads[0], cos, cos)
    state = build.op("kv_write", heads[1], heads[2], build.cache(0, 1, 16, 16))
    a = build.op("paged_attention", rotated, state, layer=0, scale=1.0, kv_heads=1, value_dim=16)
    normed = build.op("norm", heads[2], weight(build, "n", (16,)), eps=1e-6)
    lowered = checked(build.build(build.op("reshape", build.op("add", a, normed), shape=(-1, 16))))
    rope, write, copy = (
        next(args_of(call) for call in lowered.forward if call.kernel.family == name)
        for name in ("rope", "kv_write", "copy")
    )
    assert (rope["x"], rope["x_stride"]) == (View("x", 0), ConstArg(H))
    assert (write["k"], write["v"]) == (View("x", 64), View("x", 128))
    assert (write["k_stride"], write["v_stride"]) == (ConstArg(H), ConstArg(H))
    assert (copy["x"], copy["x_offset"], copy["x_stride"], copy["width"]) == (
        View("x"),
        ConstArg(32),
        ConstArg(H),
        ConstArg(16),
    )
    assert families(lowered.forward).count("copy") == 1


def test_concat_copies_parts_side_by_side() -> None:
    build = GraphBuilder()
    x = embedded(build)
    heads = build.op("reshape", x, shape=(-1, 4, 16))
    first = build.op("slice", heads, axis=2, start=0, stop=4)
    rest = build.op("slice", heads, axis=2, start=4, stop=16)
    lowered = checked(build.build(build.op("reshape", build.op("concat", rest, first, axis=2), shape=(-1, 64))))
    copies = [args_of(call) for call in lowered.forward if call.kernel.family == "copy"]
    assert [(c["x_offset"], c["width"], c["out_offset"]) for c in copies] == [
        (ConstArg(4), ConstArg(12), ConstArg(0)),
        (ConstArg(0), ConstArg(4), ConstArg(12)),
    ]
    assert all(
        (c["rows"], c["x_stride"], c["out_stride"]) == (DimArg("T", 4), ConstArg(16), ConstArg(16)) for c in copies
    )


def test_linear_epilogue_and_bias() -> None:
    build = GraphBuilder()
    x = embedded(build)
    args = (weight(build, "w", (H, H)), weight(build, "b", (H,)), x, weight(build, "s", (H,)))
    y = build.op("linear", x, *args, has_bias=True, epilogue="(add (mul in0 in2) in1)")
    call = checked(build.build(y)).forward[-1]
    assert [call.kernel.params[f"extra{i}"] for i in (1, 2, 3, 4)] == ["t", "n", "", ""]
    assert args_of(call)["extra2"] == WeightArg("s")
    assert args_of(call)["bias"] == WeightArg("b")


def test_ops_without_a_rule_become_pointwise() -> None:
    build = GraphBuilder()
    x = embedded(build)
    y = build.op("activation", build.op("mul", x, scalar=3.0), kind="gelu")
    lowered = checked(build.build(build.op("pointwise", y, x, expr="(mul (silu in0) in1)")))
    expressions = [call.kernel.params["expr"] for call in lowered.forward if call.kernel.family == "pointwise"]
    assert expressions == ["(mul in0 3.0)", "(gelu in0)", "(mul (silu in0) in1)"]


@pytest.mark.parametrize(
    ("out", "shapes", "expected"),
    [
        ((T, 8), [(T, 8), (8,)], (1, ["t", "n"])),
        ((T, 8), [(T, 8), (T, 1), (1, 8)], (1, ["t", "1", "n"])),
        ((T, 4, 8), [(T, 4, 8), (4, 8)], (1, ["t", "n"])),
        ((T, 4, 8), [(T, 4, 8), (8,)], (2, ["t", "n"])),
        ((T, 4, 8), [(T, 4, 8), (T, 4, 1)], (2, ["t", "1"])),
        ((T, 4, 8), [(T, 4, 8), (T, 1, 1)], (1, ["t", "1"])),
        ((T, 8), [(1,), (T, 8), (1, 1)], (1, ["s", "t", "s"])),
        ((T, 4, 8), [(T, 4, 1), (1,)], (2, ["1", "s"])),
        ((T,), [(T,), (T,)], (1, ["t", "t"])),
        ((8,), [(8,), (8,)], (0, ["t", "t"])),
    ],
)
def test_broadcast_forms(out: tuple[int, ...], shapes: list[tuple[int, ...]], expected: object) -> None:
    assert broadcast_forms(out, shapes) == expected


def test_broadcasting_both_ways_at_once_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="at once"):
        broadcast_forms((T, 4, 8), [(T, 4, 8), (T, 1, 8)])


def test_every_blocker_is_named_at_once() -> None:
    build = GraphBuilder()
    x = embedded(build)
    heads = build.op("reshape", x, shape=(-1, 4, 16))
    turned = build.op("transpose", heads, perm=(1, 0, 2), source=Source("model.layers.0.mixer"))
    back = build.op("transpose", turned, perm=(1, 0, 2))
    product = build.op("bmm", back, build.op("transpose", back, perm=(0, 2, 1)), source=Source("model.layers.0.gate"))
    total = build.op("reduce", build.op("add", product, scalar=1.0), op="sum", axis=1)
    with pytest.raises(UserError) as problem:
        lower(build.build(total), CPU, BOUNDS, "float32")
    text = str(problem.value)
    for part in ("target cpu", "transpose:model.layers.0.mixer", "bmm:model.layers.0.gate", "reduce: axis 1"):
        assert part in text
    assert "\n" not in text


def test_what_reads_the_result_of_a_blocker_is_lowered_too() -> None:
    build = GraphBuilder()
    heads = build.op("reshape", embedded(build), shape=(-1, 4, 16))
    product = build.op("bmm", heads, build.op("transpose", heads, perm=(0, 2, 1)))
    with pytest.raises(UserError, match=r"no kernel for transpose: .*; bmm: .*"):
        lower(build.build(build.op("activation", product, kind="silu")), CPU, BOUNDS, "float32")


def test_odd_columns_for_quantized_weights_are_refused() -> None:
    build = GraphBuilder()
    x = build.op("slice", embedded(build), axis=1, start=0, stop=48)
    y = build.op("linear", x, weight(build, "w", (8, 48), Encoding("affine", bits=8, group=16)))
    with pytest.raises(UserError, match="multiple of 32"):
        lower(build.build(y), CPU, BOUNDS, "float32")


def test_every_captured_op_has_a_rule_or_is_known_to_lack_one() -> None:
    lacking = {kind for kind in OPS if kind not in RULES and not pointwise(kind)}
    assert lacking == {"attention", "bmm"}, "attention is replaced when caches are inserted"


def pointwise(kind: str) -> bool:
    samples = {"kind": "silu", "op": "lt", "expr": "in0"}
    spec = OPS[kind]
    attrs = {name: samples.get(name, item.default) for name, item in spec.attrs.items()}
    full = {name: value for name, value in attrs.items() if value is not None}
    return any(spec.expression(full, count) is not None for count in (1, 2, 3))


def test_a_deterministic_plan_takes_batch_invariant_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = llama(FLOAT32, layers=1)
    lower(graph, CPU, BOUNDS, "float32", deterministic=True)
    monkeypatch.setitem(FAMILIES, "norm", replace(FAMILIES["norm"], batch_invariant=False))
    lower(graph, CPU, BOUNDS, "float32")
    with pytest.raises(UserError, match="kernel norm is not batch-invariant"):
        lower(graph, CPU, BOUNDS, "float32", deterministic=True)


def test_lowering_is_deterministic() -> None:
    first, second = (checked(llama(Q4_1)) for _ in range(2))
    assert first == second
    assert first != checked(llama(Q8_0))


# --- CUDA -------------------------------------------------------------------------------------------------------------


def test_cuda_attention_reads_sinks_and_biases_as_floats_and_vectors_as_activations() -> None:
    """Weights that kernels read as activations are stored in the plan's type, all other vectors as float32."""
    build = GraphBuilder()
    x = build.op("embedding", weight(build, "embed", (V, HEADS * D), BFLOAT16), build.input("tokens", "int32", (T,)))
    x = build.op("mul", x, weight(build, "scale", (HEADS * D,)), name="scaled")
    matrix = weight(build, "qkv", ((HEADS + 2 * KV_HEADS) * D, HEADS * D), BFLOAT16)
    qkv = build.op("linear", x, matrix, weight(build, "bias", matrix.type.shape[:1]), has_bias=True)  # type: ignore[arg-type]
    cache = build.cache(0, KV_HEADS, D, D)
    q, state = build.ops(
        "rope_kv_write",
        *(qkv, cache),
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=D,
        has_rope=False,
        names=("q", "state"),
    )
    sinks = weight(build, "sinks", (HEADS,))
    a = build.op(
        "paged_attention", q, state, sinks, layer=0, scale=0.25, kv_heads=KV_HEADS, value_dim=D, has_sinks=True
    )
    rows = build.input("rows", "int32", (R,))
    graph = build.build(build.op("take_rows", build.op("reshape", a, shape=(-1, HEADS * D)), rows))
    programs = make_programs(graph, cuda_target(["sm90"]), BOUNDS, "int8", dtype="bfloat16")
    assert [program.bucket.name for program in programs] == ["decode[1]", "decode[2]", "decode[4]", "tokens[32]"]
    for program in programs:
        weights = program.lowered.weights
        found = {name: each.param.recipe.encoding for name, each in weights.items()}
        assert found == {
            **dict.fromkeys(("embed", "qkv", "scale"), BFLOAT16),
            **dict.fromkeys(("bias", "sinks"), FLOAT32),
        }
        (call,) = (call for call in program.lowered.calls if "attention" in call.kernel.family)
        specs = arguments(CUDA_FAMILIES[call.kernel.family], call.kernel)
        args = {spec.name: arg for spec, arg in zip(specs, call.args, strict=True)}
        assert args["sinks"] == WeightArg("sinks")
        assert args["page_stride"] == InputArg("page_stride", 0)
        assert ("scratch" in args) == program.bucket.decode
        assert call.kernel.params["dtype"] == "int8"
        limits = program.lowered.limits.bounds
        assert program.lowered.buffers["q"].bytes == limits.max_tokens * HEADS * D * 2
        assert all(call.barrier for call in program.lowered.calls)


def test_linear_layers_of_few_rows_compute_the_norms_between_them() -> None:
    graph = llama(BFLOAT16)
    decode, *_, tokens = make_programs(graph, cuda_target(["sm90"]), BOUNDS, "bfloat16", dtype="bfloat16")
    assert [call.kernel.family for call in tokens.lowered.calls].count("norm") == 2  # rows are taken from the last one
    assert [call.kernel.family for call in decode.lowered.calls].count("norm") == 1
    written: dict[str, View] = {}
    for call in decode.lowered.calls:
        specs = arguments(CUDA_FAMILIES[call.kernel.family], call.kernel)
        args = {spec.name: arg for spec, arg in zip(specs, call.args, strict=True)}
        if "squares" in args:
            (x, squares) = args["x"], args["squares"]
            assert isinstance(x, View)
            assert squares == written.pop(x.buffer)
        if "squares_out" in args:
            out, squares = args["out"], args["squares_out"]
            assert isinstance(out, View)
            assert isinstance(squares, View)
            assert args["norm_weight"] in (WeightArg("mid0"), WeightArg("end0"), WeightArg("mid1"), WeightArg("end1"))
            written[out.buffer] = squares
    assert not written
    exact, *_ = make_programs(graph, cuda_target(["sm90"]), BOUNDS, "float32", dtype="float32")
    assert [call.kernel.family for call in exact.lowered.calls].count("norm") == 5


def test_alternatives_take_the_arguments_of_what_they_replace() -> None:
    graph = llama(BFLOAT16)
    target = cuda_target(["sm90"])
    for program in make_programs(graph, target, BOUNDS, "bfloat16", dtype="bfloat16", alternatives=2):
        kernels, alternatives = program.lowered.kernels, program.bucket.alternatives
        assert {call.kernel.symbol for call in program.lowered.calls if call.kernel.family.startswith("linear")} == set(
            alternatives
        )
        for kernel, others in alternatives.items():
            names = [spec.name for spec in arguments(CUDA_FAMILIES[kernels[kernel].family], kernels[kernel])]
            assert kernel not in others
            for other in others:
                spec = kernels[other]
                assert [each.name for each in arguments(CUDA_FAMILIES[spec.family], spec)] == names
    for program in make_programs(graph, target, BOUNDS, "bfloat16", dtype="bfloat16"):
        assert not program.bucket.alternatives


def test_triton_kernels_take_the_arguments_of_what_they_replace() -> None:
    """As alternatives, and in its place: norms and the linear layers of prompts have them, those of few rows do not."""
    target, bounds = cuda_target(["sm90"]), replace(BOUNDS, max_tokens=512)

    def programs(generator: GpuGenerator, alternatives: int) -> tuple[Program, ...]:
        options = {"dtype": "bfloat16", "alternatives": alternatives, "generator": generator}
        return make_programs(llama(BFLOAT16), target, bounds, "bfloat16", **options)  # type: ignore[arg-type]

    plain, raced, written = (programs(*choice) for choice in (("cuda", 0), ("race", 2), ("triton", 1)))
    for usual, race, triton in zip(plain, raced, written, strict=True):
        for call, more, own in zip(usual.lowered.calls, race.lowered.calls, triton.lowered.calls, strict=True):
            assert call.kernel == more.kernel
            found = [other for other in more.others if CUDA_FAMILIES[other.family].triton]
            has = call.kernel.family in ("norm", "linear_tiled", "attention_prefill")
            assert len(found) == (2 if call.kernel.family == "linear_tiled" else has)
            assert own.kernel == (found[0] if has else call.kernel)
            assert not has or all(CUDA_FAMILIES[other.family].triton for other in own.others)
            names = [spec.name for spec in arguments(CUDA_FAMILIES[call.kernel.family], call.kernel)]
            for other in found:
                assert [spec.name for spec in arguments(CUDA_FAMILIES[other.family], other)] == names
                assert (
                    other.shape.items()
                    <= {
                        name: arg.value for name, arg in zip(names, call.args, strict=True) if isinstance(arg, ConstArg)
                    }.items()
                )
    families = {call.kernel.family for program in written for call in program.lowered.calls}
    assert {"norm_triton", "linear_triton", "linear_skinny"} <= families


def test_8_bit_floats_meet_rounded_activations_in_large_steps_on_sm90_alone() -> None:
    graph, bounds = llama(FLOAT8), replace(BOUNDS, max_sequences=64, max_tokens=64)
    targets: list[tuple[list[ArchName], set[bool]]] = [(["sm90"], {False, True}), (["sm80", "sm90"], {False})]
    for archs, expected in targets:
        found = set()
        for program in make_programs(graph, cuda_target(archs), bounds, "bfloat16", dtype="bfloat16"):
            calls = [call.kernel.family for call in program.lowered.calls]
            narrow = "linear_float8" in calls
            found.add(narrow)
            assert narrow == ("quantize_float8" in calls)
            if narrow:  # linear layers of a value share what it is rounded to
                assert calls.count("quantize_float8") <= calls.count("linear_float8")
        assert found == expected
    with pytest.raises(UserError, match="8-bit floats, which CPUs have no kernel for: --quant int8 has"):
        lower(graph, CPU, BOUNDS, "float32")
