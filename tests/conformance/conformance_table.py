"""A pytest plugin that prints the cases in which torch and fsdpc have different outcomes.

It is a plugin of the whole run, because with pytest-xdist the process that prints the table does
not collect tests.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

Found = dict[tuple[str, str], tuple[str, str]]


class Table:
    """A table of the differences that this process and the workers of pytest-xdist have found."""

    def __init__(self) -> None:
        self._found: Found = {}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        seen: Found = sys.modules["suite"].DIFFERENCES if "suite" in sys.modules else {}
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["differences"] = [*seen.items()]
        self._found.update(seen)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for key, value in getattr(node, "workeroutput", {}).get("differences", []):
            self._found.setdefault(tuple(key), tuple(value))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._found:
            return
        terminalreporter.section("where torch's FSDP and fsdpc end differently")
        rows = [("case", "torch", "fsdpc"), *((k[0], *v) for k, v in self._found.items())]
        widths = (64, 60, 60)
        for row in rows:
            cells = [shorten(text, width) for text, width in zip(row, widths, strict=True)]
            terminalreporter.write_line(" | ".join(cells).rstrip())


def shorten(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else f"{text[: width - 3]}..."
