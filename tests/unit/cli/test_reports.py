"""`doctor`, `generate` and `bench kernels`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from unit.runtime.engine_harness import make_engine
from unit.runtime.fake_device import FakeDevice, fake_plan
from unit.runtime.sample_plan import write_sample_plan
from unit.runtime.server.fakes import ByteTokenizer

from toolkit.cli import doctor, load, main
from toolkit.cli.profile import Profile, make_step, read_profile
from toolkit.cli.roofline import Machine
from toolkit.cli.workload import StepSize
from toolkit.runtime.errors import UserError
from toolkit.runtime.load import read_plan
from toolkit.runtime.prompt import Prompts

# --- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["doctor"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("python", "instruction set", "cores", "memory", "C++ compiler", "torch"))
    assert main.run(["doctor", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert found["instruction set"]["value"].startswith("x86-64-v")
    assert found["cuda-bindings"]["problem"] == ""


def test_doctor_fails_where_plans_cant_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    with pytest.raises(SystemExit) as caught:
        main.run(["doctor"])
    assert caught.value.code == 1
    assert "lacks" in capsys.readouterr().out


def test_doctor_says_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=2.11; extra == 'compile'", "absent-package>=1; extra == 'compile'", "click>=8"]
    monkeypatch.setattr(doctor, "requires", lambda name: wanted)
    found = {each.name: each for each in doctor.examine()}
    assert found["torch"].problem == ""
    assert "pip install 'plan-toolkit[compile]'" in found["absent-package"].problem
    assert "click" not in found


# --- generate ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_prompts(directory: object, plan: Any) -> Prompts:
        return Prompts(plan, ByteTokenizer(), None)

    monkeypatch.setattr("toolkit.runtime.llm.open_engine", lambda *_: make_engine(vocabulary=128))
    monkeypatch.setattr(Prompts, "open", open_prompts)


def test_generate_streams_text_or_ids(fake_llm: None, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-tokens", "6", "--temperature", "0"]
    assert main.run(["generate", "plan", "--prompt", "abc", *options]) == 0
    text = capsys.readouterr()
    assert "first token after" in text.err
    assert main.run(["generate", "plan", "--prompt", "abc", *options, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["text"] + "\n" == text.out
    assert main.run(["generate", "plan", "--tokens", "97,98,99", *options]) == 0
    assert [int(token) for token in capsys.readouterr().out.split()] == data["token_ids"]


@pytest.mark.parametrize("prompt", [[], ["--prompt", "a", "--tokens", "1"], ["--tokens", "a"], ["--tokens", "999"]])
def test_generate_refuses(prompt: list[str], fake_llm: None) -> None:
    assert main.run(["generate", "plan", *prompt]) == 2


# --- bench ------------------------------------------------------------------------------------------------------------


def test_profiled_steps_are_legal() -> None:
    """The fake device checks everything about a step and that no read slot is unwritten."""
    device = FakeDevice(fake_plan(windows=(0, 16), page_tokens=4), pages=64)
    step = make_step(device, StepSize(3, 9, 9))
    step.rows["sample"], step.rows["target"] = 0, 3  # the fake sampler wants a history
    result = device.wait(device.submit(step))
    assert result.rows["token"].tolist() == [3, 3, 3]
    assert len(np.unique(np.concatenate([page.ravel() for page in step.pages[:1]]))) == 9
    with pytest.raises(UserError, match="--memory"):
        make_step(device, StepSize(3, 1, 96))


def test_kernels_need_a_plan_and_a_step_it_can_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sample_plan(tmp_path / "plan")
    for arguments, reason in (
        (["http://127.0.0.1:1"], "give a plan"),
        ([str(tmp_path / "plan"), "--batch", "9"], "at most 32 tokens and 8 sequences"),
        ([str(tmp_path / "plan"), "--context", "129"], "1 to 128"),
    ):
        assert main.run(["bench", "kernels", *arguments]) == 2
        assert reason in capsys.readouterr().err


def test_profiles_of_other_plans_are_refused(llama_plan: Path, gemma_plan: Path, tmp_path: Path) -> None:
    made = Profile(
        "plan", read_plan(llama_plan).content_digest, "x86-64-v3", 1, Machine(1, 1, 1), StepSize(), 1, 1e-6, ()
    )
    file = tmp_path / "step.json"
    file.write_bytes(msgspec.json.encode(made))
    assert read_profile(file, llama_plan, read_plan(llama_plan)) == made
    for path, plan, reason in (
        (file, gemma_plan, "another plan"),
        (llama_plan / "plan.json", llama_plan, "is no profile"),
        (tmp_path / "absent", llama_plan, "No such file"),
    ):
        with pytest.raises(UserError, match=reason) as caught:
            read_profile(path, plan, read_plan(plan))
        assert f"make one with `toolkit bench kernels {plan} --json > step.json`" in str(caught.value)


def test_percentiles_and_prompts() -> None:
    times = load.percentiles([float(value) for value in range(1, 101)])
    assert (times.mean, times.p50, times.p90, times.p99) == (50.5, 51.0, 91.0, 100.0)
    prompts = load.random_prompts(5, 7, 50)
    assert prompts == load.random_prompts(5, 7, 50)
    assert all(len(prompt) == 7 and 10 <= min(prompt) <= max(prompt) < 50 for prompt in prompts)


# --- models -----------------------------------------------------------------------------------------------------------


def test_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["models", "--json"]) == 0
    found = {each["model_type"]: each for each in json.loads(capsys.readouterr().out)}
    assert set(found["qwen3"]["proved"]) == {"packed", "chunked", "stepwise", "bfloat16", "onnx"}
    assert {"default", "llama3", "linear", "yarn"} <= set(found["llama"]["rope"])
    assert "QK norm" in found["qwen3"]["features"]
    assert main.run(["models"]) == 0
    text = capsys.readouterr().out
    assert all(part in text for part in ("stepwise", "Qwen 3, dense", "parallel", "✓"))
