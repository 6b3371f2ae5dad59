"""Plans of TVM's kernels, races between generators, and tuning files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from toolkit.cli import measure as clock
from toolkit.cli.driver import compile as compile_model
from toolkit.compiler.generators import ROWS
from toolkit.compiler.quantize import encode
from toolkit.compiler.race import Trial, run_races
from toolkit.kernels_templates.catalog import KernelSpec
from toolkit.runtime.device import machine
from toolkit.runtime.encodings import INT4, INT8
from toolkit.runtime.errors import UserError
from toolkit.runtime.load import read_plan
from toolkit.runtime.plan import Choice, Generator, IsaName, Kernel, Plan
from toolkit.runtime.tuning import Tuning, encode_tuning, read_tuning

from .plan_runner import PlanRunner
from .test_compile import expected, files_of, make_model, sequences

pytestmark = pytest.mark.usefixtures("native")

RECIPE = "- match: mlp\n  encoding: int4\n- match: proj|lm_head\n  encoding: int8\n"
ELIGIBLE = ("linear", "quantize")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with one layer whose matrices all have whole panels, as quantized as `RECIPE` makes it."""
    folder = tmp_path_factory.mktemp("llama")
    model = make_model(folder, "llama", num_hidden_layers=1, vocab_size=208)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                stored = encode(parameter.numpy(), INT4 if "mlp" in name else INT8)
                parameter.copy_(torch.from_numpy(stored.decode()))
    model.save_pretrained(folder)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def compiled(model: Path, output: Path, **choices: Any) -> Plan:
    return read_plan(compile_model(model, output=output, quant=str(model / "recipe.yaml"), **choices))


def eligible(plan: Plan) -> list[Kernel]:
    return [kernel for kernel in plan.kernels.values() if kernel.family in ELIGIBLE]


