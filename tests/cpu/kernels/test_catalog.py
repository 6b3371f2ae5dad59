"""Every family of the CPU catalog is compared with a reference by some test of this folder.

Which families a test loads, and with which kinds of each, is read off its source.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from toolkit.kernels_templates.registry import FAMILIES

HERE = Path(__file__).parent
LOADERS = ("KernelSpec", "load")
"""What tests call with the name of a family."""
BY_LOOP = ("encoding", "layout", "in", "extra")
"""Parameters, or beginnings of their names, whose values tests take from lists that are not their own."""


@cache
def literals() -> dict[str, set[object]]:
    """By family, the literals of the modules that load it and assert something."""
    found: dict[str, set[object]] = {}
    for path in HERE.glob("test_*.py"):
        tree = ast.parse(path.read_text())
        nodes = list(ast.walk(tree))
        if path == Path(__file__) or not any(map(asserts, nodes)):
            continue
        constants = {node.value for node in nodes if isinstance(node, ast.Constant)}
        for call in nodes:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in LOADERS:
                for given in call.args:
                    if isinstance(given, ast.Constant) and given.value in FAMILIES:
                        found.setdefault(str(given.value), set()).update(constants)
    return found


def asserts(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) or (isinstance(node, ast.Attribute) and node.attr.startswith("assert_"))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_compared_with_a_reference(name: str) -> None:
    assert name in literals(), f"no test in {HERE.name}/ loads a kernel of the family {name}"
    for param, values in FAMILIES[name].params.items():
        if not param.startswith(BY_LOOP):
            missing = {value for value in values if isinstance(value, str)} - literals()[name]
            assert not missing, f"no test of {name} names {param} {missing}"
