"""fsdpc/_C.pyi says what the extension has: the same names, methods and parameters."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import fsdpc
from fsdpc import _C

STUB = Path(fsdpc.__file__).with_name("_C.pyi")
TREE = ast.parse(STUB.read_text())
CLASSES = {n.name: n for n in TREE.body if isinstance(n, ast.ClassDef)}
FUNCTIONS = {n.name: n for n in TREE.body if isinstance(n, ast.FunctionDef)}
CONSTANTS = {n.target.id for n in TREE.body if isinstance(n, ast.AnnAssign)}
PRESENT = {name for name in dir(_C) if not name.startswith("_")}


def public(names) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_same_names():
    assert public(CLASSES) | public(FUNCTIONS) | public(CONSTANTS) == PRESENT


@pytest.mark.parametrize("name", sorted(public(CLASSES) & PRESENT))
def test_same_members(name):
    kind = getattr(_C, name)
    stubbed = {n.name for n in CLASSES[name].body if isinstance(n, ast.FunctionDef)}
    stubbed |= {n.target.id for n in CLASSES[name].body if isinstance(n, ast.AnnAssign)}
    assert public(stubbed) == public(vars(kind))


def stubbed_parameters(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def methods() -> list[tuple[str, ast.FunctionDef]]:
    found = [(name, function) for name, function in FUNCTIONS.items() if name in PRESENT]
    for name in public(CLASSES) & PRESENT:
        for node in CLASSES[name].body:
            decorators = {d.id for d in getattr(node, "decorator_list", ()) if hasattr(d, "id")}
            if isinstance(node, ast.FunctionDef) and "property" not in decorators:
                if not node.name.startswith("_"):
                    found.append((f"{name}.{node.name}", node))
    return sorted(found, key=lambda item: item[0])


@pytest.mark.parametrize("name, function", methods(), ids=lambda v: v if type(v) is str else "")
def test_same_parameters(name, function):
    target = _C
    for part in name.split("."):
        target = getattr(target, part)
    present = [name for name in inspect.signature(target).parameters if name != "self"]
    assert present == stubbed_parameters(function)
