"""Fixtures that every test may use."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# One thread a test process: workers of a parallel run would otherwise spin on each other's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# A busy machine is no failure: examples are not timed, the suite is.
settings.register_profile("toolkit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("toolkit")


def _model(name: str) -> Path:
    folder = os.environ.get("TOOLKIT_TEST_MODELS")
    if not folder:
        pytest.skip("TOOLKIT_TEST_MODELS names no folder with models; `make test` fetches them and sets it")
    path = Path(folder) / name
    if not path.is_file():
        pytest.fail(f"TOOLKIT_TEST_MODELS={folder} has no {name}; `make test` fetches it")
    return path


@contextmanager
def best_level_alone() -> Iterator[None]:
    """Compile only for the best ISA level that this machine runs, which halves the time."""
    from toolkit.compiler.codegen import cpu as codegen
    from toolkit.runtime.device.machine import cpu_flags

    best = [level for level in codegen.ISA_LEVELS if cpu_flags().issuperset(level.requires)][-1:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codegen, "build_libraries", partial(codegen.build_libraries, levels=best))
        yield


@pytest.fixture
def native() -> Iterator[None]:
    with best_level_alone():
        yield


@pytest.fixture(scope="module")
def native_module() -> Iterator[None]:
    """The same, for fixtures of a module."""
    with best_level_alone():
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as GGUF: Q4_1, Q8_0 and F32 tensors."""
    return _model("smollm2.gguf")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """gemma-3-270m as GGUF: Q5_0, Q4_K, Q6_K, Q8_0 and F32 tensors."""
    return _model("gemma-3-270m-q4_k_m.gguf")


@pytest.fixture(scope="session")
def smollm2_plan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 compiled with its own encodings, once for all workers of a test run; or TOOLKIT_TEST_PLAN's plan."""
    if given := os.environ.get("TOOLKIT_TEST_PLAN"):
        return Path(given)
    smollm2 = request.getfixturevalue("smollm2")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    plan = shared / "smollm2-plan"
    with open(shared / "smollm2-plan.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not plan.exists():
            from toolkit import compile as compile_model

            compile_model(smollm2, output=plan, max_batch=8, max_context=1024)
    return plan
