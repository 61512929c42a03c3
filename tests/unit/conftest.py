"""Fixtures that several test files share. Hypothesis runs without a deadline, because a slow
machine must not fail a test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Sanitizers check which memory a call touches, not which values it computes: a fifth of the
# examples is enough for them.
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
settings.register_profile("fsdpc", settings(), deadline=None, max_examples=20 if SANITIZED else 100)
settings.load_profile("fsdpc")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run torch on one thread: with small tensors, a second thread would only wait for a busy
    processor.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
