"""CUDA plans are compiled without a GPU: what their launches compute, what they are given, what files hold."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpu.kernels.triton_interpreter import Interpreter
from unit.cli.tiny_plans import SIZES, make_tiny_plan, no_modules
from unit.models.float8_writer import ARRANGEMENTS, store_float8

from toolkit.cli import main
from toolkit.cli.driver import compile as compile_model
from toolkit.cli.missing import find_missing
from toolkit.compiler.codegen.cuda import REGISTERS, SHARED_LIMITS
from toolkit.compiler.codegen.triton import compiler_version
from toolkit.compiler.lower import NoKernelError
from toolkit.compiler.quantize import encode
from toolkit.kernels_templates.catalog import KernelSpec, ParamValue
from toolkit.kernels_templates.cuda import runtime_kernels
from toolkit.kernels_templates.registry import CUDA_FAMILIES
from toolkit.kernels_templates.render import arguments
from toolkit.runtime.errors import UserError
from toolkit.runtime.load import read_plan
from toolkit.runtime.plan import ArenaArg, CacheArg, ConstArg, DimArg, InputArg, Plan, WeightArg

from .numpy_device import NumpyDevice
from .plan_runner import PlanRunner
from .test_compile import expected, make_model, sequences

KINDS = ("llama", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "opt", "falcon")
ROLES: Mapping[str, tuple[type, ...]] = {
    "in": (ArenaArg, WeightArg),
    "out": (ArenaArg,),
    "scratch": (ArenaArg,),
    "weight": (WeightArg,),
    "cache": (CacheArg,),
    "input": (InputArg,),
    "dim": (DimArg, ConstArg),
    "const": (ConstArg,),
}
"""What an argument of each role may be given."""


class NumpyRunner(PlanRunner):
    interpreter: Interpreter | None = None

    def _open(self, directory: Path, threads: int) -> Any:
        self.numpy = NumpyDevice(directory, self.plan, self.interpreter)
        return self.numpy


@pytest.fixture
def without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.compiler.codegen.cuda.build_modules", no_modules)


# --- what launches compute --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_nvrtc")
@pytest.mark.parametrize("kind", KINDS)
def test_launches_compute_the_model(kind: str, tmp_path: Path) -> None:
    compare(kind, tmp_path)


@pytest.mark.usefixtures("without_nvrtc")
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_launches_of_half_precision_compute_the_model(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only 16-bit activations have: norms in linear layers, and rotation and cache writes in attention."""

    def skinny(rows: int, **sizes: Any) -> tuple[str, dict[str, ParamValue]]:
        tile = {"tile_rows": 8, "tile_columns": 64, "split": 1, "stages": 4, "depth": 64}
        return "linear_skinny", {"real": "float32", **tile}

    family = CUDA_FAMILIES["linear_skinny"]
    monkeypatch.setitem(CUDA_FAMILIES, "linear_skinny", replace(family, params={**family.params, "real": ("float32",)}))
    monkeypatch.setattr("toolkit.compiler.lower.choose_linear", skinny)
    monkeypatch.setattr("toolkit.compiler.lower.gives_norms", lambda columns, real, params: columns % 16 == 0)
    monkeypatch.setattr("toolkit.compiler.lower.can_decode_and_write", lambda *sizes: True)
    plan = compare(kind, tmp_path)
    decode = plan.buckets[0]
    kernels = [plan.kernels[launch.kernel] for launch in decode.launches]
    assert "attention_decode_write" in {kernel.family for kernel in kernels}
    assert any(kernel.params.get("norm_in") for kernel in kernels) == (kind != "gemma3_text")


