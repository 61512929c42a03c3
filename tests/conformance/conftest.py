"""Which cases were chosen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed.fsdp as fsdp

sys.path.insert(0, str(Path(__file__).parent))  # `from suite import Cases`

# The cases of fully_shard state what torch 2.13 does; earlier releases lack methods and arguments.
collect_ignore_glob = [] if hasattr(fsdp, "DataParallelMeshDims") else ["test_conform2_*.py"]


@pytest.fixture(scope="session")
def chosen_cases(request: pytest.FixtureRequest) -> set[tuple[str, str]]:
    """(module, case) of everything that this run of pytest will ask for."""
    return {
        (item.module.__name__, item.callspec.params["name"])
        for item in request.session.items
        if "name" in getattr(getattr(item, "callspec", None), "params", {})
    }
