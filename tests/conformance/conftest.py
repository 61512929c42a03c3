"""Which cases were chosen, and the table of where the two libraries end differently."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `from suite import Cases`


@pytest.fixture(scope="session")
def chosen_cases(request: pytest.FixtureRequest) -> set[tuple[str, str]]:
    """(module, case) of everything that this run of pytest will ask for."""
    return {
        (item.module.__name__, item.callspec.params["name"])
        for item in request.session.items
        if "name" in getattr(getattr(item, "callspec", None), "params", {})
    }


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = sys.modules["suite"].DIFFERENCES if "suite" in sys.modules else {}
    if not found:
        return
    terminalreporter.section("where torch's FSDP and fsdpc end differently")
    rows = [("case", "torch", "fsdpc"), *((k[0], *v) for k, v in found.items())]
    widths = (64, 60, 60)
    for row in rows:
        cells = [shorten(text, width) for text, width in zip(row, widths, strict=True)]
        terminalreporter.write_line(" | ".join(cells).rstrip())


def shorten(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else f"{text[: width - 3]}..."
