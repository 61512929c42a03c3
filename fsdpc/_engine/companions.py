"""What companions do for the engine and its front ends, which know none of them: each registers its
functions here when it is imported.

Some work in programs that import no companion: ``fsdpc/__init__.py`` has the modules that register
them, which are imported when they are asked for. A companion whose folder was left away does
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fsdpc

_registered: dict[str, Callable[..., Any]] = {}


def register(what: str, function: Callable[..., Any]) -> None:
    """Let ``registered`` return the function. Local."""
    _registered[what] = function


def registered(what: str) -> Callable[..., Any]:
    """The registered function, or one that does nothing. Local."""
    if what not in _registered:
        fsdpc._import_companion(what)
    return _registered.setdefault(what, _nothing)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a companion that was left away."""


def explain(error: BaseException, phase: str, **about: Any) -> None:
    """Let a companion add to what failed in ``phase``; see ``fsdpc/plan/noticed.py``. Local; raises
    nothing.
    """
    registered("explain")(error, phase, **about)


@contextmanager
def explained(phase: str, name: str = "") -> Iterator[None]:
    """Around what may fail in the unit ``name``."""
    explain = registered("explain")  # an import may fail where memory is short
    try:
        yield
    except BaseException as error:
        explain(error, phase, name=name)
        raise
