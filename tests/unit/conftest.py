"""Hypothesis without its deadline: a slow machine is no failure. What several files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("fsdpc", settings(), deadline=None)
settings.load_profile("fsdpc")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors: a second thread would only wait for a busy processor."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
