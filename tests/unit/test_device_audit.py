"""Every call of the front end that makes a tensor names a device; calls that make host memory on
purpose are listed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "fsdpc"
FACTORIES = {
    "arange",
    "as_tensor",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randn",
    "scalar_tensor",
    "tensor",
    "zeros",
}
HOST_ONLY = {"from_numpy", "frombuffer", "numpy"}
# A key is (file, function). The value is the reason why the file may call the function, which makes
# host memory.
ALLOWED = {
    ("_comm/plain.py", "numpy"): "a message of a peer's is bytes in host memory",
    ("_comm/plain.py", "from_numpy"): "a message of a peer's is bytes in host memory",
    (
        "_comm/collectives.py",
        "from_numpy",
    ): "what the core hands to a c10d communicator is host memory",
    ("plan/compare.py", "numpy"): "digests are made of host copies",
    ("_engine/lowbit.py", "numpy"): "checksums are made of host copies",
    ("checkpoint/torch_files.py", "frombuffer"): "files are read into host memory",
    ("checkpoint/outlet.py", "frombuffer"): "memory that processes of the host share",
    ("checkpoint/stream_reader.py", "frombuffer"): "memory that processes of the host share",
    ("checkpoint/keymap.py", "numpy"): "files are read into host memory",
    ("checkpoint/lazy.py", "from_numpy"): "files are read into host memory",
    ("checkpoint/staging.py", "frombuffer"): "snapshots of host memory lie there, too",
    ("checkpoint/several.py", "numpy"): "random numbers of the host",
    ("checkpoint/several.py", "from_numpy"): "random numbers of the host",
    ("checkpoint/optimizer.py", "numpy"): "digests are made of host copies",
    ("checkpoint/kept.py", "numpy"): "digests are made of host copies",
    ("checkpoint/unchanged.py", "numpy"): "digests of what lies in host memory",
    ("checkpoint/decoded.py", "numpy"): "cut rows go to other ranks from the host",
    ("checkpoint/decoded.py", "from_numpy"): "cut rows come from other ranks to the host",
    ("optim/_device.py", "from_numpy"): "edges of blocks are numbers of the host",
    ("optim/_device.py", "numpy"): "edges of blocks are numbers of the host",
    ("optim/_disk.py", "frombuffer"): "a file's buffers are host memory",
    ("optim/_places.py", "from_numpy"): "sums of squares are numbers of the host",
    ("optim/adam_mini.py", "from_numpy"): "sums of squares are numbers of the host",
    ("optim/adam_mini.py", "numpy"): "sums of squares are numbers of the host",
}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls ``torch.name(...)``, ``value.numpy()`` and ``value.new_...()``, by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = node.func.value, node.func.attr
            if isinstance(owner, ast.Name) and owner.id == "torch":
                yield name, node
            elif name == "numpy" or name.startswith("new_"):
                yield name, node


def faults(file: str, text: str) -> list[str]:
    found = []
    for name, call in calls(ast.parse(text)):
        says = any(keyword.arg == "device" for keyword in call.keywords)
        if (name in FACTORIES and not says) or name in HOST_ONLY:
            if (file, name) not in ALLOWED:
                found.append(f"{file}:{call.lineno}: {name} without device=")
    return found


def test_every_tensor_says_where_it_is():
    files = {str(file.relative_to(PACKAGE)): file for file in sorted(PACKAGE.rglob("*.py"))}
    found = [fault for name, file in files.items() for fault in faults(name, file.read_text())]
    assert files and found == []


def test_what_is_allowed_is_there():
    for file, name in ALLOWED:
        assert name in {found for found, _ in calls(ast.parse((PACKAGE / file).read_text()))}


def test_numpy_sees_no_unit():
    """NumPy arrays over a unit's memory exist only on the CPU, so the front end must not ask for
    them.
    """
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in {"shard", "full", "grad"}:
                owner = node.value
                of_flat = isinstance(owner, ast.Attribute) and owner.attr == "flat"
                assert not of_flat, f"{file.name}:{node.lineno}: flat.{node.attr}"


def test_planted_faults_are_found():
    planted = (
        "import torch\nx = torch.empty(3)\ny = torch.zeros(2, device=d)\nz = t.cpu().numpy()\n"
    )
    assert faults("planted.py", planted) == [
        "planted.py:2: empty without device=",
        "planted.py:4: numpy without device=",
    ]
