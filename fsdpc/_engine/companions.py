"""Companions: parts of the package that training does not need, known here by name alone."""

from __future__ import annotations

import importlib
from typing import Any


def companion(name: str) -> Any:
    """The module ``fsdpc.<name>``, or None where its folder was left away. Local."""
    try:
        return importlib.import_module(f"fsdpc.{name}")
    except ModuleNotFoundError as error:
        if f"fsdpc.{name}".startswith(error.name or "-"):
            return None
        raise