@pytest.mark.usefixtures("without_nvrtc")
def test_launches_of_triton_kernels_compute_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Triton kernel of the plan is run by Triton's interpreter, with the arguments that lowering gave it."""
    with closing(Interpreter()) as interpreter:
        monkeypatch.setattr(NumpyRunner, "interpreter", interpreter)
        plan = compare("gemma3_text", tmp_path, steps=(0, 3), generator="triton", optimize=2)
    used = {plan.kernels[launch.kernel].family for bucket in plan.buckets for launch in bucket.launches}
    assert {"norm_triton", "linear_triton", "attention_prefill_triton"} <= used
    assert not {"norm", "pointwise", "reduction", "linear_exact", "attention_prefill"} & used
    (note,) = [note for note in plan.report.notes if "Triton" in note]
    assert re.match(r"Triton has no template for \d+ of \d+ kernels, which stay CUDA C\+\+: 2 attention_decode, ", note)
    assert "norm" not in note


STEPS: tuple[tuple[dict[str, int], str], ...] = (
    ({"a": 33, "b": 2}, "tokens[64]"),
    ({"a": 1, "b": 1, "c": 15}, "tokens[64]"),
    ({"a": 1, "b": 1, "c": 1}, "decode[4]"),
    ({"c": 1}, "decode[1]"),
    ({"a": 2, "c": 1}, "tokens[64]"),
)
"""New tokens by sequence, and the launch program that serves them."""


def compare(kind: str, tmp_path: Path, steps: Sequence[int] = range(len(STEPS)), **options: Any) -> Plan:
    """Prompts in one step, a chunk at a time, and tokens one by one: every bucket gives what Hugging Face does."""
    model = make_model(tmp_path / "model", kind)
    options |= {"output": tmp_path / "plan", "max_batch": 4, "max_context": 64}
    plan = compile_model(tmp_path / "model", target="sm90", dtype="float32", **options)
    runner = NumpyRunner(plan)
    wanted = {name: (tokens, expected(model, tokens)) for name, tokens in sequences(model.config.vocab_size).items()}
    seen = dict.fromkeys(wanted, 0)
    for sizes, _ in (STEPS[step] for step in steps):
        chunks = [(name, wanted[name][0][seen[name] : seen[name] + size]) for name, size in sizes.items()]
        for (name, tokens), found in zip(chunks, runner.step(chunks), strict=True):
            np.testing.assert_allclose(found, wanted[name][1][seen[name] : seen[name] + len(tokens)], atol=2e-4)
            seen[name] += len(tokens)
    assert runner.numpy.used == [STEPS[step][1] for step in steps]
    return runner.plan


