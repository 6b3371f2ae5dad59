"""Whole compilations of tiny models: encodings of weights, what is in a plan, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cpu.models.architectures import CASES
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.cli import main
from toolkit.cli.driver import compile as compile_model
from toolkit.compiler.ir import Graph
from toolkit.compiler.pass_ import Outcome
from toolkit.passes.insert_caches import InsertCaches
from toolkit.runtime.debug import debug_level
from toolkit.runtime.errors import UserError
from toolkit.runtime.llm import LLM
from toolkit.runtime.load import read_plan
from toolkit.runtime.request import SamplingParams

from .plan_runner import PlanRunner

Array = npt.NDArray[Any]


def make_model(folder: Path, kind: str, **values: Any) -> Any:
    """A model with random float32 weights, saved in a folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**CASES[kind][1], **values})
    config.dtype = torch.float32
    from_config: Any = AutoModelForCausalLM.from_config
    model = from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights and biases differ from their defaults, so that losing one shows.
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.05))
            assert parameter.isfinite().all(), name
    model.save_pretrained(folder)
    return model


def expected(model: Any, tokens: list[int]) -> Array:
    """Log-probabilities [n, V] of a sequence run alone."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double()
    return np.asarray(torch.log_softmax(logits, -1).numpy())


def sequences(vocabulary: int) -> dict[str, list[int]]:
    rng = np.random.default_rng(1)
    return {name: rng.integers(3, vocabulary, size).tolist() for name, size in (("a", 37), ("b", 5), ("c", 18))}


# --- quantized and rounded weights ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("quant", "bar"), [("int8", 0.05), ("int4", 0.6)])
def test_quantized_plans_stay_close(quant: str, bar: float, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    runner = PlanRunner(compile_model(tmp_path / "model", output=tmp_path / "plan", quant=quant))
    try:
        assert {weight.encoding.kind for weight in runner.plan.weights.values()} == {"affine", "float32"}
        assert runner.plan.caches[0].dtype == "float16"
        tokens = sequences(runner.plan.model.vocab_size)["a"]
        (found,) = runner.step([("a", tokens)])
        error = np.abs(found - expected(model, tokens))
        assert 1e-6 < error.max() < bar
    finally:
        runner.close()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float_dtypes_are_rounded_weights(dtype: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3")
    runner = PlanRunner(compile_model(tmp_path / "model", output=tmp_path / "plan", quant="none", dtype=dtype))
    try:
        assert {weight.encoding.kind for weight in runner.plan.weights.values()} == {dtype, "float32"}
        rounded = model.to(getattr(torch, dtype)).float()
        tokens = sequences(runner.plan.model.vocab_size)["a"]
        (found,) = runner.step([("a", tokens)])
        np.testing.assert_allclose(found, expected(rounded, tokens), atol=0.03)
    finally:
        runner.close()


# --- the plan itself --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    make_model(folder, "llama", num_hidden_layers=1)
    return folder


def test_the_same_inputs_give_the_same_bytes(model_folder: Path, tmp_path: Path) -> None:
    plans = [compile_model(model_folder, output=tmp_path / name) for name in ("one", "two")]
    files = [{path.relative_to(plan): path.read_bytes() for path in files_of(plan)} for plan in plans]
    assert files[0] == files[1]
    assert {str(path) for path in files[0]} >= {"plan.json", "weights.safetensors", "graph.onnx"}


def files_of(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


@pytest.mark.usefixtures("native")
def test_the_plan_says_what_was_done(model_folder: Path, tmp_path: Path) -> None:
    plan = read_plan(compile_model(model_folder, output=tmp_path / "plan", max_batch=3, max_context=100))
    assert plan.max_batch == 3
    assert plan.model.max_context == 100
    assert plan.model.architecture == "llama"
    assert plan.text is None
    assert plan.eos_token_ids == (2,)
    assert plan.report.captured_ops > plan.report.fused_ops
    assert all(each.seconds == 0 for each in plan.report.passes)
    assert plan.kv_bytes_per_token == 2 * 2 * 16 * 4
    assert plan.memory.weights == sum(weight.bytes for weight in plan.weights.values())
    assert str(tmp_path) not in (tmp_path / "plan" / "plan.json").read_text()


@pytest.mark.usefixtures("native")
def test_random_weights_need_only_a_config(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    path = compile_model(tmp_path / "bare", output=tmp_path / "plan", weights="random:7", quant="int8", max_context=64)
    plan = read_plan(path)
    assert plan.model.random_weights == 7
    stored = sum(weights.bytes for weights in plan.weight_files if not weights.random)
    assert 0 < stored < 0.2 * plan.memory.weights  # tables alone
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=1, ignore_eos=True)
    with LLM(path) as llm:
        first = llm.generate([5, 6, 7], params)[0].outputs[0]
    with LLM(path) as llm:
        again = llm.generate([5, 6, 7], params)[0].outputs[0]
    assert len(first.token_ids) == 8
    assert (first.token_ids, first.logprobs) == (again.token_ids, again.logprobs)
    with pytest.raises(UserError, match="--weights random"):
        compile_model(tmp_path / "bare", output=tmp_path / "other")


@pytest.mark.usefixtures("native")
def test_dumped_ir_has_a_file_a_pass(model_folder: Path, tmp_path: Path) -> None:
    plan = read_plan(compile_model(model_folder, output=tmp_path / "plan", dump_ir=tmp_path / "ir"))
    names = sorted(path.name for path in (tmp_path / "ir").iterdir())
    assert names[0] == "00-captured.txt"
    assert len(names) == 1 + len(plan.report.passes)


# --- failures leave nothing behind ------------------------------------------------------------------------------------


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        (target / name).write_bytes((source / name).read_bytes())
    return target


def refused(model: Path, tmp_path: Path, message: str, **choices: Any) -> None:
    """Compiling raises a UserError of one sentence and leaves no trace."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=message):
        compile_model(model, output=tmp_path / "plan", **choices)
    assert sorted(tmp_path.iterdir()) == before


