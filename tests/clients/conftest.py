"""Hooks for the tests of frameworks on fsdpc. These tests do not use the network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from harness import Template

HERE = Path(__file__).parent
ENTERED = pytest.StashKey[bool]()

# Set before any framework is imported. The ranks inherit these variables.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
os.environ["WANDB_DISABLED"] = "true"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give these tests a template process of their own.

    Ranks of other tests are then forked from a process that has not imported the frameworks.
    """
    if not item.config.stash.get(ENTERED, False):
        Template.close()
        item.config.stash[ENTERED] = True


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or HERE not in nextitem.path.parents:
        Template.close()
        item.config.stash[ENTERED] = False
