"""Parameter names with and without wrapper segments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fsdpc._engine.modules import join as join

FSDP_WRAPPED = "_fsdp_wrapped_module"
FSDP_PREFIX = FSDP_WRAPPED + "."
CHECKPOINT_WRAPPED = "_checkpoint_wrapped_module"
FLAT_PARAM = "_flat_param"

_WRAPPERS = frozenset({FSDP_WRAPPED, CHECKPOINT_WRAPPED})


def clean_fqn(name: str) -> str:
    """``a._fsdp_wrapped_module.b`` -> ``a.b``; also removes activation wrappers' segments."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def flat_param_name(index: int) -> str:
    """Registered name of a unit's ``index``-th flat parameter (torch has only one)."""
    return FLAT_PARAM if index == 0 else f"{FLAT_PARAM}_{index}"


_announced: list[str] = []


@contextmanager
def announced(name: str) -> Iterator[None]:
    """Pass the next unit constructed in this block its name in the model being wrapped: the
    constructor's signature is torch's and has no argument for a name.
    """
    _announced[:] = [name]
    try:
        yield
    finally:
        _announced.clear()


def take_announced(default: str) -> str:
    """The announced name, once; ``default`` for a unit constructed by the user."""
    return _announced.pop() if _announced else default
