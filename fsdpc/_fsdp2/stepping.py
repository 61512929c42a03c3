"""Checks and preparations before torch's optimizers step on sharded parameters."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdpc._engine.companions import registered
from fsdpc._engine.writeback import gathered_of
from fsdpc._torch import INIT_GROUP

_checked: weakref.WeakSet[Any] = weakref.WeakSet()


@functools.cache
def install() -> None:
    """Let each optimizer of this process that has sharded parameters be checked and prepared before
    it steps. Local.
    """
    register_optimizer_step_pre_hook(_prepare)


def _prepare(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Check and prepare an optimizer before its step."""
    if torch.compiler.is_compiling():
        return
    if optimizer not in _checked:
        _refuse_gathered(optimizer)
        registered("name on dtensors")(optimizer)
        _checked.add(optimizer)
    for group in optimizer.param_groups:
        if group.get("fused"):
            for param in group["params"]:
                if type(param) is DTensor and not param._local_tensor.is_contiguous():
                    _lay_like(param, optimizer.state.get(param, {}))
    if INIT_GROUP not in optimizer.__dict__:
        registered("steps")(optimizer)


def _refuse_gathered(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            found = gathered_of(param)
            if found is not None:
                unit, name = found
                raise RuntimeError(
                    "the optimizer has a full, plain parameter in place of the sharded "
                    f"{name!r} of unit {unit.name!r}, and would never train it: model.parameters() "
                    "has full parameters between a forward and its backward, and those that a "
                    "program puts into modules until the next forward. Make the optimizer at "
                    "another time, or after model.reshard()"
                )


def _lay_like(param: Any, state: dict[str, Any]) -> None:
    """Give the parameter's gradient and states the strides of the parameter, which is cut along
    another dimension than the first. torch's fused CPU kernels read all of these tensors in the
    parameter's memory order. Values that a program has loaded or assigned may have other strides.
    """
    local = param._local_tensor
    for value in (param.grad, *state.values()):
        if type(value) is DTensor and value._local_tensor.shape == local.shape:
            other = value._local_tensor
            if other.stride() != local.stride():
                value._local_tensor = torch.empty_like(local, dtype=other.dtype).copy_(other)