def test_nan_weights_are_refused(model_folder: Path, tmp_path: Path) -> None:
    model = copied(model_folder, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    refused(model, tmp_path, r"up_proj\.weight.*NaN")


def test_a_missing_tensor_is_refused(model_folder: Path, tmp_path: Path) -> None:
    model = copied(model_folder, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    refused(model, tmp_path, r"up_proj\.weight")


def test_a_wrong_shape_is_refused(model_folder: Path, tmp_path: Path) -> None:
    model = copied(model_folder, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    refused(model, tmp_path, r"expected shape \[.*\] for .*the weights do not belong to this config\.json")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"target": "tpu"}, "unknown target"),
        ({"quant": "int3"}, "--quant expects"),
        ({"dtype": "int8"}, "--dtype must be"),
        ({"weights": "zeros"}, "--weights must be"),
        ({"max_batch": 0}, "--max-batch"),
        ({"optimize": 7}, "-O expects a level from 0 to "),
        ({"max_context": 257}, "--max-context must be 1 to 256"),
    ],
)
def test_choices_out_of_range_are_refused(
    choices: dict[str, Any], message: str, model_folder: Path, tmp_path: Path
) -> None:
    refused(model_folder, tmp_path, message, **choices)


@pytest.mark.usefixtures("native")
def test_an_interrupt_leaves_no_half_plan(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("toolkit.compiler.emit.write_plan", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compile_model(model_folder, output=tmp_path / "plan")
    assert not list(tmp_path.iterdir())


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("native")
def test_the_command_reports(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "plan"
    assert main.run(["compile", str(model_folder), "-o", str(output), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    plan = read_plan(output)
    assert report["plan"] == str(output)
    assert report["weight_bytes"] == plan.memory.weights
    assert report["captured_ops"] > report["fused_ops"] > 0
    assert report["kernels"] == len(plan.kernels) <= report["launches"]
    assert report["kv_bytes_per_token"] == plan.kv_bytes_per_token
    assert report["estimated_seconds_per_token"] > 0
    assert list(report["seconds"]) == ["Import", "Open", "Capture", "Fuse", "Lower", "Kernels", "Weights", "Write"]

    assert main.run(["compile", str(model_folder), "-o", str(output)]) == 2
    assert "exists already: give --force" in capsys.readouterr().err
    assert main.run(["compile", str(model_folder), "-o", str(output), "--force"]) == 0
    text = capsys.readouterr().out
    for part in ("ops", "kernels", "weights", "activations", "KV cache", "estimate", "time", f"toolkit serve {output}"):
        assert part in text


@pytest.mark.usefixtures("native")
def test_check_names_the_broken_pass_and_its_op(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compile", str(model_folder), "-O1", "--check", "-o", str(tmp_path / "plan")]
    assert main.run(command) == 0
    run = InsertCaches.run

    def capped(self: InsertCaches, graph: Graph) -> Outcome:
        outcome = run(self, graph)
        ops = (
            replace(op, attrs={**op.attrs, "softcap": 0.1}) if op.attrs.get("kv_heads") else op
            for op in outcome.graph.ops
        )
        return replace(outcome, graph=replace(outcome.graph, ops=tuple(ops)))

    monkeypatch.setattr(InsertCaches, "run", capped)
    assert main.run([*command, "--force"]) == 1
    text = capsys.readouterr().err
    assert "pass insert_caches (after: canonicalize, " in text
    assert "paged_attention %attention (model.layers.0.self_attn" in text


@pytest.mark.usefixtures("native")
def test_debug_levels_show_each_stage(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOOLKIT_DEBUG", "4")
    debug_level.cache_clear()
    try:
        compile_model(model_folder, output=tmp_path / "plan")
    finally:
        debug_level.cache_clear()
    text = capsys.readouterr().err
    for part in ("[1] Capture: ", "[2] insert_caches: ", "[3] launch 0: ", "[3] buffer ", "[4] ", 'extern "C" void k_'):
        assert part in text
