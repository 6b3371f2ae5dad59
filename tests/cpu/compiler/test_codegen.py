"""Compiling kernels: what saves time changes no byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.compiler.codegen import cpu as codegen
from toolkit.kernels_templates.catalog import KernelSpec
from toolkit.kernels_templates.render import render


@pytest.mark.parametrize("level", codegen.ISA_LEVELS, ids=lambda level: level.name)
def test_parsed_headers_change_no_byte(
    level: codegen.IsaLevel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "parsed"))
    source = render(KernelSpec("softmax"), level.name)
    parsed = codegen.compile_object(source, level, "softmax").read_bytes()
    assert len(list(tmp_path.rglob("*.gch"))) == codegen.find_compiler().is_gcc
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "plain"))
    monkeypatch.setattr(codegen, "_parsed_headers", lambda compiler, flags: ())
    assert codegen.compile_object(source, level, "softmax").read_bytes() == parsed
