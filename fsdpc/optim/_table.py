"""Steps of parameters in host memory. C code does the steps from a table of the tensors, without
Python code for each parameter.

A step on the slow path (``FusedOptimizer._members`` and the code after it) makes a table. Later
steps use the table as long as all tensors are where that step found them; see
csrc/py/optim/py_optim_table.c.
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

# After more than this number of successive steps without a usable table, only each eighth step
# makes a new table.
PATIENCE = 8
PARAMS, GRADS, COPIES = range(3)


class Table:
    """The tensors of one optimizer's steps, in a table of the C code. Local."""

    def __init__(self, optimizer: Any, core: Any, kept: Any, parts: list[list[Group]]) -> None:
        self.core = core
        self.kept = kept  # keeps objects alive whose addresses the table has
        self.parts = parts  # for each part of the norm, the groups of ranks that sum it
        self.names = names_of(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.all_params = None if any(isinstance(p, DTensor) for p in params) else params
        self.count = 0  # how many parameters the present step changes

    def read(self, optimizer: Any) -> bool:
        """Read the tensors of a step. Return False if the step must take the slow path. If the
        result is True, the caller must call ``end`` after the step.
        """
        if self.names != names_of(optimizer):
            return False
        params = [group["params"] for group in optimizer.param_groups]
        count = _C.optim_table_read(self.core, params, optimizer.state)
        if count < 0:  # keep self.count: a step of another thread may be using it
            return False
        self.count = count
        return True

    def end(self) -> None:
        """Release the gradients and states of the step."""
        _C.optim_table_end(self.core)

    def squares(self) -> list[tuple[list[Group], float]]:
        """Return sums of squares of this rank's gradients. Each sum comes with the groups of ranks
        over which it must be added up.
        """
        threads = torch.get_num_threads()
        return [
            (groups, _C.optim_table_squares(self.core, part, threads))
            for part, groups in enumerate(self.parts)
        ]

    def are_finite(self) -> bool:
        """Return whether all elements of the gradients are finite."""
        return all(bool(grad.isfinite().all()) for grad in self.changed(GRADS))

    def changed(self, which: int) -> list[Tensor]:
        """Return the tensors that the step changes. ``which``: ``PARAMS`` (parameters and their
        local tensors), ``GRADS`` or ``COPIES``.
        """
        params = self.all_params
        if which == PARAMS and params is not None and self.count == len(params):
            return params
        return _C.optim_table_changed(self.core, which)


def names_of(optimizer: Any) -> list[tuple[str | None, tuple[str, ...], str | None]]:
    """Return the names of the states that a step of each group uses: the step counter, the states
    with one value per element, and the average.
    """
    average = None if optimizer._fsdpc_average is None else AVERAGE
    groups = optimizer.param_groups
    return [(optimizer._counter, optimizer._names(group), average) for group in groups]


def table_of(optimizer: Any) -> Table | None:
    """Return a table for the next steps, or None if these steps must take the slow path."""
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
    except (TypeError, BufferError, NotImplementedError):  # the slow path raises a clear error
        return None
    return Table(optimizer, core, (params, listed), [groups for groups, _ in parts])
