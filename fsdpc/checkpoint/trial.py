"""A trial load of a scheduler's state and of modules' extra states, which is undone before the real
load changes a tensor. If the scheduler or a module raises an error, nothing has changed.
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
    """Load the states, then restore the old ones. Local. ``extra``: the new states of modules by
    name; ``before``: their present states. Raises what the modules or the scheduler raise.
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
    """Yield functions that restore a scheduler, the schedulers in it and the parameter groups of
    their optimizers.
    """
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
