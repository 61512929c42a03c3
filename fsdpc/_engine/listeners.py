"""What the user hung on sharded parameters: post-accumulate-grad hooks, and optimizers that step in
backward.

Sharded parameters take part in no autograd graph, so torch never calls these. The engine does, at
the end of every synchronised backward, for each parameter that got a gradient on any rank, on every
rank of the group: the reduced gradient is in ``.grad``. Where a rank holds no element of the
parameter, that is an empty tensor while hooks run and None afterwards, and no optimizer steps.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from fsdpc._engine.writeback import owner_of


@torch.no_grad()
def call_listeners(params: list[nn.Parameter]) -> None:
    """Call what waits for the gradients of ``params`` (in module order), the last one first.

    Hooks of ``register_post_accumulate_grad_hook`` come first, with the parameter as argument. Then
    the optimizers of ``torch.distributed.optim._apply_optimizer_in_backward`` step, and ``.grad``
    is None afterwards, as without sharding. What a hook raises leaves ``backward()``.
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
    """True for a sharded parameter all of whose elements are other ranks'."""
    owner = owner_of(param) if param.numel() == 0 else None
    return owner is not None and owner.holds_nothing(param)


def check_listeners(name: str, unit: str, param: nn.Parameter, use_orig_params: bool) -> None:
    """Say at construction what will not be called.

    ``RuntimeError``: an optimizer in backward on a parameter that a flat one is about to replace.
    """
    if not use_orig_params and param.__dict__.get("_in_backward_optimizers"):
        raise RuntimeError(
            "FSDP optimizer in backward only supported with use_orig_params=True! Parameter "
            f"{name!r} of unit {unit!r} has one, but a flat parameter takes its place: pass "
            "use_orig_params=True, or apply the optimizer to model.parameters() after wrapping"
        )
    lost: Any = param._backward_hooks
    if not use_orig_params:
        lost = lost or param._post_accumulate_grad_hooks
    if lost:
        warnings.warn(
            f"parameter {name!r} of unit {unit!r} has hooks that will not be called, because the "
            "sharded parameter takes part in no autograd graph: use "
            "register_post_accumulate_grad_hook on the parameters of the wrapped model (with "
            "use_orig_params=True also before wrapping), which gets the reduced gradient",
            stacklevel=2,
        )
