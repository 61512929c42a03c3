"""Tests of rules of the source tree that a compiler does not check. Other tests give each rule a
text that breaks the rule, and the rule must report this text.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fsdpc import _HOME

ROOT = Path(__file__).parents[2]
C_FILES = sorted(p for d in ("csrc", "kernels") for p in (ROOT / d).rglob("*.*"))
SOURCES = {
    str(p.relative_to(ROOT)): p.read_text() for p in C_FILES if p.suffix in {".c", ".h", ".inc"}
}

# The folders, lowest layer first. A file may include headers of its own folder and of the folders
# before it.
LAYERS = (
    "csrc/base",
    "kernels",
    "csrc/activation",
    "csrc/codec",
    "csrc/ckpt",
    "csrc/device",
    "csrc/shm",
    "csrc/comm",
    "csrc/unit",
    "csrc/exchange",
    "csrc/tree",
    "csrc/optim",
    "csrc/disk",
    "csrc/py/base",
    "csrc/py/ckpt",
    "csrc/py/comm",
    "csrc/py/unit",
    "csrc/py/step",
    "csrc/py/optim",
    "csrc/py/activation",
    "csrc/py/disk",
    "csrc/py",
)
RANKS = {name: rank for rank, name in enumerate(LAYERS)}
# Only these files use CUDA or NCCL. Other files use fsdpc's devices, communicators and arenas.
GPU_FILES = re.compile(
    r"csrc/([a-z]+/)+((device|arena|py)_cuda|(py_)?comm_nccl|(cuda|nccl)_)|kernels/cuda_"
)
Rule = Callable[[str, str], Iterator[str]]


def layer(file: str) -> int | None:
    return RANKS.get(str(Path(file).parent))


def path_of(include: str) -> str:
    """Return the path of an included file. Files of csrc are included by their path inside csrc,
    files of kernels by their name.
    """
    return f"csrc/{include}" if "/" in include else f"kernels/{include}"


def includes(text: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE)


def code(text: str) -> str:
    """Return the text without comments and without the contents of strings."""
    pattern = r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'"
    return re.sub(pattern, lambda m: '""' if m[0][0] == '"' else " ", text, flags=re.DOTALL)


def names_defined(text: str) -> set[str]:
    """Return the functions and variables that other files can see. The macros GET and SET
    define functions, too.
    """
    functions = re.findall(r"^(?:[GS]ET\([^,]+, )?(fsdpc_\w+)[(,]", text, re.MULTILINE)
    variables = re.findall(
        r"^(?!static\b|extern\b|typedef\b)\w[\w ]*\b[ *]*\b(fsdpc_\w+)(?:\[\w*\])?(?: =|;)",
        text,
        re.MULTILINE,
    )
    return {*functions, *variables}


@functools.cache
def folders_of_names() -> dict[str, set[str]]:
    """Return for each name the folders in which a file other than a header defines the name."""
    folders: dict[str, set[str]] = {}
    for file, text in SOURCES.items():
        for name in names_defined(code(text)) if not file.endswith(".h") else ():
            folders.setdefault(name, set()).add(str(Path(file).parent))
    return folders


def names_declared(text: str) -> set[str]:
    """Return the functions whose prototypes are in the text, and the extern variables."""
    start = r"^(?!static\b|typedef\b|#)"
    functions = re.findall(start + r"\w[\w ]*[ *](fsdpc_\w+)\([^{;]*\);", text, re.MULTILINE)
    variables = re.findall(r"^extern \w[\w ]*[ *](fsdpc_\w+)(?:\[\w*\])?;", text, re.MULTILINE)
    return {*functions, *variables}


def file_uses(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return for each file of csrc the other files that it uses, all by their names without
    folders.
    """
    texts = {
        Path(file).name: code(text)
        for file, text in sources.items()
        if file.startswith("csrc/") and file.endswith(".c")
    }
    home = {name: file for file, text in texts.items() for name in names_defined(text)}
    used = {file: set(re.findall(r"\bfsdpc_\w+", text)) for file, text in texts.items()}
    return {
        file: {home[name] for name in names if home.get(name, file) != file}
        for file, names in used.items()
    }


