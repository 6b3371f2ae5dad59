"""The same model, options and tuning file give the same bytes: in other processes and folders, for other hash seeds and
in another version of Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cpu.kernels.harness import native_isas
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

import toolkit
from toolkit.cli.driver import compile as compile_model
from toolkit.compiler.codegen.cpu import find_compiler
from toolkit.compiler.targets import CPU
from toolkit.compiler.text import constants, print_graph
from toolkit.kernels_templates.catalog import KernelSpec
from toolkit.models.recall import captured_graph
from toolkit.models.source import open_model
from toolkit.runtime.load import read_plan
from toolkit.runtime.plan import Kernel
from toolkit.runtime.tuning import MAJOR, MINOR, Race, Tuning, encode_tuning

from .test_compile import files_of, make_model

SOURCES = Path(toolkit.__file__).parents[1]
PACKAGES = (
    *("click", "jinja2", "markdown-it-py", "markupsafe", "mdurl", "ml-dtypes", "msgspec", "numpy", "onnx", "protobuf"),
    *("pygments", "pyyaml", "rich", "typing-extensions"),
)
"""What the flow behind capture imports."""
RECIPE = "- match: mlp\n  encoding: int4\n- match: proj|lm_head\n  encoding: int8\n"


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with a model, a recipe and a tuning file; and the plan that they make in this process."""
    folder = tmp_path_factory.mktemp("here")
    make_model(folder / "llama", "llama", num_hidden_layers=1, vocab_size=208)
    make_tokenizer().save_pretrained(folder / "llama")
    (folder / "recipe.yaml").write_text(RECIPE)
    quant = str(folder / "recipe.yaml")
    kernels = read_plan(compile_model(folder / "llama", output=folder / "tvm", quant=quant, generator="tvm")).kernels
    races = [
        Race(symbol(kernel), kernel.shape, isa, rows, {"cpp": 1e-6, "tvm": 5e-7}, "tvm" if rows < 64 else "cpp")
        for kernel in kernels.values()
        if kernel.shape
        for isa in native_isas()
        for rows in (1, 8, 64)
    ]
    tuning = Tuning("toolkit-tuning", MAJOR, MINOR, "some CPU", 2, {"c++": "g++", "tvm": "0"}, tuple(races))
    (folder / "tuning.json").write_bytes(encode_tuning(tuning))
    return folder, compile_model(folder / "llama", output=folder / "plan", **choices(folder))


def make_tokenizer() -> Any:
    """Byte-level BPE with many added tokens and more than one template: whatever a tokenizer keeps in sets and maps."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    added = [f"<|{name}|>" for name in ("begin", "end", "user", "tool", "image", "audio", "pad", "mask")]
    trainer = BpeTrainer(vocab_size=100, special_tokens=added[:3], initial_alphabet=list("abcdefghij"))
    tokenizer.train_from_iterator(["a bad cab fed a big jade egg, a cafe had a faded face"] * 3, trainer)
    tokenizer.add_tokens([AddedToken(f"<extra_{n}>", normalized=bool(n % 2)) for n in range(20)])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", begin)])
    made: Any = PreTrainedTokenizerFast
    return made(
        tokenizer_object=tokenizer,
        bos_token=added[0],
        eos_token=added[1],
        pad_token=added[6],
        additional_special_tokens=added[2:],
        chat_template={"default": "{{ messages }}", "tool_use": "{{ tools }}"},
    )


def symbol(kernel: Kernel) -> str:
    """Of the C++ kernel."""
    return KernelSpec(kernel.family, kernel.params).symbol


def choices(folder: Path) -> dict[str, Any]:
    return {"quant": str(folder / "recipe.yaml"), "tuning": str(folder / "tuning.json")}


def contents(plan: Path) -> dict[str, bytes]:
    return {str(path.relative_to(plan)): path.read_bytes() for path in files_of(plan)}


def run(command: list[str], cwd: Path, **environment: str) -> None:
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr


def test_another_process_folder_hash_seed_and_cache(raced: tuple[Path, Path], tmp_path: Path) -> None:
    """All is made anew there, the captured graph and the objects of the C++ compiler and of TVM; here some comes from
    the cache, and the second compilation remembered the first one's graph."""
    folder, plan = raced
    there = tmp_path / "there"
    shutil.copytree(folder, there, ignore=shutil.ignore_patterns("plan", "tvm"))
    options = [part for name, value in choices(there).items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "toolkit.cli.main", "compile", "llama", "-o", "../out", *options]
    empty = {"PYTHONHASHSEED": "1", "TOOLKIT_CACHE": str(tmp_path / "cache")}
    run(command, there, PYTHONPATH=str(SOURCES), **empty)
    assert contents(tmp_path / "out") == contents(plan)
    assert contents(plan).keys() > {"tokenizer.json", "chat_template_tool_use.jinja", "kernels/cpu-x86-64-v3.so"}
    generators = {choice.generator for kernel in read_plan(plan).kernels.values() for choice in kernel.choices}
    assert generators == {"cpp", "tvm"}


