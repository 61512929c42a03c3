"""Frameworks on fsdpc: nothing here may ask the network for anything."""

from __future__ import annotations

import os

import pytest
from harness import Template

# Before any framework is imported, here and in the ranks, which inherit it.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
os.environ["WANDB_DISABLED"] = "true"


@pytest.fixture(scope="package", autouse=True)
def _own_template():
    """Ranks of other tests are not forked from a process that has the frameworks in memory."""
    Template.close()
    yield
    Template.close()
