"""The stubs declare what the extensions have: the same names, methods and parameters."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributed.tensor import DTensor

import fsdpc
from fsdpc import _C, _probe


class Stub:
    """The declarations of a ``.pyi`` file, and the names of its module that ``below`` does not
    have.
    """

    def __init__(self, file: Path, module: ModuleType, below: ModuleType | None = None) -> None:
        self.module = module
        body = ast.parse(file.read_text()).body
        self.classes = {n.name: n for n in body if isinstance(n, ast.ClassDef)}
        self.functions = {n.name: n for n in body if isinstance(n, ast.FunctionDef)}
        self.constants = {n.target.id for n in body if isinstance(n, ast.AnnAssign)}
        self.present = public(dir(module)) - (public(dir(below)) if below else set())

    def methods(self) -> list[tuple[ModuleType, str, ast.FunctionDef]]:
        found = [(name, f) for name, f in self.functions.items() if name in self.present]
        for name in public(self.classes) & self.present:
            for node in self.classes[name].body:
                decorators = {d.id for d in getattr(node, "decorator_list", ()) if hasattr(d, "id")}
                if isinstance(node, ast.FunctionDef) and "property" not in decorators:
                    if not node.name.startswith("_"):
                        found.append((f"{name}.{node.name}", node))
        return [(self.module, name, node) for name, node in sorted(found, key=lambda m: m[0])]


def public(names) -> set[str]:
    return {name for name in names if not name.startswith("_")}


CORE = Stub(Path(fsdpc.__file__).with_name("_C.pyi"), _C)
STUBS = [CORE, Stub(Path(__file__).parents[1] / "probe" / "_probe.pyi", _probe, below=_C)]


@pytest.mark.parametrize("stub", STUBS, ids=lambda stub: stub.module.__name__)
def test_same_names(stub):
    declared = public(stub.classes) | public(stub.functions) | public(stub.constants)
    assert declared == stub.present


def test_the_probe_has_all_of_the_core():
    assert public(dir(_C)) <= public(dir(_probe))


@pytest.mark.parametrize("name", sorted(public(CORE.classes) & CORE.present))
def test_same_members(name):
    body = CORE.classes[name].body
    stubbed = {n.name for n in body if isinstance(n, ast.FunctionDef)}
    stubbed |= {n.target.id for n in body if isinstance(n, ast.AnnAssign)}
    assert public(stubbed) == public(vars(getattr(_C, name)))


def stubbed_parameters(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


@pytest.mark.parametrize(
    "module, name, function",
    [method for stub in STUBS for method in stub.methods()],
    ids=lambda v: v if type(v) is str else "",
)
def test_same_parameters(module, name, function):
    target = module
    for part in name.split("."):
        target = getattr(target, part)
    present = [name for name in inspect.signature(target).parameters if name != "self"]
    assert present == stubbed_parameters(function)


def literals(alias: str) -> set[str]:
    body = ast.parse(Path(fsdpc.__file__).with_name("_C.pyi").read_text()).body
    values = {n.targets[0].id: n.value for n in body if isinstance(n, ast.Assign)}
    strings = {n.value for n in ast.walk(values[alias]) if isinstance(n, ast.Constant)}
    return strings.union(*(literals(n.id) for n in ast.walk(values[alias]) if is_alias(n)))


def is_alias(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id.startswith("_")


def test_the_kinds_of_steps():
    rule = (0.0,) * 7 + (False,) * 5 + (0,)
    with pytest.raises(ValueError, match="choose from") as whole:
        _C.optim_step("", rule, (), (), (), ())
    with pytest.raises(TypeError, match=r"must be \(weight, averages\) or None, not str"):
        _C.optim_step("adam", rule, (), (), ((), ()), (), averages="x")
    table = _C.optim_table(torch.Tensor, DTensor, [], {}, [], None)
    with pytest.raises(TypeError, match="the kinds of steps are") as tables:
        _C.optim_table_step(table, 0, "", rule, 1, None)
    for refused, alias in (whole, "_StepKind"), (tables, "_TableKind"):
        assert set(re.findall(r"'(\w+)'", str(refused.value))) == literals(alias)


EXAMPLES = Path(__file__).with_name("typed_examples.py")


def test_the_typed_examples_import_what_there_is():
    importlib.import_module(EXAMPLES.stem)
    assert Path(fsdpc.__file__).with_name("py.typed").exists()


def test_mypy_accepts_the_typed_examples(tmp_path: Path):
    pytest.importorskip("mypy", reason="mypy is not installed")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    done = subprocess.run(
        [*command, "--cache-dir", str(tmp_path), str(EXAMPLES)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
