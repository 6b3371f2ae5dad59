"""The plan's module for a GPU: its kernels, each loaded when it is first asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ...errors import UserError
from ...load import verify_file
from ...plan import ArchName, CudaKernel, CudaModule
from .driver import Gpu, call

_PLAIN_SHARED = 48 << 10
"""Bytes of dynamic shared memory that need no asking."""


@dataclass(frozen=True)
class Function:
    """A kernel that can be launched."""

    name: str
    handle: Any
    kernel: CudaKernel


class Kernels:
    """Functions by the names that launches use."""

    def __init__(self, gpu: Gpu, directory: Path, module: CudaModule, *, verify: bool) -> None:
        self._gpu = gpu
        self._kernels = module.kernels
        self._symbols = {kernel.entry: name for name, kernel in module.kernels.items()}
        self._found: dict[str, Function] = {}
        self._modules: list[Any] = []
        if verify:
            verify_file(directory, module.file, module.sha256)
        try:
            self._code = memoryview((directory / module.file).read_bytes())
        except OSError as error:
            raise UserError(f"can't read {directory / module.file}: {error.strerror}") from None

    def __getitem__(self, name: str) -> Function:
        found = self._found.get(name)
        if found is None:
            found = self._found[name] = self._load(name)
        return found

    def of_runtime(self, family: str) -> Function:
        """A kernel that belongs to no op. Raises UserError if the plan lacks it."""
        name = self._symbols.get(f"k_{family}")
        if name is None:
            raise UserError(f"the plan holds no kernel {family}, without which no GPU can run it: compile it again")
        return self[name]

    def _load(self, name: str) -> Function:
        driver, kernel = self._gpu.driver, self._kernels[name]
        code = bytes(self._code[kernel.offset : kernel.offset + kernel.bytes])
        module = call(driver.cuModuleLoadData, code)
        self._modules.append(module)
        handle = call(driver.cuModuleGetFunction, module, kernel.entry.encode())
        if kernel.shared > _PLAIN_SHARED:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(driver.cuFuncSetAttribute, handle, attribute, kernel.shared)
        return Function(name, handle, kernel)

    def close(self) -> None:
        """Unload everything."""
        for module in self._modules:
            call(self._gpu.driver.cuModuleUnload, module)
        self._modules, self._found = [], {}


def choose_module(modules: Sequence[CudaModule], arch: str, name: str, shared: int) -> CudaModule:
    """The module for a GPU of this architecture and name, whose blocks may have `shared` bytes of shared memory.

    That is one of its own architecture, or machine code for an older GPU of its generation, or else PTX, which its
    driver compiles. Raises UserError if the plan has none.
    """
    for module in sorted(modules, key=lambda module: (module.form, -_capability(module.arch))):
        if _runs(module, arch) and all(each.shared + each.static_shared <= shared for each in module.kernels.values()):
            return module
    held = " and ".join(module.arch for module in modules if module.form == "cubin")
    newest = [each for each in get_args(ArchName) if _capability(each) <= _capability(arch)][-1:]
    advice = f"compile with --target {newest[0] if arch in newest else 'sm89'}" if newest else "use sm80 or newer"
    raise UserError(f"this plan holds kernels for {held}, but this machine's {name} is {arch}: {advice}")


def _runs(module: CudaModule, arch: str) -> bool:
    """Whether a GPU of an architecture takes the module's code, its size aside."""
    own, other = _capability(module.arch), _capability(arch)
    if module.form == "ptx":
        return own <= other
    return own == other or (module.arch != "sm90" and own // 10 == other // 10 and own < other)


def _capability(arch: str) -> int:
    return int(arch.removeprefix("sm"))
