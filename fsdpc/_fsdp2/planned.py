"""Calls of ``fully_shard`` that are planned instead of made: for planners.

Inside ``planning()`` a call checks its arguments, notes what it would manage and changes nothing
but a mark on the modules, which is removed afterwards. No process group is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdpc._engine.unit import ParamInfo


@dataclass
class Call:
    """One call, in the place of a ``State``. ``reshard_after_forward`` as the call had it."""

    modules: list[nn.Module]
    infos: list[ParamInfo]
    reshard_after_forward: Any
    precision: MixedPrecisionPolicy
    _others: tuple[Any, ...] = ()
    _unit: Any = field(init=False)

    def __post_init__(self) -> None:
        self._unit = self.infos or None


_PLANS: list[list[Call]] = []


def is_planning() -> bool:
    """Whether calls are planned now."""
    return bool(_PLANS)


def note(call: Call) -> None:
    """Mark the modules as those of a call. Inside ``planning()`` only."""
    _PLANS[-1].append(call)
    for module in call.modules:
        module.__dict__["_fsdpc_state"] = call


@contextmanager
def planning() -> Iterator[list[Call]]:
    """The calls that the body makes, in their order; their marks are removed on exit."""
    calls: list[Call] = []
    _PLANS.append(calls)
    try:
        yield calls
    finally:
        _PLANS.pop()
        for call in calls:
            for module in call.modules:
                module.__dict__.pop("_fsdpc_state", None)
