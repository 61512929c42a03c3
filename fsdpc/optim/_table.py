"""Steps of parameters in host memory by a table in C, without a line of Python for each of them.

A table is made by a step that went the long way (``FusedOptimizer._members`` and what follows) and
serves the next ones as long as everything is where that step found it: csrc/py/optim/
py_optim_table.c.
"""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdpc import _C
from fsdpc._engine.device import stand_in
from fsdpc.optim._chunks import AVERAGE
from fsdpc.optim._places import Group, by_ranks

# After more steps in a row than this that no table could do, only each eighth step makes a new
# table.
PATIENCE = 8
PARAMS, GRADS, COPIES = range(3)


class Table:
    """The members of one optimizer's steps. Local."""

    def __init__(self, optimizer: Any, core: Any, kept: Any, parts: list[list[Group]]) -> None:
        self.core = core
        self.kept = kept  # objects whose addresses the table has
        self.parts = parts  # the groups of ranks over which each part of the norm is summed
        self.names = names_of(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.all_params = None if any(isinstance(p, DTensor) for p in params) else params
        self.count = 0  # how many parameters the step under way changes

    def read(self, optimizer: Any) -> bool:
        """Read the tensors of a step. False: the step must go the long way. True: call ``end``."""
        if self.names != names_of(optimizer):
            return False
        params = [group["params"] for group in optimizer.param_groups]
        count = _C.optim_table_read(self.core, params, optimizer.state)
        if count < 0:  # perhaps as another thread's step is under way: its count stays
            return False
        self.count = count
        return True

    def end(self) -> None:
        """Release the gradients and states of the step."""
        _C.optim_table_end(self.core)

    def squares(self) -> list[tuple[list[Group], float]]:
        """The sums of squares of this rank's gradients, each with the groups that add it up."""
        threads = torch.get_num_threads()
        return [
            (groups, _C.optim_table_squares(self.core, part, threads))
            for part, groups in enumerate(self.parts)
        ]

    def are_finite(self) -> bool:
        """Whether all elements of the gradients are finite."""
        return all(bool(grad.isfinite().all()) for grad in self.changed(GRADS))

    def changed(self, which: int) -> list[Tensor]:
        """What the step changes: parameters and their local tensors, gradients, or copies."""
        params = self.all_params
        if which == PARAMS and params is not None and self.count == len(params):
            return params
        return _C.optim_table_changed(self.core, which)


def names_of(optimizer: Any) -> list[tuple[str | None, tuple[str, ...], str | None]]:
    """For each group the names of the states in a step: the counter of steps, states of one value
    per element, and the average.
    """
    average = None if optimizer._fsdpc_average is None else AVERAGE
    groups = optimizer.param_groups
    return [(optimizer._counter, optimizer._names(group), average) for group in groups]


def table_of(optimizer: Any) -> Table | None:
    """A table for the next steps, or None where they must go the long way."""
    if optimizer._kind is None or optimizer._store is not None or stand_in():
        return None
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(p.is_cpu and type(p.grad) in (NoneType, Tensor, DTensor) for p in params):
        return None
    parts = by_ranks(params)
    part_of = {param: part for part, (_, own) in enumerate(parts) for param in own}
    places = []
    for param in params:
        place = optimizer._table_place(param)
        if place is None:
            return None
        places.append((*place, part_of[param]))
    copies = optimizer._copies
    listed = None if copies is None else [copies.get(param) for param in params]
    groups = [
        (group["params"], *names)
        for group, names in zip(optimizer.param_groups, names_of(optimizer), strict=True)
    ]
    try:
        core = _C.optim_table(Tensor, DTensor, groups, optimizer.state, places, listed)
    except (TypeError, BufferError, NotImplementedError):  # the long way says what is wrong
        return None
    return Table(optimizer, core, (params, listed), [groups for groups, _ in parts])
