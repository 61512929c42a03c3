"""The user's post-accumulate-grad hooks on sharded parameters, and optimizers that step in
backward.

Sharded parameters are in no autograd graph, so torch calls neither these hooks nor these
optimizers. The engine calls them at the end of every synchronised backward, on every rank of the
group, for each parameter that got a gradient on any rank; ``.grad`` is the reduced gradient. On a
rank without elements of the parameter, ``.grad`` is an empty tensor while hooks run and None
afterwards, and no optimizer steps.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from fsdpc._engine.writeback import owner_of


@torch.no_grad()
def call_listeners(params: list[nn.Parameter]) -> None:
    """Call the hooks and optimizers of ``params`` in reverse order. Local.

    ``params`` are in module order. For each parameter, the hooks of
    ``register_post_accumulate_grad_hook`` are called first, with the parameter as argument. If
    ``torch.distributed.optim._apply_optimizer_in_backward`` has attached optimizers, these step
    then, and ``.grad`` is set to None, as without sharding. ``backward()`` raises the exception of
    a hook.
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
    """Whether all elements of a sharded parameter are on other ranks."""
    owner = owner_of(param) if param.numel() == 0 else None
    return owner is not None and owner.holds_nothing(param)


def check_listeners(name: str, unit: str, param: nn.Parameter, use_orig_params: bool) -> None:
    """Warn if a parameter has hooks that will not be called once a unit manages the parameter.
    Local.

    ``RuntimeError``: the parameter has an optimizer in backward, and a flat parameter will replace
    the parameter.
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
