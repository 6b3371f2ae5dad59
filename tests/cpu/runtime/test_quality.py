"""`bench quality` against numbers that torch computes from the same two models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from cpu.models.tiny_model import save_tiny_model
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import PreTrainedTokenizerFast
from unit.models.gguf_writer import write_gguf

from toolkit.cli.main import group
from toolkit.cli.quality import PlanScorer, measure
from toolkit.cli.windows import cut
from toolkit.models.reference import Reference
from toolkit.runtime.errors import UserError
from toolkit.runtime.options import EngineOptions

WORDS = [f"word{number}" for number in range(199)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny model with random weights and a tokenizer of words, and where it is saved."""
    folder = tmp_path_factory.mktemp("model")
    made = save_tiny_model(folder, "llama")
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapper: Any = PreTrainedTokenizerFast
    wrapper(tokenizer_object=backend, unk_token=WORDS[0]).save_pretrained(folder)
    return folder, made


@pytest.fixture(scope="module")
def plan(native_module: None, model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(model[0], tmp_path_factory.mktemp("plan") / "plan", quant="int4")


def tokens(count: int) -> list[int]:
    result: list[int] = np.random.default_rng(5).integers(3, 199, count).tolist()
    return result


def torch_logits(made: Any, windows: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([made(torch.tensor([window])).logits[0, :-1].double() for window in windows])


def test_the_measures_are_torchs(model: tuple[Path, Any], plan: Path) -> None:
    windows = list(cut(tokens(100), 41, bos=None))
    assert list(map(len, windows)) == [41, 41, 18]
    scorer = PlanScorer(plan, EngineOptions(memory=1 << 30, threads=1))
    ours = torch.tensor(np.concatenate([scorer.logprobs(window) for window in windows])).double()
    found = measure(scorer, Reference(str(model[0])), windows, lambda done: None)
    scorer.close()
    logits = torch_logits(model[1], windows)
    target = torch.tensor([token for window in windows for token in window[1:]])
    expected = kl_div(ours, log_softmax(logits, -1), log_target=True, reduction="none").sum(-1)
    assert found["tokens"] == 97
    assert found["kl"] == pytest.approx(float(expected.mean()), rel=1e-4)
    assert found["kl"] > 1e-3  # four bits are seen
    assert found["kl_p99"] == pytest.approx(float(expected.quantile(0.99)), rel=1e-4)
    assert found["reference_perplexity"] == pytest.approx(math.exp(cross_entropy(logits, target)), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(cross_entropy(ours, target)), rel=1e-5)
    assert found["top1_agreement"] == pytest.approx(float((ours.argmax(-1) == logits.argmax(-1)).double().mean()))


def test_loading_a_gguf_reference_shows_nothing(
    model: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformers has a progress bar for it that nothing turns off."""
    write_gguf(model[1], tmp_path / "m.gguf")
    Reference(str(tmp_path / "m.gguf"))
    assert capsys.readouterr() == ("", "")


def test_windows_begin_with_the_begin_token() -> None:
    assert list(cut(list(range(10, 17)), 4, bos=1)) == [[1, 10, 11, 12], [1, 13, 14, 15], [1, 16]]
    assert list(cut(list(range(9)), 4, bos=None)) == [[0, 1, 2, 3], [4, 5, 6, 7]]  # a last token predicts nothing


def run(*arguments: str) -> str:
    result = CliRunner().invoke(group, ["bench", "quality", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_command(model: tuple[Path, Any], plan: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    ids = tokens(150)
    text.write_text(" ".join(WORDS[token] for token in ids))
    options = ["--text", str(text), "--memory", "1GiB", "--threads", "1"]
    found = json.loads(run(str(plan), "--reference", str(model[0]), "--json", *options))
    assert found["tokens"] == 147  # the plan holds windows of 63 tokens
    assert found["window"] == 63
    logits = torch_logits(model[1], list(cut(ids, 63, None)))
    target = torch.tensor([token for window in cut(ids, 63, None) for token in window[1:]])
    assert found["reference_perplexity"] == pytest.approx(math.exp(cross_entropy(logits, target)), rel=1e-5)
    itself = json.loads(run(str(plan), "--reference", str(plan), "--json", *options))
    assert itself["kl"] == pytest.approx(0.0, abs=1e-12)
    assert itself["top1_agreement"] == 1.0
    assert "KL divergence" in run(str(plan), "--reference", str(plan), *options)


def compiled(model: Path, output: Path, **options: Any) -> Path:
    from toolkit.cli.driver import compile as compile_model

    return compile_model(model, output=output, max_batch=4, max_context=64, **options)


@pytest.mark.usefixtures("native")
def test_calibration_brings_a_plan_closer(model: tuple[Path, Any], plan: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(WORDS[token] for token in np.random.default_rng(8).integers(3, 199, 2000)))
    calibrated = compiled(model[0], tmp_path / "calibrated", quant="int4", calibrate=text)
    assert sorted(path.name for path in calibrated.iterdir()) == sorted(path.name for path in plan.iterdir())
    windows, reference = list(cut(tokens(500), 63, None)), Reference(str(model[0]))
    kl = []
    for directory in (plan, calibrated):
        scorer = PlanScorer(directory, EngineOptions(memory=1 << 30, threads=1))
        kl.append(measure(scorer, reference, windows, lambda done: None)["kl"])
        assert any("calibrated on" in note for note in scorer.plan.report.notes) == (directory == calibrated)
        scorer.close()
    assert kl[1] < kl[0]


def test_calibration_that_can_not_be_done_is_refused(model: tuple[Path, Any], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("word3 word4 word5")
    (tmp_path / "empty.txt").write_text("")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((model[0] / name).read_bytes())
    for folder, options, message in (
        (model[0], {"quant": "int4", "calibrate": text, "calibration_method": "magic"}, "must be awq, gptq, awq.gptq"),
        (model[0], {"quant": "bf16", "calibrate": text}, "choose an integer encoding"),
        (model[0], {"quant": "int4", "calibrate": tmp_path / "empty.txt"}, "has 0 tokens"),
        (model[0], {"quant": "int4", "calibrate": tmp_path / "missing.txt"}, "can't read"),
        (model[0], {"quant": "int4", "calibrate": text, "weights": "random"}, "random weights can't be calibrated"),
        (bare, {"quant": "int4", "calibrate": text}, "needs the model's tokenizer"),
    ):
        with pytest.raises(UserError, match=message):
            compiled(folder, tmp_path / "plan", **options)


@pytest.mark.usefixtures("native")
def test_a_plan_that_replaces_another_runs_its_own_kernels(model: tuple[Path, Any], tmp_path: Path) -> None:
    """In one process, at one path: the linker knows libraries by their names."""
    place, prompt = tmp_path / "plan", tokens(40)

    def scores(directory: Path) -> Any:
        scorer = PlanScorer(directory, EngineOptions(memory=1 << 30, threads=1))
        rows = np.array(scorer.logprobs(prompt))
        scorer.close()
        return rows

    scores(compiled(model[0], place, quant="int8"))
    replaced = scores(compiled(model[0], place, quant="int4-g64", force=True))
    elsewhere = scores(compiled(model[0], tmp_path / "other", quant="int4-g64"))
    np.testing.assert_array_equal(replaced, elsewhere)


def test_what_can_not_be_compared_is_refused(plan: Path, tmp_path: Path) -> None:
    from toolkit.cli.quality import quality

    def attempt(reference: str, text: Path) -> None:
        options = EngineOptions(memory=1 << 30, threads=1)
        quality(plan, reference, options, text=text, window=64, progress=lambda *_: None)

    (tmp_path / "short.txt").write_text("word1")
    (tmp_path / "good.txt").write_text("word1 word2 word3")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    for text, message in (
        ("missing.txt", "can't read"),
        ("binary.txt", "not a text file in UTF-8"),
        ("short.txt", "give a text of some thousand"),
        ("good.txt", "transformers can't load the reference"),
    ):
        with pytest.raises(UserError, match=message):
            attempt(str(tmp_path), tmp_path / text)
