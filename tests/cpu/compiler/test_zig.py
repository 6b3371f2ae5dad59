"""ziglang as the only C++ compiler: objects of its own and of TVM make one library."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cpu.kernels.harness import native_isas

from toolkit.cli.measure import _Team
from toolkit.compiler.codegen import cpu as codegen
from toolkit.compiler.race import Trial, run_races
from toolkit.kernels_templates.catalog import KernelSpec
from toolkit.runtime.plan import Generator

pytest.importorskip("ziglang")


@pytest.fixture
def zig_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[codegen.Compiler]:
    """No other compiler is on PATH."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    codegen.find_compiler.cache_clear()
    yield codegen.find_compiler()
    codegen.find_compiler.cache_clear()


def test_objects_of_zig_and_tvm_make_one_library(zig_alone: codegen.Compiler) -> None:
    """The library of a race holds both generators' code of a kernel, which give the same bits."""
    assert zig_alone.command == (sys.executable, "-m", "ziglang", "c++")
    outputs: list[npt.NDArray[Any]] = []

    def call_both(library: Path, trials: Sequence[Trial]) -> list[Mapping[Generator, float]]:
        assert b"libc++" not in library.read_bytes()
        team = _Team(library, 2)
        try:
            for trial in trials:
                for function in trial.functions.values():
                    *_, output = trial.keep
                    output[...] = 0x5A
                    team.run(trial, function, 0, 1)
                    outputs.append(output.copy())
        finally:
            team.close()
        return [dict.fromkeys(trial.functions, 1e-6) for trial in trials]

    races = run_races([KernelSpec("quantize", {}, {"K": 64})], native_isas()[-1:], call_both)
    assert len(outputs) == 2 * len(races) > 0
    for cpp, tvm in zip(outputs[::2], outputs[1::2], strict=True):
        assert (cpp != 0x5A).any()
        assert np.array_equal(cpp, tvm)
