"""Steps of torch's optimizers on sharded parameters, without a DTensor operation per parameter.

A DTensor operation costs tens of microseconds of Python, and an AdamW step has a dozen DTensor
operations for each parameter. The optimizers listed here compute every element from the same
element of the gradient and of the states, and write in place. Their arithmetic may therefore run on
the local tensors: the kernels and the results are the same, and parameters and states remain
DTensors.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.sgd import sgd

from fsdpc._companions.runs import runs_of
from fsdpc._engine.companions import register
from fsdpc._engine.interop import around
from fsdpc._engine.writeback import owner_of
from fsdpc._torch import INIT_GROUP

# The listed classes. Their subclasses are left out, because a subclass may compute other results.
_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
    if hasattr(getattr(torch.optim, name), INIT_GROUP)
)


def use_locals(optimizer: Any) -> None:
    """Let the steps of an optimizer with sharded parameters work on local tensors. Local."""
    if type(optimizer) not in _ELEMENTWISE:
        return
    params = (param for group in optimizer.param_groups for param in group["params"])
    if any(type(param) is DTensor and owner_of(param) is not None for param in params):
        collect = functools.partial(_collect, weakref.ref(optimizer), runs_of(optimizer))
        optimizer.__dict__[INIT_GROUP] = collect


def _collect(optimizer: Any, runs: Any, group: dict[str, Any], *lists: list[Any]) -> Any:
    """Replace the optimizer's ``_init_group``, which fills lists with a group's parameters,
    gradients and states: put local tensors in the place of DTensors, and join small tensors into
    runs.

    Lists whose DTensors are distributed differently remain as the optimizer has filled them.
    """
    this = optimizer()
    if runs is not None and runs.collect(this, group, lists):
        return False
    result = getattr(type(this), INIT_GROUP)(this, group, *lists)
    scaled = isinstance(getattr(this, "found_inf", None), DTensor)
    if scaled or group.get("differentiable"):
        return result
    if type(this) is torch.optim.SGD and group["momentum"] != 0:
        _step_with_momentum(this, group, result, *lists)
    elif all(_alike(lists[0], tensors) for tensors in lists[1:]):
        for tensors in lists:
            tensors[:] = _locals(tensors)
        if runs is not None:
            runs.plan(this, group, lists)
    return result


def _locals(tensors: list[Any]) -> list[Any]:
    return [t._local_tensor if type(t) is DTensor else t for t in tensors]


def _step_with_momentum(
    optimizer: Any,
    group: dict[str, Any],
    sparse: bool,
    params: list[Any],
    grads: list[Any],
    buffers: list[Any],
) -> None:
    """Make a group's step of ``SGD`` with momentum on local tensors, and empty the lists.

    After its own step, ``SGD`` would store the momentum buffers under the parameters in the lists,
    so the lists could not have local tensors. With empty lists ``SGD`` has nothing left to do.
    """
    kept = [(p, b) for p, b in zip(params, buffers, strict=True) if b is not None]
    if not _alike(params, grads) or not _alike([p for p, _ in kept], [b for _, b in kept]):
        return
    moved = _locals(buffers)
    options = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
    sgd(
        _locals(params),
        _locals(grads),
        moved,
        has_sparse_grad=sparse,
        foreach=group["foreach"],
        fused=group["fused"],
        grad_scale=getattr(optimizer, "grad_scale", None),
        found_inf=getattr(optimizer, "found_inf", None),
        **{name: group[name] for name in options},
    )
    for param, old, new in zip(params, buffers, moved, strict=True):
        if old is None:
            made = around(new, param._spec) if type(param) is DTensor else new
            optimizer.state[param]["momentum_buffer"] = made
    for tensors in (params, grads, buffers):
        tensors.clear()


def _alike(params: list[Any], tensors: list[Any]) -> bool:
    """Whether ``tensors`` are distributed as ``params``: each DTensor is distributed as the
    parameter at the same position, no tensor is None, and every tensor whose class differs from its
    parameter's class is 0-dim.
    """
    equal: set[tuple[int, int]] = set()
    for param, tensor in zip(params, tensors, strict=False):
        if type(tensor) is DTensor and type(param) is DTensor:
            have, want = tensor._spec, param._spec
            if have is want or (id(have), id(want)) in equal:
                continue
            if have.placements != want.placements or have.mesh != want.mesh:
                return False
            if have.shape != want.shape:
                return False
            equal.add((id(have), id(want)))
        elif tensor is None or type(tensor) is not type(param) and tensor.dim() > 0:
            return False
    return True


register("steps", use_locals)
