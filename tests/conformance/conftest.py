"""Fixtures of the conformance suite."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `from suite import Cases`

from library import HAS_ROWS  # noqa: E402

collect_ignore_glob = [] if HAS_ROWS else ["test_conform2_*.py"]


@pytest.fixture(scope="session")
def chosen_cases(request: pytest.FixtureRequest) -> set[tuple[str, str]]:
    """Return (module, case) of every case that this run of pytest has chosen."""
    return {
        (item.module.__name__, item.callspec.params["name"])
        for item in request.session.items
        if "name" in getattr(getattr(item, "callspec", None), "params", {})
    }
