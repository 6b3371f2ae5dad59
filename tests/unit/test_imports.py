"""Import directions between the folders, read from the sources (DESIGN: the way of the data is one way)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import toolkit

ROOT = Path(toolkit.__file__).parent
FOLDERS = ("cli", "compiler", "kernels_templates", "models", "passes", "runtime")
SHARED = frozenset(
    f"runtime.{name}"
    for name in ("plan", "encodings", "env", "errors", "decode", "step", "options", "tuning", "formats")
)
ALLOWED: dict[str, frozenset[str]] = {
    "cli": frozenset({*FOLDERS, ""}),
    "models": frozenset({"compiler", *SHARED}),
    "passes": frozenset({"compiler", "kernels_templates", *SHARED}),
    "compiler": frozenset({"kernels_templates", *SHARED, ""}),
    "kernels_templates": SHARED,
    "runtime": frozenset({""}),
}
"""What each folder may import besides itself: folders, single modules, or "" for the root, where the version is."""


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name below `toolkit`, or the absolute name, of each import; type-only imports included."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if not node.level:
                yield node.lineno, node.module or ""
                continue
            base = package[: len(package) - (node.level - 1)]
            module = ".".join((*base, *(node.module or "").split("."))).strip(".")
            names = [alias.name for alias in node.names]
            deeper = [name for name in names if (ROOT / module.replace(".", "/") / f"{name}.py").exists()]
            yield from ((node.lineno, f"toolkit.{module}.{name}") for name in deeper)
            if len(deeper) < len(names):
                yield node.lineno, f"toolkit.{module}".rstrip(".")


def is_allowed(folder: str, name: str) -> bool:
    """Whether a file of the folder may import a name below `toolkit`."""
    inner = name.removeprefix("toolkit").removeprefix(".")
    top = inner.partition(".")[0]
    module = ".".join(inner.split(".")[:2])
    return top == folder or top in ALLOWED[folder] or module in ALLOWED[folder]


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_follow_the_data(folder: str) -> None:
    assert sources(folder), f"{folder} has no sources: the test looks in the wrong place"
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(folder)
        for line, name in imported(path)
        if name.partition(".")[0] == "toolkit" and not is_allowed(folder, name)
    ]
    assert not wrong


def test_nobody_imports_a_folder_by_its_bare_name() -> None:
    """`import compiler` would load a second copy of every module."""
    files = [path for folder in FOLDERS for path in sources(folder)] + [ROOT / "__init__.py"]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for line, name in imported(path)
        if name.partition(".")[0] in FOLDERS
    ]
    assert not wrong


def test_torch_lives_in_models_alone() -> None:
    heavy = ("torch", "transformers", "accelerate")
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for folder in FOLDERS
        if folder != "models"
        for path in sources(folder)
        for line, name in imported(path)
        if name.partition(".")[0] in heavy
    ]
    assert not wrong


def test_tvm_is_imported_to_compile_alone() -> None:
    """By one module, and only when a kernel is compiled: its import takes seconds."""
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in sources(folder)
        for _, name in imported(path)
        if name.partition(".")[0] in ("tvm", "tvm_ffi")
    }
    assert found == {"compiler/codegen/tvm.py"}
    tree = ast.parse((ROOT / "compiler/codegen/tvm.py").read_text())
    top = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert not any(name.partition(".")[0] == "tvm" for name in top)


def test_the_reader_of_imports_sees_them(tmp_path: Path) -> None:
    file = ROOT / "cli" / "main.py"
    names = {name for _, name in imported(file)}
    assert {"sys", "click", "toolkit.runtime.errors"} <= names
    assert not is_allowed("runtime", "toolkit.compiler.ir")
    assert not is_allowed("compiler", "toolkit.runtime.engine")
    assert not is_allowed("compiler", "toolkit.passes")
    assert is_allowed("compiler", "toolkit.runtime.plan")
