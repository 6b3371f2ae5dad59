"""Environment variables are read in one place, and mistakes in them are errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.runtime.env import Env, describe_env, read_env
from toolkit.runtime.errors import UserError


def test_defaults() -> None:
    assert read_env({}) == Env() == read_env({"TOOLKIT_DEBUG": "", "TOOLKIT_CACHE": "", "TOOLKIT_ISA": ""})


def test_values() -> None:
    environ = {"TOOLKIT_DEBUG": "3", "TOOLKIT_CACHE": "/a/b", "TOOLKIT_ISA": "x86-64-v3", "OTHER": "x"}
    assert read_env(environ) == Env(debug=3, cache=Path("/a/b"), isa="x86-64-v3")


@pytest.mark.parametrize(
    ("name", "text"),
    [*(("TOOLKIT_DEBUG", text) for text in ("5", "-1", "yes", "1.0")), ("TOOLKIT_ISA", "avx2"), ("TOOLKIT_ISA", "v4")],
)
def test_a_value_that_cannot_be_used_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(UserError, match=name):
        read_env({name: text})


def test_every_variable_is_explained() -> None:
    described = describe_env()
    assert set(described) == {"TOOLKIT_DEBUG", "TOOLKIT_CACHE", "TOOLKIT_ISA"}
    assert all(described.values())
