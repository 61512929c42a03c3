"""Frameworks on fsdpc: nothing here may ask the network for anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from harness import Template

HERE = Path(__file__).parent
ENTERED = pytest.StashKey[bool]()

# Before any framework is imported, here and in the ranks, which inherit it.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
os.environ["WANDB_DISABLED"] = "true"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Ranks of other tests are not forked from a process that has the frameworks in memory."""
    if not item.config.stash.get(ENTERED, False):
        Template.close()
        item.config.stash[ENTERED] = True


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or HERE not in nextitem.path.parents:
        Template.close()
        item.config.stash[ENTERED] = False
