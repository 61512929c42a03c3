"""Tests of the documents, for example: every source file has a row in a README.md, every row names
a file that exists, and links lead to files.
"""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import api_page
import layers_picture
import pytest

ROOT = Path(__file__).parents[2]
MAPPED = ("csrc", "kernels", "fsdpc", "tests/c", "tests/probe", "tests/simgpu", "tests/simcluster")
CODE_SUFFIXES = {".c", ".cpp", ".cu", ".cuh", ".h", ".inc", ".py", ".sh"}


def tokens(text: str) -> set[str]:
    """Return the texts in backticks in the rows of tables."""
    rows = re.findall(r"^\|(?:[^|]*\|)*", text, re.MULTILINE)
    return {token for row in rows for token in re.findall(r"`([^`]+)`", row)}


def names(token: str, file: str) -> bool:
    """Return whether the token names the file. Tokens are like `shm.c`, `shm` (with its header),
    `py_comm*` and `_comm/wire.py`.
    """
    path = Path(file)
    return fnmatch(file, token) or fnmatch(path.name, token) or path.stem == token


def without_row(text: str, files: Iterable[str]) -> list[str]:
    return [f for f in files if not any(names(t, f) for t in tokens(text))]


def rows_without_file(text: str, files: Iterable[str]) -> list[str]:
    looks_like_file = re.compile(r"[\w*/]+\.(c|cpp|cu|cuh|h|inc|py|sh)")
    files = list(files)
    folders = {""} | {f.partition("/")[0] for f in files}
    found = (t for t in tokens(text) if looks_like_file.fullmatch(t))
    found = (t for t in found if "/" not in t or t.partition("/")[0] in folders)
    return sorted(t for t in found if not any(names(t, f) for f in files))


def broken_links(text: str, folder: Path) -> list[str]:
    targets = re.findall(r"\]\(([^)\s#]+)[^)]*\)", text)
    return [t for t in targets if "://" not in t and not (folder / t).exists()]


@pytest.mark.parametrize("folder", MAPPED)
def test_every_file_has_a_row(folder: str):
    text = (ROOT / folder / "README.md").read_text()
    root = ROOT / folder
    files = [str(p.relative_to(root)) for p in root.rglob("*") if p.suffix in CODE_SUFFIXES]
    files = [f for f in files if not f.endswith("/__init__.py")]
    assert files
    assert without_row(text, files) == []
    assert rows_without_file(text, files) == []


DOCUMENTS = ("*.md", "docs/**/*.md", "*/README.md", "tests/*/README.md", "csrc/*/README.md")


def test_links_lead_somewhere():
    documents = [p for pattern in DOCUMENTS for p in ROOT.glob(pattern)]
    assert documents
    broken = {str(p): broken_links(p.read_text(), p.parent) for p in documents}
    assert {p: links for p, links in broken.items() if links} == {}


def unknown_names(text: str, source: str) -> list[str]:
    """Return C names in backticks that the source does not have. ``fsdpc_unit_...`` stands for all
    names that begin so.
    """
    found = re.findall(r"`((?:fsdpc|FSDPC)_\w+)(\.\.\.)?(?:\([^`]*\))?`", text)
    ends = {(name, "" if more else r"\b") for name, more in found}
    return sorted({name for name, end in ends if not re.search(rf"\b{name}{end}", source)})


def test_c_names_in_documents_exist():
    folders = ("csrc", "kernels", "fsdpc", "tests")
    files = [p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in CODE_SUFFIXES]
    source = "\n".join(p.read_text() for p in [*files, ROOT / "setup.py", ROOT / "Makefile"])
    documents = [p for pattern in DOCUMENTS for p in ROOT.glob(pattern)]
    unknown = {str(p): unknown_names(p.read_text(), source) for p in documents}
    assert {p: names for p, names in unknown.items() if names} == {}


def test_planted_faults_are_found(tmp_path: Path):
    text = "| `a.c`, `gone.c` | x |\n| `b` | [here](a.c) [there](none.md) [net](http://x/y) |\n"
    (tmp_path / "a.c").touch()
    assert without_row(text, ["a.c", "b.h", "c.c"]) == ["c.c"]
    assert rows_without_file(text, ["a.c", "b.h"]) == ["gone.c"]
    assert broken_links(text, tmp_path) == ["none.md"]
    names = "`fsdpc_ca`, `fsdpc_c...`, `fsdpc_cat(void)`, `fsdpc_dog()`"
    assert unknown_names(names, "int fsdpc_cat(void);") == ["fsdpc_ca", "fsdpc_dog"]


def test_the_benchmarks_readme_has_the_tables_of_the_results(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = importlib.import_module("tables")
    text = (ROOT / "benchmarks/README.md").read_text()
    written = text.split(tables.BEGIN)[1].split(tables.END)[0]
    assert written.strip() == tables.all_tables().strip(), "python benchmarks/tables.py --write"


def test_every_variable_that_is_read_is_documented():
    python = [*(ROOT / "fsdpc").rglob("*.py"), ROOT / "setup.py"]
    c = [p for folder in ("csrc", "kernels") for p in (ROOT / folder).rglob("*.c")]
    read = {v for p in python for v in re.findall(r'"(FSDPC_[A-Z_]+)"', p.read_text())}
    read |= {v for p in c for v in re.findall(r'getenv\("(FSDPC_\w+)"\)', p.read_text())}
    rows = re.findall(r"^\| (`[^|]+) \|", (ROOT / "docs/environment.md").read_text(), re.MULTILINE)
    assert {v for row in rows for v in re.findall(r"`(\w+)`", row)} == read | {"NVCC"}


def test_the_page_of_public_names_is_that_of_the_docstrings():
    """A new process makes the page, because torch patches the `step` of an optimizer class when its
    first instance is made. The page must show classes without this patch.
    """
    made = subprocess.run(
        [sys.executable, ROOT / "tests/api_page.py"], capture_output=True, text=True, check=True
    )
    assert (ROOT / "docs/api.md").read_text() == made.stdout, "run `make docs`"


def test_the_picture_of_the_core_is_that_of_its_includes():
    assert layers_picture.PICTURE.read_text() == layers_picture.picture(), "run `make docs`"


# The docstring of each of these classes says which ranks must call the methods of the class.
SAYS_FOR_ALL = ("FSDPModule", "Profile", "FusedOptimizer", "Url")


def test_every_public_name_says_what_it_does_and_who_must_call():
    says_who = re.compile(
        r"local|collective|(every|all) ranks?|not supported|accepted", re.IGNORECASE
    )
    for module in api_page.MODULES:
        for entry in api_page.entries(module):
            assert entry.doc, entry.name
            for call in entry.members or [entry]:
                if inspect.isroutine(call.value):
                    text = entry.doc if entry.name.endswith(SAYS_FOR_ALL) else ""
                    assert says_who.search(call.doc + text), f"{call.name}: local or collective?"


def test_every_public_name_is_on_the_page():
    headings = set(re.findall(r"^###+ (\S+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE))
    links = re.findall(r"\]\(#([^)]+)\)", (ROOT / "docs/api.md").read_text())
    assert set(links) <= {api_page.anchor(h) for h in headings} | {
        api_page.anchor(m) for m in api_page.MODULES
    }
    for module in api_page.MODULES:
        shown = {h.rpartition(".")[2] for h in headings} | set(api_page.borrowed(module))
        names = {n for n in importlib.import_module(module).__all__ if not n.startswith("_")}
        assert names <= shown, module
