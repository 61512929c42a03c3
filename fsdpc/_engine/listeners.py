"""The user's post-accumulate-grad hooks on sharded parameters, and optimizers that step in
backward.

Sharded parameters are in no autograd graph, so torch calls neither. The engine calls both at
the end of every synchronised backward, on every rank of the group, for each parameter that got a
gradient on any rank: ``.grad`` holds the reduced gradient. On ranks without elements of the
parameter ``.grad`` is an empty tensor while hooks run and None afterwards, and no optimizer steps.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from fsdpc._engine.writeback import owner_of


@torch.no_grad()
def call_listeners(params: list[nn.Parameter]) -> None:
    """Call the hooks and optimizers of ``params`` (in module order), last parameter first. Local.

    Hooks of ``register_post_accumulate_grad_hook`` come first, with the parameter as argument. Then
    the optimizers of ``torch.distributed.optim._apply_optimizer_in_backward`` step, and ``.grad``
    is None afterwards, as without sharding. A hook's exception propagates from ``backward()``.
    """
    for param in reversed(params):
        for hook in list((param._post_accumulate_grad_hooks or {}).values()):
            hook(param)
        optimizers = param.__dict__.get("_in_backward_optimizers")
        if holds_nothing(param):
            param.grad = None
        elif optimizers and param.grad is not None:
            for optimizer in optimizers:
                optimizer.step()
            param.grad = None


def holds_nothing(param: nn.Parameter) -> bool:
    """True for a sharded parameter without elements on this rank, but with some on other ranks."""
    owner = owner_of(param) if param.numel() == 0 else None
    return owner is not None and owner.holds_nothing(param)


def check_listeners(name: str, unit: str, param: nn.Parameter, use_orig_params: bool) -> None:
    """Warn, when a unit is constructed, about hooks that will not be called. Local.

    ``RuntimeError``: a parameter that a flat parameter will replace has an optimizer in backward.
    """
    if not use_orig_params and param.__dict__.get("_in_backward_optimizers"):
        raise RuntimeError(
            "FSDP optimizer in backward only supported with use_orig_params=True! A flat "
            f"parameter replaces parameter {name!r} of unit {unit!r}: pass use_orig_params=True, "
            "or apply the optimizer to model.parameters() after wrapping"
        )
    lost: Any = param._backward_hooks
    if not use_orig_params:
        lost = lost or param._post_accumulate_grad_hooks
    if lost:
        warnings.warn(
            f"parameter {name!r} of unit {unit!r} has hooks that will not be called: the sharded "
            "parameter is in no autograd graph. To see the reduced gradient, use "
            "register_post_accumulate_grad_hook on the parameters of the wrapped model (with "
            "use_orig_params=True also before wrapping)",
            stacklevel=2,
        )
