"""The base install, in an empty environment: small, without the compiler's dependencies, and enough to serve a plan."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import venv
from importlib.metadata import distributions
from pathlib import Path

import httpx
import pytest
from e2e.serving import start_command

ROOT = Path(__file__).parents[2]
LIMIT, GPU_LIMIT = 180e6, 350e6
"""Bytes of site-packages, pip aside: to serve plans, and to serve those for GPUs."""


@pytest.fixture(scope="module")
def base_install(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with nothing but a wheel built from the tracked files, and its dependencies."""
    folder = tmp_path_factory.mktemp("install")
    source = folder / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, tracked.decode().split("\0")):
        if (ROOT / name).exists() or (ROOT / name).is_symlink():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    venv.create(folder / "venv", with_pip=True, symlinks=True)
    pip_install(folder / "venv", str(source))
    return folder / "venv"


def pip_install(environment: Path, *what: str) -> None:
    pip = [str(environment / "bin/python"), "-m", "pip", "-q", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), *what], check=True, timeout=280)


def packages_of(environment: Path) -> Path:
    (packages,) = environment.glob("lib/python3.*/site-packages")
    return packages


def size_of(packages: Path) -> int:
    """Bytes of a folder of packages without what installs them."""
    files = (path for path in packages.rglob("*") if path.is_file())
    return sum(
        path.lstat().st_size
        for path in files
        if path.relative_to(packages).parts[0].split("-")[0] not in {"pip", "setuptools", "wheel"}
    )


def _clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def test_it_is_small_and_without_the_compiler(base_install: Path) -> None:
    packages = packages_of(base_install)
    names = {path.name for path in packages.iterdir()}
    assert not names & {"torch", "triton", "transformers", "onnx", "onnxruntime", "tvm", "ziglang", "gguf"}
    assert "toolkit" in names
    assert 20e6 < size_of(packages) <= LIMIT


def test_what_gpus_need_besides_is_small(base_install: Path, tmp_path: Path) -> None:
    packages = packages_of(base_install)
    (toolkit,) = distributions(name="plan-toolkit", path=[str(packages)])
    extra = [each.partition(";")[0] for each in toolkit.requires or () if each.endswith('extra == "cuda"')]
    assert extra
    pip_install(base_install, "--target", str(tmp_path / "gpu"), *extra)
    assert 20e6 < size_of(tmp_path / "gpu") <= GPU_LIMIT - size_of(packages)


def test_it_knows_the_tested_architectures(base_install: Path, tmp_path: Path) -> None:
    command = [str(base_install / "bin/toolkit"), "models", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=_clean_environment(), capture_output=True, check=True)
    assert {"llama", "gemma2"} <= {each["model_type"] for each in json.loads(done.stdout)}


def test_it_serves_a_plan(base_install: Path, smollm2_plan: Path, tmp_path: Path) -> None:
    command = [str(base_install / "bin/toolkit"), "generate", str(smollm2_plan), "--prompt", "The capital of France is"]
    options = ["--max-tokens", "4", "--temperature", "0", "--json"]
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, env=_clean_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_it_writes_the_page_of_a_plan(base_install: Path, smollm2_plan: Path, tmp_path: Path) -> None:
    command = [str(base_install / "bin/toolkit"), "inspect", str(smollm2_plan), "--html"]
    subprocess.run(command, cwd=tmp_path, env=_clean_environment(), capture_output=True, check=True)
    (page,) = tmp_path.iterdir()
    assert page.name == f"{smollm2_plan.name}.html"
    assert all(part in page.read_text() for part in ("<title>", ":root {", "drawParts();", '"launches":'))


def test_it_answers_over_http(base_install: Path, smollm2_plan: Path) -> None:
    server = start_command([str(base_install / "bin/toolkit")], smollm2_plan, env=_clean_environment())
    try:
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert "Paris" in answer.json()["choices"][0]["text"]
    finally:
        assert server.stop() == 0
