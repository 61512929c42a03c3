"""What companions do for the engine and its front ends, which know none of them: each companion
registers its functions here when it is imported.

Some functions work in programs that import no companion: ``fsdpc/__init__.py`` lists the modules
that register them, and such a module is imported when its function is asked for. A companion whose
folder was left out does nothing.
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
    """Stands in for the function of a companion that was left out."""


def explain(error: BaseException, phase: str, **about: Any) -> None:
    """Let a companion add to what failed in ``phase``; see ``fsdpc/plan/noticed.py``. Local; raises
    nothing.
    """
    registered("explain")(error, phase, **about)


@contextmanager
def explained(phase: str, name: str = "") -> Iterator[None]:
    """Around code of the unit ``name`` that may fail: calls ``explain`` with its exception."""
    explain = registered("explain")  # an import may fail where memory is short
    try:
        yield
    except BaseException as error:
        explain(error, phase, name=name)
        raise
