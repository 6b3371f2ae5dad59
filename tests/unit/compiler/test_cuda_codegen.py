"""CUDA kernels compile without a GPU, for every architecture, and what a GPU can't launch is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from toolkit.compiler.codegen import cuda as codegen
from toolkit.compiler.codegen.cuda import build_modules, compile_form, compile_kernel
from toolkit.kernels_templates.catalog import Axis, Grid, KernelSpec, ParamValue
from toolkit.kernels_templates.registry import CUDA_FAMILIES
from toolkit.runtime.errors import InternalError
from toolkit.runtime.plan import ArchName, GridAxis

ARCHS: tuple[ArchName, ...] = ("sm80", "sm86", "sm89", "sm90")
FREE: Mapping[str, ParamValue] = {
    "epilogue": "(add (mul (silu in0) in1) in2)",
    "expr": "(mul (silu in0) (sigmoid in1))",
    "exprs": "(add in0 in1) (mul in0 (sum (sub in0 (max in0))))",
    **dict.fromkeys(("head_dim", "rotary", "key_dim", "value_dim"), 64),
    "in0": "t",
    "in1": "1",
}
"""Values for parameters that may be anything."""


FAMILIES = {name: family for name, family in CUDA_FAMILIES.items() if not family.triton}


def kernels() -> dict[str, KernelSpec]:
    """A kernel of every family in C++, with the last of its legal parameters."""
    found = {}
    for family in FAMILIES.values():
        params = {name: values[-1] if values else FREE[name] for name, values in family.params.items()}
        if "epilogue" in params:
            params |= dict.fromkeys(("extra2", "extra3", "extra4"), "")
        if "tile_rows" in params:  # those of the largest tile; some are for smaller ones
            params |= {"tile_columns": 128, "split": 2, "stages": 4, "depth": 64}
        if family.name in ("pointwise", "reduction"):
            params |= {f"in{index}": FREE.get(f"in{index}", "") for index in range(8)}
        if family.name == "reduction":
            params["column"] = False
        found[family.name] = KernelSpec(family.name, params)
    return found


SLOW = ("sample",)
"""Families that take seconds to compile: for the oldest and the newest architecture only."""
CASES = [(name, arch) for name in FAMILIES for arch in ARCHS if name not in SLOW or arch in ("sm80", "sm90")]


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_every_family_compiles(name: str, arch: ArchName) -> None:
    compiled = compile_kernel(kernels()[name], arch)
    assert compiled.code[:4] == b"\x7fELF"
    assert 0 < compiled.registers <= 255
    assert compiled.spilled <= (128 if name == "sample" else 8)


def test_modules_hold_every_kernel(tmp_path: Path) -> None:
    modules = build_modules(kernels(), ("sm80", "sm90"), tmp_path)
    for module in modules:
        data = (tmp_path / module.file).read_bytes()
        assert (len(data), sha256(data).hexdigest()) == (module.bytes, module.sha256)
        for name, kernel in module.kernels.items():
            code = data[kernel.offset : kernel.offset + kernel.bytes]
            assert code == compile_form(kernels()[name], module.arch, module.form).code
            assert code[:4] == b"\x7fELF" if module.form == "cubin" else b".target sm_80" in code and code[-1] == 0
    assert [(module.arch, module.form) for module in modules] == [("sm80", "cubin"), ("sm90", "cubin"), ("sm80", "ptx")]
    assert modules[0].kernels["pointwise"].grid[0] == GridAxis((3, 4), 256)  # after out, which has position 2


def test_what_cant_be_launched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = kernels()["norm"]
    greedy = replace(CUDA_FAMILIES["norm"], grid=lambda params: Grid(256, Axis(("rows",)), shared=150_000))
    monkeypatch.setitem(CUDA_FAMILIES, "norm", greedy)
    compile_kernel(norm, "sm90")
    with pytest.raises(InternalError, match=r"1501\d\d bytes of shared memory .* sm86 has 101376"):
        compile_kernel(norm, "sm86")


def test_what_does_not_compile_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codegen, "render_cuda", lambda kernel, arch: "void nothing(")
    with pytest.raises(InternalError, match=r"k_norm\w* for sm80 failed(.|\n)*expected"):
        compile_kernel(kernels()["norm"], "sm80")
