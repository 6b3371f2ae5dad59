"""Environment variables are read in one place, and mistakes in them are errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.runtime.env import Env, describe_env, read_env
from toolkit.runtime.errors import UserError


def test_defaults() -> None:
    assert read_env({}) == Env() == read_env({"TOOLKIT_DEBUG": "", "TOOLKIT_CACHE": "", "TOOLKIT_MASK_CPU_FLAGS": ""})


def test_values() -> None:
    environ = {"TOOLKIT_DEBUG": "3", "TOOLKIT_CACHE": "/a/b", "TOOLKIT_MASK_CPU_FLAGS": "avx512f,avx2", "OTHER": "x"}
    assert read_env(environ) == Env(debug=3, cache=Path("/a/b"), mask_cpu_flags=("avx512f", "avx2"))


@pytest.mark.parametrize("text", ["5", "-1", "yes", "1.0"])
def test_a_value_that_cannot_be_used_is_refused_by_name(text: str) -> None:
    with pytest.raises(UserError, match="TOOLKIT_DEBUG"):
        read_env({"TOOLKIT_DEBUG": text})


def test_every_variable_is_explained() -> None:
    described = describe_env()
    assert set(described) == {"TOOLKIT_DEBUG", "TOOLKIT_CACHE", "TOOLKIT_MASK_CPU_FLAGS"}
    assert all(described.values())
