"""What all benchmarks share: a description of the run, medians with spread, result files.

Figures are medians of interleaved rounds with their quartiles, as neighbours on a shared machine
come and go. Compare figures of one result file only.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import multiprocessing
import os
import platform
import shutil
import signal
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
ROW = 400  # the longest row, in characters


def commit(checkout: str | os.PathLike[str] = HERE.parent) -> str:
    """Returns the short commit id of a checkout, with "+" when tracked sources differ from it.

    Sources without a repository take it from ``FSDPC_COMMIT``, or it is "unknown".
    """
    if named := os.environ.get("FSDPC_COMMIT"):
        return named
    if not shutil.which("git") or not (Path(checkout) / ".git").exists():
        return "unknown"

    def git(*words: str) -> str:
        command = ["git", "-C", str(checkout), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()

    sources = ("csrc", "kernels", "fsdpc")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *sources)
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def machine() -> str:
    """Returns processor, processors usable by this process, and the kernel."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), name)
    return f"{name}, {len(os.sched_getaffinity(0))} CPUs, Linux {platform.release()}"


def describe_run(kept: bool = False) -> dict[str, Any]:
    """Returns where, when and with what a benchmark runs; take it before measuring.

    ``SystemExit``: results are going to be written (``kept``), but name no commit.
    """
    import numpy
    import torch

    named = commit()
    if kept and named == "unknown":
        raise SystemExit(
            f"{HERE.parent} is not a git checkout, so the result could not name its commit: run in "
            "a checkout, or set FSDPC_COMMIT"
        )
    return {
        "commit": named,
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


def end_with_parent() -> None:
    """Has this process killed when its parent ends, in whatever way."""
    pr_set_pdeathsig, parent = 1, multiprocessing.parent_process()
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # the parent ended before the call


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns {"median", "q1", "q3"} to six digits; all the same for a single value."""
    low = middle = high = values[0]
    if len(values) > 1:
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    named = {"median": middle, "q1": low, "q3": high}
    return {name: float(f"{value:.6g}") for name, value in named.items()}


def interleave(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Calls each case once a round, in an order that rotates, and returns its values by name."""
    values: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for round_ in range(rounds):
        for k in range(len(names)):
            name = names[(k + round_) % len(names)]
            values[name].append(cases[name]())
    return values


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Writes one result file; relative paths are below benchmarks/results."""
    target = RESULTS / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(by_rows(content) + "\n")


def by_rows(content: Any, indent: int = 0) -> str:
    """JSON with a row per line: what is short, or holds no list or dict, is on one line."""
    line = json.dumps(content)
    if not isinstance(content, dict | list) or len(line) <= ROW:
        return line
    values = list(content.values() if isinstance(content, dict) else content)
    if not any(isinstance(value, dict | list) for value in values):
        return line
    names = [f"{json.dumps(name)}: " for name in content] if isinstance(content, dict) else []
    begin, end = "{}" if isinstance(content, dict) else "[]"
    pad = " " * (indent + 1)
    rows = [
        f"{pad}{name}{by_rows(value, indent + 1)}"
        for name, value in zip(names or [""] * len(values), values, strict=True)
    ]
    return f"{begin}\n" + ",\n".join(rows) + f"\n{' ' * indent}{end}"


def pyplot() -> Any:
    """matplotlib's pyplot, set for short SVG files that are equal for equal results."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fsdpc"
    matplotlib.rcParams["svg.fonttype"] = "none"  # words, not the outlines of letters
    matplotlib.rcParams["path.simplify_threshold"] = 0.5
    from matplotlib import pyplot

    return pyplot


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a table with the first column to the left and the others to the right."""
    lines = [list(map(str, head)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join(cells))
