"""Hypothesis without its deadline: a slow machine is no failure. What several files share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Sanitizers look at what a call touches, not at its values: a fifth of the examples is enough.
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
settings.register_profile("fsdpc", settings(), deadline=None, max_examples=20 if SANITIZED else 100)
settings.load_profile("fsdpc")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch on one thread: with small tensors a second one would only wait for a busy processor."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
