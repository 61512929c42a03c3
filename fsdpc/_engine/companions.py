"""Registry of the functions by which companions extend the engine and its front ends. The engine
imports no companion; each companion registers its functions here when it is imported.

Some functions must work even if the program imports no companion. ``fsdpc/__init__.py`` lists the
modules that register these functions. The first request for such a function imports its module. If
a companion's folder is missing from the installation, its functions do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fsdpc

_registered: dict[str, Callable[..., Any]] = {}


def register(what: str, function: Callable[..., Any]) -> None:
    """Register ``function`` under the name ``what``, for ``registered``. Local."""
    _registered[what] = function


def registered(what: str) -> Callable[..., Any]:
    """Return the function registered under ``what``, or a function that does nothing. Local."""
    if what not in _registered:
        fsdpc._import_companion(what)
    return _registered.setdefault(what, _nothing)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, in place of a function of a companion that is missing from the installation."""


def explain(error: BaseException, phase: str, **about: Any) -> None:
    """Let a companion add a note to ``error``, which was raised in ``phase``; see
    ``fsdpc/plan/noticed.py``. Local; never raises.
    """
    registered("explain")(error, phase, **about)


@contextmanager
def explained(phase: str, name: str = "") -> Iterator[None]:
    """Run the block, which works on unit ``name``. If the block raises an exception, call
    ``explain`` with the exception.
    """
    explain = registered("explain")  # looked up now: once memory is short, an import may fail
    try:
        yield
    except BaseException as error:
        explain(error, phase, name=name)
        raise