def circles(uses: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the sets of files in which each file uses every other one, directly or through other
    files.
    """

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = uses[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    reach = {file: reached(file) for file in uses}
    return {
        frozenset(other for other in reach[file] if file in reach[other])
        for file in uses
        if file in reach[file]
    }


def is_python_layer(file: str) -> bool:
    return file.startswith("csrc/py/")


def calls(text: str, names: str) -> list[str]:
    return sorted(set(re.findall(rf"(?<![\w.>])({names})\s*\(", code(text))))


def includes_point_downwards(file: str, text: str) -> Iterator[str]:
    own = layer(file)
    if own is None:
        yield "is in no layer: add its folder to LAYERS in this test"
        return
    for name in includes(text):
        below = layer(path_of(name)) if path_of(name) in SOURCES else None
        if below is not None and below > own:
            yield f"includes {name}, which is of a higher layer"


def private_headers_stay_in_their_folder(file: str, text: str) -> Iterator[str]:
    for name in includes(text):
        if name.endswith("_impl.h") and layer(path_of(name)) != layer(file):
            yield f"includes {name}, which is private to its folder"


def headers_declare_their_own_folder(file: str, text: str) -> Iterator[str]:
    """A header may only declare what its own folder defines. Otherwise a header of a low folder
    could declare functions of a higher folder, and files of the low folder could call them.
    """
    for name in sorted(names_declared(code(text))) if file.endswith(".h") else ():
        if str(Path(file).parent) not in (homes := folders_of_names().get(name, set())):
            yield f"declares {name}, defined in {', '.join(sorted(homes)) or 'no file'}"


def only_py_files_know_python(file: str, text: str) -> Iterator[str]:
    for name in includes(text):
        if name.startswith(("Python.h", "numpy/")) and not is_python_layer(file):
            yield f"includes {name}"


def c_knows_no_torch(file: str, text: str) -> Iterator[str]:
    for name in includes(text):
        if name.startswith(("torch/", "ATen/", "c10/")):
            yield f"includes {name}"


def only_gpu_files_know_cuda_and_nccl(file: str, text: str) -> Iterator[str]:
    if GPU_FILES.match(file):
        return
    for name in includes(text):
        if Path(name).name.startswith(("cuda", "nccl")):
            yield f"includes {name}"
    yield from sorted(set(re.findall(r"\b(?:cu|cuda|nccl)[A-Z]\w*", code(text))))
    yield from sorted(set(re.findall(r"lib(?:cuda|nccl)\w*\.so", text)))


def heap_memory_is_counted(file: str, text: str) -> Iterator[str]:
    if file != "csrc/base/mem.c":
        yield from calls(text, "malloc|calloc|realloc|free|strdup|strndup|asprintf|getline")


def the_core_neither_prints_nor_exits(file: str, text: str) -> Iterator[str]:
    if not is_python_layer(file):
        yield from calls(text, "printf|fprintf|vfprintf|puts|fputs|perror|exit|abort")


def nothing_is_left_to_do(file: str, text: str) -> Iterator[str]:
    yield from re.findall(r"\b(?:TODO|FIXME|XXX)\b", text)
    yield from re.findall(r"\bassert\s*\(\s*(?:0|false)\b[^;]*", code(text))


PLANTED: list[tuple[Rule, str, str]] = [
    (includes_point_downwards, "csrc/shm/shm_wait.c", '#include "comm/comm.h"'),
    (includes_point_downwards, "csrc/base/pool.c", '#include "kernels.h"'),
    (includes_point_downwards, "csrc/novelty.c", ""),
    (private_headers_stay_in_their_folder, "csrc/comm/comm.c", '#include "shm/shm_impl.h"'),
    (headers_declare_their_own_folder, "csrc/py/unit/py_flat.h", "int fsdpc_py_mark(void *flat);"),
    (
        headers_declare_their_own_folder,
        "csrc/py/unit/py_flat.h",
        "PyObject *fsdpc_py_flat_bind(PyObject *self,\n    Py_ssize_t count);",
    ),
    (
        headers_declare_their_own_folder,
        "csrc/py/unit/py_flat.h",
        "extern PyGetSetDef fsdpc_py_flat_getset[];",
    ),
    (headers_declare_their_own_folder, "csrc/base/status.h", "void fsdpc_nowhere(int a);"),
    (only_py_files_know_python, "csrc/unit/unit.c", "#include <Python.h>"),
    (only_py_files_know_python, "csrc/base/pool.c", "# include <numpy/arrayobject.h>"),
    (c_knows_no_torch, "csrc/py/base/py_tensor.c", "#include <ATen/ATen.h>"),
    (only_gpu_files_know_cuda_and_nccl, "csrc/device/device.c", "x = cuMemAlloc(1);"),
    (only_gpu_files_know_cuda_and_nccl, "csrc/comm/comm.c", "ncclComm_t c;"),
    (only_gpu_files_know_cuda_and_nccl, "csrc/comm/comm.c", 'dlopen("libnccl.so.2", 0);'),
    (heap_memory_is_counted, "csrc/unit/unit.c", "a = malloc (4);"),
    (the_core_neither_prints_nor_exits, "csrc/unit/unit.c", "fprintf(stderr, text);"),
    (nothing_is_left_to_do, "csrc/py/unit/py_flat.c", "/* TODO: the rest */"),
    (nothing_is_left_to_do, "csrc/unit/unit.c", 'assert(0 && "later");'),
]
INNOCENT = (
    '/* free(x), cuInit() */ s = "exit(1)"; fsdpc_mem_free(x); d->free(x); snprintf(s, n, "");'
)
RULES = list(dict.fromkeys(rule for rule, _, _ in PLANTED))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_sources_obey(rule: Rule) -> None:
    assert "csrc/base/status.c" in SOURCES and "kernels/kernels.h" in SOURCES
    broken = [f"{file}: {what}" for file, text in SOURCES.items() for what in rule(file, text)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(("rule", "file", "text"), PLANTED)
def test_rules_find_what_is_planted(rule: Rule, file: str, text: str) -> None:
    assert list(rule(file, text))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rules_leave_the_innocent_alone(rule: Rule) -> None:
    assert not list(rule("csrc/unit/unit.c", INNOCENT))


def test_no_circles_among_files() -> None:
    uses = file_uses(SOURCES)
    assert "py_state.c" in uses["py_status.c"] and "status.c" in uses["shm.c"]
    found = [
        f"{file} -> {', '.join(sorted(uses[file] & circle))}"
        for circle in circles(uses)
        for file in sorted(circle)
    ]
    assert not found, "files in a circle; move what they share below them:\n" + "\n".join(found)


def test_circles_find_what_is_planted() -> None:
    below = ("csrc/base/planted_low.c", "int fsdpc_low;\nint\nfsdpc_low_call(void)\n{ }\n")
    middle = ("csrc/base/planted_mid.c", "int\nfsdpc_mid(void)\n{ fsdpc_low_call(); }\n")
    above = ("csrc/py/planted_high.c", "char *fsdpc_high = 0;\n/* fsdpc_low */ x = fsdpc_mid();")
    straight = dict([below, middle, above])
    assert file_uses(straight)["planted_high.c"] == {"planted_mid.c"}
    assert circles(file_uses(straight)) == set()
    bent = straight | {below[0]: below[1] + "int *p = &fsdpc_high;\n"}
    assert circles(file_uses(bent)) == {
        frozenset({"planted_low.c", "planted_mid.c", "planted_high.c"})
    }


def test_only_the_package_imports_torch() -> None:
    """The C layer reaches torch's tensors through DLPack and attributes; it never imports torch."""
    for file, text in SOURCES.items():
        assert not re.search(r'PyImport_Import\w*\s*\(\s*"torch', text), file


# The package's folders, lowest first; "" stands for the modules that users import. The folders
# after "" are companions, which no module that trains may import (test_wall.py).
PACKAGE = (
    "ground",
    "_comm",
    "_spans",
    "_states",
    "_engine",
    "_clip",
    "_fsdp1",
    "_fsdp2",
    "",
    "_companions",
    "optim",
    "activations",
    "checkpoint",
    "plan",
)
GROUND = {"_torch", "api", "wrap"}  # names of torch's
# The one import of a higher layer: the wrapper's optimizer methods use fsdpc/state_dict.py.
UPWARD = {("_fsdp1/optim/methods", "state_dict")}
COMPANIONS = PACKAGE[PACKAGE.index("") + 1 :]
# The files that may refer to companions, each with the way in which it may do so. ``__init__``
# refers to companions by name in its tables and imports them for type checkers. ``__main__`` refers
# to companions by name in the table of commands.
OPENINGS = {("__init__", "by name"), ("__init__", "for types"), ("__main__", "by name")}


def package_layer(module: str) -> int:
    if module in GROUND:
        return 0
    head = module.partition("/")[0]
    return PACKAGE.index(head if head in PACKAGE else "")


@functools.cache
def package_files(root: Path = ROOT / "fsdpc") -> dict[str, str]:
    """Return the texts of the package's files, by their paths without the suffix."""
    return {str(p.relative_to(root).with_suffix("")): p.read_text() for p in root.rglob("*.py")}


def is_of_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def names_of_import(node: ast.AST, file: str) -> list[str]:
    """Return the full names of what an import statement imports: modules, or names in modules."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    here = ["fsdpc", *file.split("/")]
    base = ".".join([*(here[: -node.level] if node.level else ()), *filter(None, [node.module])])
    return [f"{base}.{alias.name}" for alias in node.names]


def package_imports(file: str, text: str, modules: set[str]) -> Iterator[tuple[str, str]]:
    """Yield what a file imports from the package, as a path without the suffix, and how it is
    imported: at import of the file, in a function, for types, or by a name in a string.
    """

    def path_of(name: str) -> str:
        # For a public name, take the module that defines the name.
        home = _HOME.get(name.removeprefix("fsdpc.")) or name
        path = home.removeprefix("fsdpc.").replace(".", "/")
        return path if path in modules or "/" not in path else path.rpartition("/")[0]

    def walk(node: ast.AST, how: str) -> Iterator[tuple[str, str]]:
        inner = "in a function" if isinstance(node, ast.FunctionDef | ast.Lambda) else how
        for child in ast.iter_child_nodes(node):
            found = names_of_import(child, file)
            way = "for types" if is_of_types(node) else inner
            if isinstance(child, ast.Constant) and re.fullmatch(NAMED, str(child.value)):
                found, way = ["fsdpc." + child.value.removeprefix("fsdpc.")], "by name"
            yield from ((path_of(n), way) for n in found if n.startswith("fsdpc."))
            yield from walk(child, way)

    return walk(ast.parse(text), "at import")


NAMED = r"(fsdpc|_companions)(\.\w+)+"


def arrows(files: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield each file, what it imports and how. Imports from outside the package are skipped."""
    known = {*package_files(), *(file.rpartition("/")[0] for file in package_files())}
    for file, text in files.items():
        for name, how in package_imports(file, text, known):
            if name in known or name.partition("/")[0] in PACKAGE:
                yield file, name, how


def through_the_wall(files: dict[str, str]) -> set[tuple[str, str, str]]:
    wall = PACKAGE.index("")
    return {
        (file, name, how)
        for file, name, how in arrows(files)
        if package_layer(file) <= wall < package_layer(name) and (file, how) not in OPENINGS
    }


def test_the_package_imports_downwards():
    files = package_files()
    assert len(files) > 50
    found = {
        (file, name)
        for file, name, how in arrows(files)
        if how != "by name" and package_layer(name) > package_layer(file) and file != "__init__"
    }
    assert found == UPWARD


def test_what_trains_knows_no_companion():
    assert through_the_wall(package_files()) == set()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("at import", "import fsdpc.{}"),
        ("at import", "from fsdpc import {}"),
        ("at import", "from fsdpc.{}.some import name"),
        ("at import", "class A:\n    if True:\n        import fsdpc.{}.some as other"),
        ("in a function", "def f():\n    from fsdpc.{} import some"),
        ("in a function", "def f():\n    def g():\n        import fsdpc.{}.some"),
        ("for types", "if TYPE_CHECKING:\n    from fsdpc.{}.some import Name"),
        ("for types", "if typing.TYPE_CHECKING:\n    import fsdpc.{}"),
        ("by name", "def f():\n    import_module('fsdpc.{}.some')"),
        ("by name", "TABLE = {{'what': 'fsdpc.{}'}}"),
    ],
)
def test_what_reaches_through_the_wall_is_found(how, text):
    for companion in COMPANIONS:
        for file in ("_engine/unit", "_fsdp2/module", "fsdp", "api", "__init__"):
            found = {one[::2] for one in through_the_wall({file: text.format(companion)})}
            assert found == {(file, how)} - OPENINGS


def test_the_wall_leaves_the_innocent_alone():
    unit = (
        '"""See ``fsdpc.plan.noticed``."""\nimport fsdpc\nfrom fsdpc import _C, api\n'
        "from fsdpc._comm.wire import default_dtype\nname = 'see fsdpc.plan'\n"
    )
    report = "from fsdpc.fsdp import FSDP\nimport fsdpc.optim"
    assert not through_the_wall({"_engine/unit": unit, "plan/report": report})
    door = {"fsdp": "from fsdpc import memory_report"}  # a companion's public name
    assert through_the_wall(door) == {("fsdp", "plan/report", "at import")}


def test_no_two_modules_of_tests_and_benchmarks_have_one_name():
    """All folders are on sys.path while tests run. If two modules had one name, the first module
    would hide the second one.
    """
    names: dict[str, Path] = {}
    for folder in ("tests", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name not in ("conftest.py", "__init__.py"):
                assert names.setdefault(path.name, path) == path
