"""Optimizers that step in backward, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fsdpc._clip import torch_utils
from fsdpc._companions.lane import before_write
from fsdpc._engine.writeback import owner_of
from fsdpc.optim._base import FusedOptimizer
from fsdpc.optim._scaling import Scaling


def in_backward(
    model: nn.Module, make: Callable[[Iterator[tuple[str, nn.Parameter]]], FusedOptimizer]
) -> FusedOptimizer:
    """Step each unit of ``model`` in backward, as soon as its gradients are summed over the ranks.

    ``make(model.named_parameters())`` must return an optimizer of ``fsdpc.optim`` whose parameters
    all belong to units. This function returns that optimizer. A unit's gradients and their memory
    are released after the unit's step, which saves 4 bytes per element of a float32 shard.
    ``.grad`` is None after backward. The results equal those of steps after backward to the bit.
    Call ``optimizer.step()`` after each backward as usual. The call ends the step; a second
    backward before the call is an error. Units that a rank did not run, or that have a
    communication hook, step when backward has ended.

    On a GPU, steps are queued on torch's current stream, without a host sync. With one rank, a
    unit's step is queued at once. With several ranks, the step is queued when another unit takes
    the unit's reduce slot (``FSDPC_REDUCE_SLOTS``, default 2), because the stream then waits for
    the unit's sum anyway. The last units, and units of which a rank left parameters unused, step
    when backward has ended.

    On a GPU, the gradients of units take turns in slots of memory, if the slots need less memory
    than all gradients. There is one slot for each reduce slot, or one slot with a single rank. Each
    slot is as large as the largest unit's gradient. torch's ``OutOfMemoryError`` is raised if all
    slots are in use (by gradients that the program keeps, or that wait for their step) and there is
    no memory for one more slot. The error names the unit that needed a slot.

    On a GPU, units with CPU offload step after the host has queued all of backward. Each of these
    units steps as soon as its gradient has arrived, while the GPU computes the gradients of other
    units.

    Hyperparameters of ``param_groups`` may change between steps. ``state_dict`` and
    ``load_state_dict`` are those of the optimizer. Local, but all ranks of the units must call this
    function.

    Operations that need all gradients at once raise ``RuntimeError``: clipping (``max_norm=``, and
    torch's and FSDP's functions, which would find no gradients), closures and ``GradScaler`` in
    ``step``, ``no_sync``, and a second backward before ``step``. ``RuntimeError`` is also raised if
    a backward needs a unit again after the unit's step. ``TypeError``: ``make`` returns another
    kind of optimizer. ``NotImplementedError``: a parameter is in no unit, a unit has replicas, a
    unit steps in backward already, the optimizer measures its steps, or the optimizer communicates
    in its steps (such as ``Muon``, ``AdamMini``, and ``AdamW8bit`` if ranks share blocks).
    """
    optimizer = make(model.named_parameters())
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            f"in_backward needs an optimizer of fsdpc.optim, got {type(optimizer).__name__}; for "
            "torch's optimizers there is torch.distributed.optim._apply_optimizer_in_backward"
        )
    names = {id(param): name for name, param in model.named_parameters()}
    units: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            unit = _unit_of(param, names.get(id(param), f"of shape {tuple(param.shape)}"))
            units[id(unit)] = unit
    if optimizer._meter is not None:
        raise NotImplementedError("optim.in_backward: an optimizer that measures its steps")
    if optimizer._communicates():
        raise NotImplementedError(
            f"{type(optimizer).__name__} communicates in its step, and ranks reach a unit's step "
            "at different times in backward: step it after backward"
        )
    torch_utils.install()
    inside = _Inside(optimizer)
    for unit in units.values():
        unit.stepper = inside
    for unit in units.values():
        if unit.tree is not None:
            unit.tree.set_steppers()
    optimizer._inside = inside
    return optimizer


def _unit_of(param: Tensor, name: str) -> Any:
    unit = owner_of(param)
    if unit is None:
        raise NotImplementedError(
            f"parameter {name} belongs to no unit of FullyShardedDataParallel or fully_shard: give "
            "it an optimizer of its own"
        )
    where = f"unit {unit.name or '(root)'} of parameter {name}"
    if unit.groups.replicate is not None:
        raise NotImplementedError(f"{where} has replicas, whose gradients are summed at the end")
    if unit.stepper is not None:
        raise NotImplementedError(f"{where} already has an optimizer that steps in backward")
    return unit


class _Inside:
    """A callable that steps the parameters of one unit at a time."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self.optimizer = optimizer
        self.stepped: set[str] = set()  # names of units that stepped since the last step()
        self._parts: dict[int, list[list[Tensor]]] = {}
        self._known = -1  # the number of parameters when _parts was made

    @torch.no_grad()
    def __call__(self, unit: Any) -> None:
        parts = self._parts_of(unit)
        members = [self.optimizer._members(params) for params in parts]
        try:
            self._check(unit.name or "(root)")
            if any(found.params for found in members):
                self.stepped.add(unit.name or "(root)")
                before_write()
                self.optimizer._step_members(members, Scaling())
        finally:  # after an error, a later backward must not add to these gradients
            for params in parts:
                for param in params:
                    param.grad = None

    def _check(self, name: str) -> None:
        """Raise ``RuntimeError`` if this unit must not step now."""
        if name in self.stepped:
            raise RuntimeError(
                f"unit {name} gets gradients of a second backward before optimizer.step(): an "
                "optimizer that steps in backward cannot accumulate gradients. Call step() after "
                "each backward"
            )
        if self.optimizer._fsdpc_average is not None:
            self.optimizer._fsdpc_average.refuse_shown(f"a backward that steps unit {name}")

    def _parts_of(self, unit: Any) -> list[list[Tensor]]:
        groups = self.optimizer.param_groups
        count = sum(len(group["params"]) for group in groups)
        if count != self._known:
            self._parts, self._known = {}, count
            for number, group in enumerate(groups):
                for param in group["params"]:
                    empty: list[list[Tensor]] = [[] for _ in groups]
                    found = self._parts.setdefault(id(owner_of(param)), empty)
                    found[number].append(param)
        return self._parts.get(id(unit), [[] for _ in groups])

    def end_step(self, closure: Any, max_norm: float | None) -> None:
        """Do the rest of ``optimizer.step()`` after the units have stepped in backward."""
        found = getattr(self.optimizer, "found_inf", None)
        refused = {
            "a closure": closure is not None,
            "clipping by the norm of all gradients": max_norm is not None,
            "GradScaler": found is not None or hasattr(self.optimizer, "grad_scale"),
        }
        for what, asked in refused.items():
            if asked:
                raise RuntimeError(
                    f"{what}: not possible with an optimizer that steps in backward, unit by unit "
                    "(fsdpc.optim.in_backward)"
                )
        self.stepped.clear()
