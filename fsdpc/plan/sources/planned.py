"""Calls of ``fully_shard`` that are recorded for a plan, but shard nothing.

Inside ``planning()`` a call checks its arguments and records the modules and parameters that it
would manage. The call only sets a mark on the modules, and the mark is removed afterwards. No
process group is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdpc._engine.unit import ParamInfo
from fsdpc._fsdp2.module import PLANNERS


@dataclass
class Call:
    """A recorded call. Inside ``planning()``, the modules have this object in place of a ``State``.
    ``reshard_after_forward`` is the argument of the call.
    """

    modules: list[nn.Module]
    infos: list[ParamInfo]
    reshard_after_forward: Any
    precision: MixedPrecisionPolicy
    _others: tuple[Any, ...] = ()
    _unit: Any = field(init=False)

    def __post_init__(self) -> None:
        self._unit = self.infos or None


@contextmanager
def planning() -> Iterator[list[Call]]:
    """Yield a list that gets the calls of the body, in order. Remove their marks on exit."""
    calls: list[Call] = []

    def note(modules: list[nn.Module], *rest: Any) -> None:
        calls.append(Call(modules, *rest))
        for module in modules:
            module.__dict__["_fsdpc_state"] = calls[-1]

    PLANNERS.append(note)
    try:
        yield calls
    finally:
        PLANNERS.pop()
        for call in calls:
            for module in call.modules:
                module.__dict__.pop("_fsdpc_state", None)
