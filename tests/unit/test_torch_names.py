"""Only one file uses torch's private names. If torch lacks one of them, importing that file raises
an error with the name.
"""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as checkpoint_wrapper
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullStateDictConfig, _common_utils, _unshard_param_utils
from torch.distributed.tensor import DTensor

from fsdpc import _torch
from fsdpc._fsdp1 import names as _names

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fsdpc"
FILES = {str(p.relative_to(PACKAGE)): p.read_text() for p in sorted(PACKAGE.rglob("*.py"))}
HOME = "_torch.py"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def torch_attributes() -> set[str]:
    """Return the private attributes of the torch objects that fsdpc handles."""
    parameter = nn.Parameter(torch.zeros(1))
    objects = [
        torch.Tensor, parameter, (parameter * 2).grad_fn, nn.Module(), nn.ModuleList(),
        torch.optim.SGD([parameter], lr=1), torch.amp.GradScaler("cpu"), dist.ProcessGroup,
        dist.Store, DeviceMesh, DTensor, _torch.ShardedTensor, torch.UntypedStorage,
        torch.distributed.fsdp.MixedPrecision(), torch.distributed.fsdp.ShardingStrategy,
        torch.distributed.fsdp.ShardedOptimStateDictConfig(), FullStateDictConfig(),
        _torch._Policy, torch.autograd,
    ]  # fmt: skip
    return {name for thing in objects for name in dir(thing) if is_private(name)}


ALLOWED = {name for names in _torch.ATTRIBUTES.values() for name in names} | _torch.MARKS
TORCHS = torch_attributes()
MODULES = {"torch", "dist", "nn", "optim"}  # torch_modules adds what a file imports from torch


def torch_modules(tree: ast.AST) -> set[str]:
    """Return the names by which a file refers to torch's modules and classes."""
    known = set(MODULES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {a.asname for a in node.names if a.asname and a.name.startswith("torch")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            known |= {alias.asname or alias.name for alias in node.names}
    return known


def private_imports(node: ast.AST) -> Iterator[str]:
    names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{name}" for name in names]
    for name in names:
        if name.split(".")[0] == "torch" and any(map(is_private, name.split("."))):
            yield name


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_uses(text: str) -> list[str]:
    """Return torch's private names in a file's code, except for attributes that _torch.py lists."""
    tree = ast.parse(text)
    modules, found = torch_modules(tree), []
    for node in ast.walk(tree):
        found += private_imports(node)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in ALLOWED:
            own = root_of(node.value) in ("self", "cls") and node.attr not in dir(torch.Tensor)
            if root_of(node.value) in modules or (node.attr in TORCHS and not own):
                found.append(ast.unparse(node))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.split(".")
            if words[0] == "torch" and any(map(is_private, words)) and " " not in node.value:
                found.append(node.value)
            elif node.value in TORCHS - ALLOWED:
                found.append(node.value)
    return found


@pytest.mark.parametrize("file", sorted(set(FILES) - {HOME}))
def test_no_other_file_uses_a_private_name(file: str) -> None:
    assert private_uses(FILES[file]) == [], f"import it in fsdpc/{HOME}, with a check"


@pytest.mark.parametrize(
    "text",
    [
        "from torch.distributed.fsdp import _common_utils",
        "from torch._C import _dynamo",
        "import torch._dynamo",
        "import torch\ntorch._C._current_graph_task_id()",
        "import torch.distributed as c\nc.distributed_c10d._get_default_group()",
        "from torch.nn.utils import clip_grad\nclip_grad._get_total_norm",
        "def f(p):\n    return p._grad_fn",
        "def f(p):\n    return getattr(p, '_grad_fn', None)",
        "import sys\nsys.modules.get('torch._dynamo.eval_frame')",
    ],
)
def test_the_rule_finds_what_is_planted(text: str) -> None:
    assert private_uses(text)


def test_the_rule_leaves_fsdpcs_own_names_alone() -> None:
    assert not private_uses("def f(self, unit, m):\n    return self._seen, unit._name, m._modules")


def test_the_extension_reads_listed_attributes_only() -> None:
    found = set()
    for path in (ROOT / "csrc").rglob("py_*.c"):
        found |= set(re.findall(r'"(_[a-z]\w*)"', path.read_text()))
    assert "_sequence_nr" in found
    assert found <= ALLOWED


def test_names_in_state_dicts_are_torchs() -> None:
    assert _names.FSDP_WRAPPED == _common_utils.FSDP_WRAPPED_MODULE
    assert _names.CHECKPOINT_WRAPPED == checkpoint_wrapper._CHECKPOINT_WRAPPED_MODULE
    assert _names.FSDP_PREFIX == _common_utils.FSDP_PREFIX
    assert _names.FLAT_PARAM == _unshard_param_utils.FLAT_PARAM
    assert _common_utils.FSDP_FLATTENED in _torch.MARKS


MISSING = [
    ("torch.distributed.fsdp._flat_param", "FlatParameter"),
    ("torch.distributed.distributed_c10d", "_get_default_group"),
    ("torch._C", "_current_graph_task_id"),
    ("torch.distributed.fsdp.wrap._Policy", "_run_policy"),
    ("torch.amp.GradScaler", "_unscale_grads_"),
]


@pytest.mark.parametrize(("place", "name"), MISSING)
def test_what_is_missing_is_named(place: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(f"{place}.{name}")
    monkeypatch.setattr(torch, "__version__", "9.9.1")
    with pytest.raises(ImportError) as caught:
        runpy.run_path(str(ROOT / "fsdpc" / HOME))
    for part in (f"{place}.{name}", "torch 9.9.1", f"torch {_torch.OLDEST} and newer"):
        assert part in str(caught.value)