def test_a_plan_of_tvm_kernels_equals_cpp_and_hugging_face(model_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = {}
    tokens = sequences(208)["a"]
    for generator in ("cpp", "tvm"):
        plan = compiled(model_folder, tmp_path / generator, generator=generator)
        chosen = [{choice.generator for choice in kernel.choices} for kernel in eligible(plan)]
        assert len(chosen) >= 4
        assert all(each == ({"tvm"} if generator == "tvm" else set()) for each in chosen)
        runner = PlanRunner(tmp_path / generator)
        try:
            steps = [runner.step([("a", tokens[:1])])[0], *runner.step([("b", tokens[:3]), ("c", tokens)])]
            found[generator] = np.concatenate(steps)
        finally:
            runner.close()
    assert np.array_equal(found["cpp"], found["tvm"])
    reference = expected(AutoModelForCausalLM.from_pretrained(model_folder), tokens)
    assert np.abs(found["tvm"][4:] - reference).max() < 0.05
    (note,) = plan.report.notes
    assert "stay C++" in note
    assert "attention" in note
    assert "linear" not in note


def test_a_plan_whose_pointwise_kernels_are_tvms(model_folder: Path, tmp_path: Path) -> None:
    """Without fusion every activation, product and sum is a pointwise kernel; TVM takes those of whole rows."""
    found = {}
    tokens = sequences(208)["a"]
    for generator in ("cpp", "tvm"):
        plan = compiled(model_folder, tmp_path / generator, generator=generator, optimize=0)
        kernels = [kernel for kernel in plan.kernels.values() if kernel.family == "pointwise"]
        assert len(kernels) >= 3
        assert all(
            {choice.generator for choice in kernel.choices} == ({"tvm"} if generator == "tvm" else set())
            for kernel in kernels
        )
        runner = PlanRunner(tmp_path / generator)
        try:
            found[generator] = runner.step([("b", tokens[:3]), ("c", tokens)])
        finally:
            runner.close()
    for first, second in zip(found["cpp"], found["tvm"], strict=True):
        assert np.array_equal(first, second)


# --- races ------------------------------------------------------------------------------------------------------------


class FakeClock:
    """Times that depend on the trial's number alone: TVM wins some races and loses others."""

    def __init__(self) -> None:
        self.trials = 0

    def __call__(self, library: Path, trials: Sequence[Trial]) -> list[Mapping[Generator, float]]:
        assert library.exists()
        self.trials += len(trials)
        return [{"cpp": 1e-6, "tvm": 0.5e-6 if number < 2 else 0.99e-6} for number in range(len(trials))]


@pytest.fixture
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(clock, "measure", fake)
    return fake


@pytest.fixture
def one_level(monkeypatch: pytest.MonkeyPatch) -> IsaName:
    """Race at the best level of this machine alone."""
    best: IsaName = native_levels()[-1].name
    monkeypatch.setenv("TOOLKIT_ISA", best)
    return best


def test_races_decide_by_shape_and_rows(
    model_folder: Path, tmp_path: Path, fake_clock: FakeClock, one_level: IsaName
) -> None:
    plan = compiled(model_folder, tmp_path / "plan", generator="race")
    assert plan.tuning is not None
    tuning = read_tuning(tmp_path / "plan" / plan.tuning.file)
    assert len(tuning.races) == fake_clock.trials
    assert {(race.isa, race.rows, race.chosen) for race in tuning.races} == {
        (one_level, 1, "tvm"),
        (one_level, 8, "tvm"),
        (one_level, 64, "cpp"),  # less than the margin
    }
    assert all(race.seconds == {"cpp": 1e-6, "tvm": 0.5e-6 if race.rows < 64 else 0.99e-6} for race in tuning.races)
    assert set(tuning.versions) == {"c++", "tvm"}
    for kernel in eligible(plan):
        assert set(kernel.shape) <= {"N", "K"}
        assert [choice for choice in kernel.choices if choice.isa == one_level] == [
            Choice(one_level, 1, "tvm"),
            Choice(one_level, 8, "tvm"),
            Choice(one_level, 64, "cpp"),
        ]
        assert {choice.generator for choice in kernel.choices if choice.isa != one_level} == {"cpp"}
    (note,) = plan.report.notes
    assert "were not raced there: they are C++" in note
    assert one_level not in note
    runner = PlanRunner(tmp_path / "plan")
    try:
        tokens = sequences(208)["a"]
        alone = [runner.step([("a", [token])])[0] for token in tokens[:5]]
        (together,) = runner.step([("b", tokens[:5])])
        assert np.array_equal(np.concatenate(alone), together)
    finally:
        runner.close()


@pytest.mark.usefixtures("one_level")
def test_a_tuning_file_stands_for_its_race(
    model_folder: Path, tmp_path: Path, fake_clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(model_folder, tmp_path / "raced", generator="race")
    monkeypatch.setattr(clock, "measure", None)  # nothing is timed again
    compiled(model_folder, tmp_path / "tuned", tuning=tmp_path / "raced/tuning.json")
    first, second = (
        {path.relative_to(tmp_path / name): path.read_bytes() for path in files_of(tmp_path / name)}
        for name in ("raced", "tuned")
    )
    assert first == second
    assert fake_clock.trials > 0


@pytest.mark.usefixtures("fake_clock")
def test_tuning_files_of_other_plans_are_noted(model_folder: Path, tmp_path: Path, one_level: IsaName) -> None:
    raced = compiled(model_folder, tmp_path / "raced", generator="race")
    tuning = read_tuning(tmp_path / "raced/tuning.json")
    stranger = msgspec.structs.replace(tuning.races[0], shape={"N": 7, "K": 7})
    fewer = tuple(race for race in tuning.races if race.kernel != tuning.races[0].kernel)
    file = tmp_path / "tuning.json"
    file.write_bytes(encode_tuning(msgspec.structs.replace(tuning, races=(stranger, *fewer))))
    plan = compiled(model_folder, tmp_path / "tuned", tuning=file)
    assert any("1 races of kernels or shapes that are not in this plan" in note for note in plan.report.notes)
    assert any(f"for {one_level} were not raced" in note for note in plan.report.notes)
    assert sum(bool(kernel.choices) for kernel in plan.kernels.values()) < sum(
        bool(kernel.choices) for kernel in raced.kernels.values()
    )
    assert read_tuning(tmp_path / "tuned/tuning.json").races == fewer


def test_bad_choices_are_refused(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    with pytest.raises(UserError, match="can't read the tuning file"):
        compiled(model_folder, tmp_path / "plan", tuning=file)
    file.write_text("{}")
    with pytest.raises(UserError, match="no tuning file, or a damaged one"):
        compiled(model_folder, tmp_path / "plan", tuning=file)
    file.write_bytes(encode_tuning(Tuning("toolkit-tuning", 1, 0, "cpu", 1, {}, ())))
    with pytest.raises(UserError, match="leave one out"):
        compiled(model_folder, tmp_path / "plan", tuning=file, generator="cpp")
    with pytest.raises(UserError, match="unknown generator 'fortran'"):
        compiled(model_folder, tmp_path / "plan", generator="fortran")


def test_the_clock_times_both_generators() -> None:
    """A real race: whatever wins, twice the work takes longer."""
    kernels = [KernelSpec("quantize", {}, {"K": width}) for width in (96, 96 * 64)]
    isas = [level.name for level in native_levels()][-1:]
    races = run_races(kernels, isas, clock.measure)
    assert [(race.isa, race.rows) for race in races] == 2 * [(isa, rows) for isa in isas for rows in ROWS]
    seconds = {(race.shape["K"], race.rows): race.seconds for race in races}
    for generator in ("cpp", "tvm"):
        times = [seconds[width, rows][generator] for width, rows in ((96, 1), (96, 64), (6144, 64))]
        assert 0 < times[0] < times[1] < times[2]


def native_levels() -> list[Any]:
    from toolkit.compiler.codegen.cpu import ISA_LEVELS

    return [level for level in ISA_LEVELS if machine.cpu_flags().issuperset(level.requires)]
