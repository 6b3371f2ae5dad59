"""Triton kernels compile without a GPU, for every architecture, with the arguments of the catalog alone."""

from __future__ import annotations

import re

import pytest

from toolkit.compiler.codegen import triton as codegen
from toolkit.compiler.codegen.cuda import REGISTERS, SHARED_LIMITS, compile_form, compile_kernel, launch_grid
from toolkit.compiler.codegen.triton import own_parameters
from toolkit.kernels_templates.catalog import POINTWISE_INPUTS, KernelSpec, ParamValue
from toolkit.kernels_templates.cuda.choose import choose_linear
from toolkit.kernels_templates.registry import CUDA_FAMILIES, is_triton
from toolkit.kernels_templates.render import arguments
from toolkit.kernels_templates.triton.choose import triton_kernels
from toolkit.runtime.errors import InternalError
from toolkit.runtime.plan import ArchName

ARCHS: tuple[ArchName, ...] = ("sm80", "sm86", "sm89", "sm90")


def forms(used: str) -> dict[str, ParamValue]:
    return {f"in{index}": used[index : index + 1] for index in range(POINTWISE_INPUTS)}


def linear(real: str, rows: int, gated: bool) -> list[KernelSpec]:
    """The Triton kernels for a layer with a bias and a residual."""
    columns, inner = 4096, 4096
    encoding = {"float32": "f32", "bfloat16": "bf16"}[real]
    family, sizes = choose_linear(rows, columns=columns, inner=inner, real=real, encoding=encoding, gated=gated)
    layer: dict[str, ParamValue] = {"has_bias": True, "gated": gated, "extra1": "t", "extra2": ""}
    layer |= {"extra3": "", "extra4": "", "epilogue": "(add (mul (silu in0) in1) in2)" if gated else "(add in0 in1)"}
    return triton_kernels(KernelSpec(family, sizes | layer), {"rows": rows, "N": columns, "K": inner})


def rows_of(real: str) -> dict[str, KernelSpec]:
    """A kernel of each family that works row by row or element by element."""
    flags: dict[str, ParamValue] = dict.fromkeys(("has_weight", "has_residual"), True)
    expressions: dict[str, ParamValue] = {
        "exprs": "(mul in0 (rsqrt (mean (mul in0 in0))))",
        "column": False,
        "first_out": False,
    }
    given: dict[str, dict[str, ParamValue]] = {
        "norm": {"kind": "rms", "row_threads": 512, "has_bias": False, **flags},
        "pointwise": {"expr": "(mul (gelu_tanh in0) (add in1 (sin in2)))", **forms("tn1")},
        "reduction": {**expressions, **forms("t")},
    }
    if real == "bfloat16":
        features = ("has_window", "has_softcap", "has_sinks", "has_slopes")
        heads: dict[str, ParamValue] = {"dtype": real, "key_dim": 128, "value_dim": 128}
        given["attention_prefill"] = {**heads, **dict.fromkeys(features, False)}
    sizes = {"rows": 512, "W": 4096, "weight_rows": 1, "S": 256, "heads": 32, "kv_heads": 8, "page_tokens": 64}
    return {
        family: triton_kernels(KernelSpec(family, {"real": real, **own}), sizes)[0] for family, own in given.items()
    }


KERNELS = {
    **{f"{family}-{real}": kernel for real in ("float32", "bfloat16") for family, kernel in rows_of(real).items()},
    **{
        f"linear-{real}-{rows}-{gated}-{index}": kernel
        for real, rows, gated in (
            *(("bfloat16", 64, False), ("bfloat16", 512, False), ("bfloat16", 8192, True)),
            ("float32", 512, True),
        )
        for index, kernel in enumerate(linear(real, rows, gated)[:2])
    },
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", KERNELS)
def test_every_family_compiles(name: str, arch: ArchName) -> None:
    kernel = KERNELS[name]
    compiled, threads = compile_kernel(kernel, arch), launch_grid(kernel, arch).threads
    assert compiled.code[:4] == b"\x7fELF"
    assert kernel.symbol.encode() in compiled.code
    assert 0 < compiled.registers * threads <= REGISTERS
    assert compiled.spilled == 0
    assert compiled.dynamic <= SHARED_LIMITS[arch]
    assert (compiled.dynamic > 10_000) == name.startswith(("linear", "attention"))


@pytest.mark.parametrize(("arch", "tensor_maps"), [("sm80", 0), ("sm90", 2)])
def test_parameters_are_the_catalogs(arch: ArchName, tensor_maps: int) -> None:
    """PTX names them: pointers and numbers in order, tensor maps by value, and nothing of Triton's own."""
    kernel = linear("bfloat16", 512, gated=True)[0]
    text = compile_form(kernel, arch, "ptx").code.rstrip(b"\0").decode()
    assert (".version 8.7" in text, f".target sm_{arch[2:]}" in text) == (True, True)
    (head,) = re.findall(r"\.entry \w+\((.*?)\n\)", text, re.DOTALL)
    found = [line.split()[-1].strip(",").partition("[") for line in re.split(r",\s*(?=\.param)", head.strip())]
    specs = arguments(CUDA_FAMILIES[kernel.family], kernel)
    assert len(found) == len(specs)
    assert [spec.name for spec, (_, bytes_, _) in zip(specs, found, strict=True) if bytes_] == ["x", "weight"][
        :tensor_maps
    ]
    assert head.count(".u64") == sum(spec.ctype.endswith("*") for spec in specs) - tensor_maps
    assert head.count(".u32") == 3


def test_a_parameter_that_is_read_is_not_dropped() -> None:
    def text(body: str) -> str:
        params = ",\n".join(f"\t.param .u64 .ptr .global .align 1 k_param_{index}" for index in range(3))
        return f".visible .entry k(\n{params}\n)\n{{\n{body}\n}}"

    assert "k_param_1" not in own_parameters(text("ld.param.b64 %rd1, [k_param_0];"), [False])
    with pytest.raises(InternalError, match="reads k_param_2, a parameter that is no argument"):
        own_parameters(text("ld.param.b64 %rd1, [k_param_2];"), [False])
    with pytest.raises(InternalError, match="other parameters than expected"):
        own_parameters(text(""), [False, False])


def test_what_does_not_compile_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KERNELS["norm-float32"]
    assert is_triton(kernel)
    source = f"import triton\n@triton.jit\ndef {kernel.symbol}(x):\n    y + 1\n"
    with pytest.raises(InternalError, match=r"(?s)k_norm_triton\w* for sm80 failed"):
        codegen.assemble(source, kernel, "sm80")
