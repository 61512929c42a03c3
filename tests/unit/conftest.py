"""Hypothesis without its deadline: a slow machine is no failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("fsdpc", settings(), deadline=None)
settings.load_profile("fsdpc")
