"""Remembered graphs equal captured ones, and whatever decides a graph makes it be captured anew."""

from __future__ import annotations

import inspect
import random
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from cpu.models.architectures import BOUNDS, tensors, tiny_config
from transformers import LlamaConfig, PreTrainedConfig

from toolkit.compiler import cache as caching
from toolkit.compiler.ir import Graph
from toolkit.compiler.text import print_graph
from toolkit.models import capture as capturing
from toolkit.models import recall
from toolkit.models.capture import MissingPartsError
from toolkit.models.recall import captured_graph

captured = capturing.capture


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@cache
def some_graph() -> Graph:
    return captured(tiny_config("llama"), dtype="float32", bounds=BOUNDS, has_weight=lambda _: True)


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """An entry for each capture, which takes no time: where what is captured does not matter."""
    found: list[Graph] = []

    def stub(*_: object, **__: object) -> Graph:
        found.append(some_graph())
        return some_graph()

    monkeypatch.setattr(capturing, "capture", stub)
    return found


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that were captured rather than remembered."""
    found: list[Graph] = []

    def counted(*args: Any, **choices: Any) -> Graph:
        found.append(captured(*args, **choices))
        return found[-1]

    monkeypatch.setattr(capturing, "capture", counted)
    return found


def recalled(config: PreTrainedConfig | str = "llama", **choices: Any) -> Graph:
    name = config if isinstance(config, str) else "llama"
    config = tiny_config(config) if isinstance(config, str) else config
    return captured_graph(config, **{"dtype": "float32", "bounds": BOUNDS, "tensors": tensors(name), **choices})


@pytest.mark.parametrize("case", ["llama", "phi3 longrope", "gemma3_text", "gpt2"])
def test_a_remembered_graph_is_the_captured_one(case: str, captures: list[Graph]) -> None:
    first, second = recalled(case), recalled(case)
    assert len(captures) == 1
    assert first == second == captures[0]
    assert print_graph(second) == print_graph(captures[0])


def test_without_reuse_a_graph_is_captured_and_remembered_anew(stubbed: list[Graph]) -> None:
    recalled()
    assert recalled(reuse=False) == some_graph()
    assert len(stubbed) == 2
    recalled()
    assert len(stubbed) == 2


def test_where_a_model_lies_does_not_matter(captures: list[Graph]) -> None:
    for place in ("/a/model", "/b/model"):
        config = tiny_config("llama")
        config._name_or_path = place
        recalled(config)
    assert len(captures) == 1


def change_source(path: Path) -> None:
    path.write_text(path.read_text() + "\n# changed\n")


def other_config(**values: Any) -> Callable[..., object]:
    def change(*_: object) -> PreTrainedConfig:
        config = tiny_config("llama")
        for name, value in values.items():
            setattr(config, name, value)
        return config

    return change


def package_of_another_version(name: str) -> Callable[..., None]:
    def change(patch: pytest.MonkeyPatch, *_: object) -> None:
        patch.setattr(f"{recall.__name__}.version", lambda package: "0.1" if package == name else version(package))

    return change


DECIDING: dict[str, Callable[[pytest.MonkeyPatch, Path, Path], object]] = {
    "an epsilon": other_config(rms_norm_eps=1e-3),
    "a rope base": other_config(rope_parameters={"rope_type": "default", "rope_theta": 77.0}),
    "fewer layers": other_config(num_hidden_layers=2),
    "the model's code": lambda _patch, model, _ours: change_source(model / "modeling_llama.py"),
    "our code": lambda _patch, _model, ours: change_source(ours / "inner/part.py"),
    "a new file of ours": lambda _patch, _model, ours: (ours / "inner/new.py").touch(),
    "transformers": package_of_another_version("transformers"),
    "torch": package_of_another_version("torch"),
    "the dtype": lambda *_: {"dtype": "bfloat16"},
    "the longest context": lambda *_: {"bounds": replace(BOUNDS, max_context=64)},
    "the tokens of a step": lambda *_: {"bounds": replace(BOUNDS, max_tokens=32)},
    "the checkpoint's tensors": lambda *_: {"tensors": [*tensors("llama"), "more.weight"]},
}


@pytest.mark.parametrize("what", DECIDING)
def test_what_decides_a_graph_has_it_captured_anew(
    what: str, stubbed: list[Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    implementation = recall._implementation(tiny_config("llama"))
    assert implementation is not None
    model, ours = tmp_path / "llama", tmp_path / "ours"
    shutil.copytree(implementation, model)
    (ours / "inner").mkdir(parents=True)
    (ours / "inner/part.py").touch()
    monkeypatch.setattr(recall, "_implementation", lambda _: model)
    monkeypatch.setattr(caching, "FOLDERS", (*caching.FOLDERS, ours))
    recalled()
    recalled()
    assert len(stubbed) == 1
    changed = DECIDING[what](monkeypatch, model, ours)
    choices = changed if isinstance(changed, dict) else {}
    recalled(changed if isinstance(changed, PreTrainedConfig) else "llama", **choices)
    assert len(stubbed) == 2


def test_everything_of_this_package_that_capture_imports_is_among_the_sources() -> None:
    root = caching.FOLDERS[0].parent
    for module in (recall, capturing):
        for names in re.findall(r"^from \.\.(\w+)", inspect.getsource(module), re.M):
            assert root / names in caching.FOLDERS


def test_a_damaged_entry_is_made_anew(folder: Path, stubbed: list[Graph]) -> None:
    recalled()
    (entry,) = folder.rglob("*.graph")
    whole, rng = entry.read_bytes(), random.Random(0)
    for attempt in range(100):
        at = rng.randrange(len(whole))
        flipped = whole[:at] + bytes([whole[at] ^ rng.randint(1, 255)]) + whole[at + 1 :]
        entry.write_bytes(whole[:at] if attempt % 2 else flipped)
        stubbed.clear()
        assert recalled() == some_graph()
        assert len(stubbed) == 1
        assert entry.read_bytes() == whole


def test_compilations_at_the_same_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one finishes while this one captures; then many read."""
    inner: list[Graph] = []

    def overtaken(*_: object, **__: object) -> Graph:
        monkeypatch.setattr(capturing, "capture", lambda *_, **__: some_graph())
        inner.append(recalled())
        return some_graph()

    monkeypatch.setattr(capturing, "capture", overtaken)
    assert [recalled()] == inner == [some_graph()]
    with ThreadPoolExecutor(4) as pool:
        assert all(graph == some_graph() for graph in pool.map(lambda _: recalled(), range(8)))
    assert len(list(folder.rglob("*.graph"))) == 1


def test_what_cannot_be_captured_is_not_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Graph:
        raise MissingPartsError("llama", ["something"], {})

    monkeypatch.setattr(capturing, "capture", refuse)
    for _ in range(2):
        with pytest.raises(MissingPartsError):
            recalled()
    assert not list(folder.rglob("*.graph"))


class OtherConfig(LlamaConfig):  # type: ignore[no-untyped-call]
    """Registered by somebody, whose sources are unknown."""


def test_architectures_of_others_are_captured_each_time(folder: Path, stubbed: list[Graph]) -> None:
    config = OtherConfig.from_dict(tiny_config("llama").to_dict())
    assert recalled(config) is recalled(config) is some_graph()
    assert len(stubbed) == 2
    assert not folder.exists()
