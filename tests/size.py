"""Print the lengths of functions and files: the median, the 90th percentile, and the longest ones.

python tests/size.py [file or directory ...]     (default: csrc kernels fsdpc)
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

LONG_FUNCTION, LONG_FILE = 50, 600
C_NAME = re.compile(r"^\**(\w+)\(")  # the return type has its own line
Function = tuple[int, str]  # lines, file:line name


def c_functions(path: Path, lines: list[str]) -> Iterator[Function]:
    name, start = "", 0
    for number, line in enumerate(lines, 1):
        if match := C_NAME.match(line):
            name, start = match[1], number
        elif line.startswith("}") and name:
            yield number - start + 1, f"{path}:{start} {name}"
            name = ""
        elif line.startswith(("#define", "static const", "typedef", "struct", "enum")):
            name = ""


def python_functions(path: Path, lines: list[str]) -> Iterator[Function]:
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            yield length, f"{path}:{node.lineno} {node.name}"


def report(title: str, files: dict[Path, list[str]], functions: list[Function]) -> None:
    if not functions:
        return
    lengths = [length for length, _ in functions]
    p90 = quantiles(lengths, n=10)[8] if len(lengths) > 1 else lengths[0]
    print(
        f"{title}: {len(files)} files, {sum(map(len, files.values()))} lines, {len(lengths)} "
        f"functions; lines a function: median {median(lengths):.0f}, 90 % within {p90:.0f}, "
        f"longest {max(lengths)}; longest file {max(map(len, files.values()))}"
    )
    for length, where in sorted(functions, reverse=True):
        if length > LONG_FUNCTION:
            print(f"  {length:4} lines  {where}")
    for path, lines in files.items():
        if len(lines) > LONG_FILE:
            print(f"  {len(lines):4} lines  {path}, the whole file")


def main(roots: list[str]) -> None:
    paths = [p for r in map(Path, roots) for p in (sorted(r.rglob("*")) if r.is_dir() else [r])]
    for title, suffixes, find in (
        ("C", {".c", ".h"}, c_functions),
        ("Python", {".py"}, python_functions),
    ):
        files = {p: p.read_text().splitlines() for p in paths if p.suffix in suffixes}
        report(title, files, [f for path, lines in files.items() for f in find(path, lines)])


if __name__ == "__main__":
    main(sys.argv[1:] or ["csrc", "kernels", "fsdpc"])
