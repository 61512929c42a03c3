"""Helpers of all benchmarks: a description of the run, medians with spread, result files.

Figures are medians and quartiles of interleaved rounds, because the load of other users on a shared
machine changes. Compare only figures of the same result file.
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
ROW = 400  # in result files, JSON values of at most this many characters are on one line


def commit(checkout: str | os.PathLike[str] = HERE.parent) -> str:
    """Return the short commit id of a checkout, with "+" when tracked sources differ from it.

    ``FSDPC_COMMIT`` overrides the id. If the variable is not set and the checkout is no git
    repository, the id is "unknown".
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
    """Return the processor's name, the number of usable processors, and the kernel's version."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), name)
    return f"{name}, {len(os.sched_getaffinity(0))} CPUs, Linux {platform.release()}"


def describe_run(kept: bool = False) -> dict[str, Any]:
    """Return the commit, machine, date, versions and load of a run. Call this before measuring.

    Raises ``SystemExit`` if results are going to be written (``kept``), but the commit is unknown.
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
    """Let the kernel kill this process when its parent ends, whatever the reason."""
    pr_set_pdeathsig, parent = 1, multiprocessing.parent_process()
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # the parent ended before the call


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return {"median", "q1", "q3"} to six digits; all three are equal for a single value."""
    low = middle = high = values[0]
    if len(values) > 1:
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    named = {"median": middle, "q1": low, "q3": high}
    return {name: float(f"{value:.6g}") for name, value in named.items()}


def interleave(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call each case once per round, in an order that rotates; return the cases' values by name."""
    values: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for round_ in range(rounds):
        for k in range(len(names)):
            name = names[(k + round_) % len(names)]
            values[name].append(cases[name]())
    return values


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write one result file; a relative path is below benchmarks/results."""
    target = RESULTS / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(by_rows(content) + "\n")


def by_rows(content: Any, indent: int = 0) -> str:
    """Return JSON. A value is on one line if it is short, or if it contains no list or dict."""
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
    """Return matplotlib's pyplot, set up for short SVG files that are equal for equal results."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fsdpc"
    matplotlib.rcParams["svg.fonttype"] = "none"  # text as words, not as outlines of letters
    matplotlib.rcParams["path.simplify_threshold"] = 0.5
    from matplotlib import pyplot

    return pyplot


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, with the first column left-aligned and the other columns right-aligned."""
    lines = [list(map(str, head)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join(cells))