# --- another Python ---------------------------------------------------------------------------------------------------


def other_pythons() -> Iterator[tuple[str, str]]:
    """Version and path of other interpreters that the package supports: named, on PATH, or installed by pyenv."""
    candidates = [os.environ.get("TOOLKIT_TEST_PYTHON", "")]
    candidates += [shutil.which(f"python3.{minor}") or "" for minor in (13, 12, 11)]
    candidates += [str(path) for path in sorted(Path.home().glob(".pyenv/versions/3.1[123]*/bin/python"))]
    for candidate in filter(None, candidates):
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        told = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
        found = told.stdout.strip()
        if told.returncode == 0 and found != f"{sys.version_info[0]}.{sys.version_info[1]}":
            yield found, candidate


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Another Python, and a folder with what the flow behind capture needs there, in the same versions as here."""
    found = next(other_pythons(), None)
    if found is None:
        pytest.skip("there is no other Python from 3.11 to 3.13: none on PATH, in ~/.pyenv or TOOLKIT_TEST_PYTHON")
    python_version, python = found
    folder = tmp_path_factory.mktemp("packages")
    wanted = [f"{name}=={version(name)}" for name in PACKAGES]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    pip += ["--no-compile", "--target", str(folder), "--python-version", python_version, "--only-binary=:all:", *wanted]
    done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=280)
    if done.returncode:
        pytest.skip(f"the packages for Python {python_version} are not to be had: {done.stderr.strip()[-300:]}")
    return python, folder


def test_another_python_gives_the_same_bytes(
    raced: tuple[Path, Path], other_python: tuple[str, Path], tmp_path: Path
) -> None:
    """From the graph's text and the checkpoint to the finished plan: torch is not asked to come along."""
    folder, plan = raced
    opened = open_model(str(folder / "llama"))
    config, bounds = opened.config, CPU.bounds(read_plan(plan).model.max_context)
    graph = captured_graph(config, dtype=opened.dtype, bounds=bounds, tensors=opened.weights)
    (tmp_path / "graph.txt").write_text(print_graph(graph))
    arrays: dict[str, Any] = dict(constants(graph))
    np.savez(tmp_path / "constants.npz", **arrays)
    text = read_plan(plan).text
    assert text is not None
    fields = ("model_type", "hidden_size", "num_hidden_layers", "max_position_embeddings", "rope_parameters")
    told = ("name", "dtype", "hashes", "eos_token_ids", "bos_token_id")
    packages = ("numpy", "torch", "transformers", "apache-tvm")
    job = {
        "graph": str(tmp_path / "graph.txt"),
        "constants": str(tmp_path / "constants.npz"),
        "model": str(folder / "llama"),
        "output": str(tmp_path / "out"),
        "choices": choices(folder),
        "text": {"plan": str(plan), "fields": msgspec.to_builtins(text)},
        "opened": {name: getattr(opened, name) for name in told},
        "config": {name: getattr(config, name) for name in fields},
        "versions": {name: version(name) for name in packages},
        "compiler": {"command": find_compiler().command, "version": find_compiler().version},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("after_capture.py")
    python, libraries = other_python
    run([python, str(script), str(tmp_path / "job.json")], tmp_path, PYTHONPATH=f"{SOURCES}:{libraries}")
    assert contents(tmp_path / "out") == contents(plan)
