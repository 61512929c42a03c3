"""Gradual unfreezing: parameters that were frozen when they were wrapped and are trained later.

The engine detects such parameters when a forward begins. Their units then get memory for gradients,
and the tree is rebuilt, because the tree depends on the sizes of all reductions. Shards, Parameter
objects, gathered tensors, gradients and their order stay the same, so an optimizer's states of
other parameters stay valid.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdpc._comm.rendezvous import agree_on_model
from fsdpc._engine import writeback as _writeback
from fsdpc._engine.interop import check_trains
from fsdpc._engine.lowbit import check_trainable


def unfrozen(unit: Any) -> list[int]:
    """Return the indices into ``unit.optim_params`` of the parameters that require a gradient but
    have no memory for one. Local.
    """
    return [
        k
        for k, (param, grad, _) in enumerate(unit.optim_params)
        if grad is None and param.requires_grad
    ]


def _places(units: list[Any]) -> list[tuple[int, int]]:
    """Return (index of the unit in ``units``, index in the unit) of each unfrozen parameter."""
    found = ((n, unit.optim_params[k][2]) for n, unit in enumerate(units) for k in unfrozen(unit))
    return [(number, i) for number, covers in found for i in covers]


def first(units: list[Any]) -> tuple[int, int]:
    """Return (index of the unit in ``units``, index in the unit) of the first unfrozen parameter.

    (0, -1) if there is none. Local.
    """
    return next(iter(_places(units)), (0, -1))


def agree(units: list[Any]) -> None:
    """Check that every rank unfreezes the same parameters. Collective over all the units' groups.

    ``MismatchError`` names the first parameter that only some ranks unfreeze. ``TypeError``, raised
    before communication, names a parameter whose dtype cannot be trained.
    """
    names, numbers = [], []
    for number, i in _places(units):
        unit = units[number]
        name = f"{unit.infos[i].name} of unit {unit.name or '(root)'}"
        check_trains(f"unfrozen parameter {name}", unit.dtypes[i])
        check_trainable(unit.infos[i].param, f"unfrozen parameter {name}")
        names.append(name)
        numbers.append(f"{i} of unit {number}")
    texts = [
        "\n".join(
            [*(f"parameter {one}: trained from now on" for one in each), "no other parameter"]
        )
        for each in (names, numbers)
    ]
    for comm in {id(comm): comm for unit in units for comm in unit.groups.comms}.values():
        agree_on_model(comm, *texts, what=f"unfreezing of parameter {names[0]}")


@torch.inference_mode(False)  # tensors made in inference mode could not train
def thaw(unit: Any) -> None:
    """Allocate gradients for the unfrozen parameters of ``unit``, which belongs to no tree. Local;
    every rank of the unit's groups must make the call.
    """
    wanted = unfrozen(unit)
    if not wanted:
        return
    _writeback.adopt_values(unit)
    with unit.adopted_grads():
        _allocate(unit, wanted)
    unit.announce_grads()


def _allocate(unit: Any, wanted: list[int]) -> None:
    layout = unit.flat.layout()
    of = [layout["params"][covers[0]]["segment"] for _, _, covers in unit.optim_params]
    segments = bytearray(len(layout["segments"]))
    for k in wanted:
        segments[of[k]] = 1
        for i in unit.optim_params[k][2]:
            unit.trainable[i] = True
    unit.flat.thaw(bytes(segments))
    trained = [segment["trainable"] for segment in unit.flat.layout()["segments"]]
    for k in range(len(unit.optim_params)):
        if trained[of[k]]:
            _renew(unit, k)
    unit.flat.renew_grads([grad for _, grad, _ in unit.optim_params])


def _renew(unit: Any, k: int) -> None:
    """Make a tensor over a gradient's new memory. If ``.grad`` is the old tensor, the new tensor
    becomes ``.grad``.
    """
    param, old, covers = unit.optim_params[k]
    grad = unit.fresh_grad(k)
    if old is not None and param.grad is old:
        param.grad = grad
    unit.optim_params[k] = (param, grad, covers)