@pytest.mark.usefixtures("without_nvrtc")
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_checkpoints_of_8_bit_floats_keep_their_codes(arrangement: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    values = store_float8(tmp_path / "model", arrangement)
    plan = compile_model(
        tmp_path / "model", target="sm90", dtype="float32", output=tmp_path / "plan", max_batch=4, max_context=64
    )
    parameters = dict(model.named_parameters())
    for name, value in values.items():
        parameters[name].data.copy_(value)
    runner = NumpyRunner(plan)
    kept = [each for each in runner.plan.weights.values() if each.encoding.levels == "e4m3"]
    assert {source for each in kept for source in each.sources} == values.keys()
    assert {(each.layout, each.encoding.scale) for each in kept} == {("operand16", "float32")}
    tokens = sequences(model.config.vocab_size)["a"]
    (found,) = runner.step([("a", tokens)])
    np.testing.assert_allclose(found, expected(model, tokens), atol=2e-4)


@pytest.mark.usefixtures("without_nvrtc")
@pytest.mark.parametrize("quant", ["int8", "int4-asym", "int6"])
def test_launches_read_quantized_weights(quant: str, tmp_path: Path) -> None:
    """A plan gives what Hugging Face does with the numbers that its codes stand for."""
    model = make_model(tmp_path / "model", "llama")
    plan = compile_model(
        tmp_path / "model",
        target="sm90",
        dtype="float32",
        quant=quant,
        output=tmp_path / "plan",
        max_batch=4,
        max_context=64,
    )
    runner = NumpyRunner(plan)
    quantized = [each for each in runner.plan.weights.values() if each.encoding.kind == "affine"]
    assert {each.layout for each in quantized} == {"operand16"}
    parameters = dict(model.named_parameters())
    for name, encoding in {source: each.encoding for each in quantized for source in each.sources}.items():
        values = encode(parameters[name].detach().numpy(), encoding).decode()
        parameters[name].data.copy_(torch.from_numpy(values))
    assert len(quantized) > 5
    tokens = sequences(model.config.vocab_size)["a"]
    (found,) = runner.step([("a", tokens)])
    np.testing.assert_allclose(found, expected(model, tokens), atol=2e-4)


# --- what launches are given ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half_plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("half")
    return read_plan(make_tiny_plan(folder, "gemma3_text", target="sm80,sm90", dtype="bfloat16"))


def test_buckets_are_for_decoding_and_for_tokens(half_plan: Plan) -> None:
    assert [bucket.name for bucket in half_plan.buckets] == [
        *("decode[1]", "decode[2]", "decode[4]", "decode[8]"),
        *(f"tokens[{size}]" for size in (64, 128, 256, 512, 1024, 2048, 4096, 8192)),
    ]
    for bucket in half_plan.buckets:
        size = int(bucket.name.partition("[")[2][:-1])
        assert bucket.max_tokens == size
        assert bucket.max_sequences == min(size, 8)
        assert bucket.max_rows == min(size, 8 if bucket.decode else 256)
        attention = [half_plan.kernels[each.kernel].family for each in bucket.launches if "attention" in each.op]
        assert set(attention) == {"attention_decode" if bucket.decode else "attention_prefill"}
    assert half_plan.caches[0].dtype == "bfloat16"
    assert (half_plan.caches[0].layout, half_plan.caches[0].page_tokens) == ("kv-rows", 64)
    assert {weight.layout for weight in half_plan.weights.values()} == {"rows"}


def test_arguments_have_their_roles(half_plan: Plan) -> None:
    for bucket in half_plan.buckets:
        buffers = {buffer.value: buffer for buffer in half_plan.buffers(bucket)}
        assert max(buffer.offset + buffer.bytes for buffer in buffers.values()) <= half_plan.memory.arena
        for number, launch in enumerate(bucket.launches):
            kernel = half_plan.kernels[launch.kernel]
            specs = arguments(CUDA_FAMILIES[kernel.family], KernelSpec(kernel.family, kernel.params))
            assert kernel.params["real"] == "bfloat16"
            for spec, arg in zip(specs, launch.args, strict=True):
                assert isinstance(arg, ROLES[spec.role]), (launch.kernel, spec.name)
                assert spec.role == "in" or not isinstance(arg, InputArg) or spec.name in ("ids", arg.name)
                if isinstance(arg, ArenaArg):
                    buffer = buffers[arg.value]
                    assert buffer.offset <= arg.offset < arg.offset + arg.bytes <= buffer.offset + buffer.bytes
                    assert buffer.first <= number <= buffer.last


def test_activations_are_as_large_as_the_bucket(half_plan: Plan) -> None:
    """The logits' buffer holds a row for each row of the bucket's largest step."""
    for bucket in half_plan.buckets:
        (logits,) = (arg for arg in bucket.sample[0].args[:1] if isinstance(arg, ArenaArg))
        assert logits.bytes == max(64, 2 * 320 * bucket.max_rows)


def test_decoding_takes_no_rows(half_plan: Plan) -> None:
    """Every token of a decode step is sampled, so there are none to choose."""
    for bucket in half_plan.buckets:
        assert any(half_plan.kernels[each.kernel].family == "take_rows" for each in bucket.launches) != bucket.decode


# --- machine code -----------------------------------------------------------------------------------------------------


def compiled(folder: Path, name: str, quant: str) -> tuple[Path, Plan]:
    path = make_tiny_plan(folder, "llama", name, target="sm90,sm80", dtype="bfloat16", quant=quant, code=True)
    return path, read_plan(path)


@pytest.mark.parametrize("quant", ["bf16", "int4-g32-asym"])
def test_a_plan_holds_every_kernel_for_every_architecture(
    quant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plan = compiled(tmp_path, "plan", quant)
    assert plan.target == "sm80,sm90"
    assert [(module.arch, module.form) for module in plan.modules] == [
        ("sm80", "cubin"),
        ("sm90", "cubin"),
        ("sm80", "ptx"),
    ]
    assert {launch.kernel for bucket in plan.buckets for launch in bucket.launches} < plan.kernels.keys()
    assert {spec.symbol for spec in runtime_kernels()} < plan.kernels.keys()
    for module in plan.modules:
        data = (path / module.file).read_bytes()
        assert sha256(data).hexdigest() == module.sha256
        assert module.kernels.keys() == plan.kernels.keys()
        for kernel in module.kernels.values():
            assert (data[kernel.offset : kernel.offset + 4] == b"\x7fELF") == (module.form == "cubin")
            assert kernel.entry.encode() in data[kernel.offset : kernel.offset + kernel.bytes]
            assert 0 < kernel.shared + kernel.static_shared <= SHARED_LIMITS[module.arch] or not kernel.shared
            assert kernel.registers * kernel.threads <= REGISTERS
    assert main.run(["inspect", str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "needs an sm80 or sm90 GPU" in text
    assert "sm90: 128 threads" in text
    assert f"kernels/sm90.bin: sm90, {plan.modules[1].bytes / 1024:.0f} KiB" in text
    assert "kernels/sm80-ptx.bin: sm80 and newer, as PTX" in text
    again, _ = compiled(tmp_path, "again", quant)
    for file in sorted(path.rglob("*")):
        assert file.is_dir() or file.read_bytes() == (again / file.relative_to(path)).read_bytes(), file


# --- what is refused --------------------------------------------------------------------------------------------------


def test_all_that_is_missing_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(CUDA_FAMILIES, "rope_kv_write")
    monkeypatch.setitem(
        CUDA_FAMILIES,
        "norm",
        replace(CUDA_FAMILIES["norm"], params={**CUDA_FAMILIES["norm"].params, "real": ("float32",)}),
    )
    with pytest.raises(NoKernelError) as caught:
        make_tiny_plan(tmp_path, "llama", target="sm80", dtype="bfloat16")
    text = str(caught.value)
    assert text.startswith("target sm80 can't run this model")
    assert "norm takes real float32, not 'bfloat16'" in text
    for layer in range(4):
        assert f"rope_kv_write:model.layers.{layer}.self_attn: there is no kernel rope_kv_write" in text


def test_what_is_missing_is_explained_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    assert find_missing(tmp_path, target="sm80,sm86,sm89,sm90").missing == ()
    for quant in ("int8", "int4"):
        assert find_missing(tmp_path, target="sm80,sm90", quant=quant).missing == ()


@pytest.mark.parametrize("options", [{"tuning": "tuning.json"}, {"deterministic": True}], ids=str)
def test_options_of_cpu_plans_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    name = next(iter(options))
    with pytest.raises(UserError, match=rf"only CPU plans have --{name}, but the target is sm80,sm90"):
        compile_model(tmp_path, target="sm90,sm80", output=tmp_path / "plan", **options)


def test_generators_of_cpu_plans_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match="unknown generator 'tvm' for cuda plans: expected cuda, triton or race"):
        compile_model(tmp_path, target="sm90", output=tmp_path / "plan", generator="tvm")


def test_without_triton_its_generator_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    compiler_version.cache_clear()
    monkeypatch.setattr("toolkit.compiler.codegen.triton.version", missing)
    for generator in ("triton", "race"):
        with pytest.raises(UserError, match=r"Triton kernels need Triton, .* pip install 'plan-toolkit\[triton\]'"):
            compile_model(tmp_path, target="sm90", output=tmp_path / "plan", generator=generator)
