"""A scheduler's state and modules' extra states, given and taken back before a load changes a
tensor: what raises there has then changed nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fsdpc.checkpoint.model import set_extra


def try_states(
    model: nn.Module,
    extra: dict[str, Any],
    before: dict[str, Any],
    scheduler: Any,
    scheduled: Any,
) -> None:
    """Give the states, then take them back. Local. ``extra``: states of modules by name;
    ``before``: those that they have now. Raises what the modules or the scheduler raise.
    """
    undo = list(_undo(scheduler)) if scheduler is not None else []
    given: list[str] = []
    try:
        if scheduler is not None:
            scheduler.load_state_dict(copy.deepcopy(scheduled))
        for key, value in extra.items():
            given.append(key)
            set_extra(model, {key: copy.deepcopy(value)})
    finally:
        for call in undo:
            call()
        set_extra(model, {key: before[key] for key in given})


def _undo(scheduler: Any) -> Iterator[Callable[[], object]]:
    """Calls that restore a scheduler, the schedulers in it and their optimizers' groups."""
    seen: set[int] = set()
    waiting = [scheduler]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.optim.Optimizer):
            for group in each.param_groups:
                yield _restored(group)
        elif isinstance(each, list | tuple):
            waiting += each
        elif hasattr(each, "load_state_dict") and not isinstance(each, nn.Module):
            waiting += vars(each).values()
            yield _restored(vars(each))


def _restored(table: dict[str, Any]) -> Callable[[], object]:
    saved = {k: copy.copy(v) if isinstance(v, list | dict) else v for k, v in table.items()}

    def restore() -> None:
        for key in table.keys() - saved.keys():
            del table[key]
        for key, value in saved.items():
            now = table.get(key)
            if isinstance(value, list) and isinstance(now, list):
                now[:] = value  # in place: other objects may refer to this list
            elif isinstance(value, dict) and isinstance(now, dict):
                now.clear()
                now.update(value)
            else:
                table[key] = value

    return restore
