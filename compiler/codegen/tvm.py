"""TVM as a generator: a TIR script becomes an object with the same C entry as the C++ kernel of its name.

TVM's own calling convention is left out (no `MakePackedAPI`), as is everything that would call its runtime: an object
has no undefined symbols but libc's, and is linked into the plan's library beside the C++ objects. TVM is imported only
to compile a script whose object is in no cache.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import Any

from ...kernels_templates.catalog import KernelSpec
from ...kernels_templates.render import tvm_symbol
from ...kernels_templates.tvm.families import script
from ...runtime.errors import InternalError, UserError
from ...runtime.plan import IsaName
from ..cache import cached, content_key

_CPUS: dict[IsaName, dict[str, Any]] = {
    "x86-64-v3": {"mcpu": "x86-64-v3"},
    "x86-64-v4": {"mcpu": "x86-64-v4", "mattr": ["+avx512vnni"]},
}
_LOCK = Lock()
"""TVM's parser and passes keep state of their own."""


def tvm_version() -> str:
    """The version of the installed TVM. Raises UserError if there is none."""
    try:
        return version("apache-tvm")
    except PackageNotFoundError:
        raise UserError(
            "generating kernels with TVM needs apache-tvm, not installed here: pip install 'plan-toolkit[compile]'"
        ) from None


def compile_tvm_object(kernel: KernelSpec, isa: IsaName) -> Path:
    """The cached object file of TVM's code for a kernel with a shape. Raises InternalError with TVM's message."""
    source, target = script(kernel, tvm_symbol(kernel), isa), _CPUS[isa]
    return cached(content_key(source, tvm_version(), repr(target)), ".o", lambda path: _compile(source, target, path))


def _compile(source: str, target: dict[str, Any], path: Path) -> None:
    import tvm
    import tvm.script
    from tvm.tirx import transform

    chosen = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu", **target})
    passes = (transform.BindTarget(chosen), transform.FlattenBuffer(), transform.UnrollLoop(), transform.LowerIntrin())
    try:
        with _LOCK, tvm.transform.PassContext(opt_level=3):
            module = tvm.transform.Sequential(passes)(tvm.script.from_source(source))
            tvm.get_global_func("target.build.llvm")(module, chosen).write_to_file(str(path), "o")
    except Exception as error:  # TVM raises many kinds
        raise InternalError(f"TVM refused a kernel: {error}\n{source}") from error
