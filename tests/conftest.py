"""Shared by all Python tests: where the harness is, and which engine the multi-rank tests run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "dist"))  # `from harness import ranks`

ENGINES = {"fsdpc": "fsdpc", "torch": "torch.distributed.fsdp"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine",
        choices=sorted(ENGINES),
        default="fsdpc",
        help="what the multi-rank tests wrap models with: fsdpc, or torch's own FSDP as a check of "
        "the tests themselves (it fails where it has the faults that fsdpc must not have)",
    )


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> str:
    """Name of the module that offers FullyShardedDataParallel and its companions."""
    return ENGINES[request.config.getoption("--engine")]


@pytest.fixture(scope="session", autouse=True)
def _template_process():
    yield
    if "harness" in sys.modules:
        sys.modules["harness"].Template.close()
