"""Communication hooks: a user's function that replaces the engine's reduction of gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fsdpc._engine.hooked import Summing
from fsdpc._engine.root import attach_hooks
from fsdpc._fsdp1.args import HYBRID
from fsdpc._fsdp1.collect import unit_modules
from fsdpc._torch import default_hooks

Hook = Callable[..., Any]
_COMPRESSING = (
    (default_hooks.fp16_compress_hook, torch.float16),
    (default_hooks.bf16_compress_hook, torch.bfloat16),
)


def register_comm_hook(self: Any, state: object, hook: Callable[..., Any]) -> None:
    """Let ``hook`` replace the engine's reduction of gradients. Local; every rank must call this
    method before the first forward.

    Each backward calls the hook once per unit. For an unsharded unit (NO_SHARD) the call is
    ``hook(state, grad)``, and the hook must leave the reduced gradient in ``grad``. For other units
    the call is ``hook(state, grad, output)``. ``grad`` is then the unit's full gradient, 1-D and
    padded so that all ranks have equally long shards. The hook must write this rank's shard of the
    reduced gradient to ``output``. ``grad`` and ``output`` have the reduce dtype; the hook may set
    their ``.data`` to another floating dtype. The hook must also divide the sum by the number of
    ranks. For a unit with parameters of several dtypes the hook is called once per dtype. All ranks
    call the hook in the same order. The hook is not called for units without gradients, nor inside
    ``no_sync``.

    ``AssertionError``: ``self`` is not the root, a unit is HYBRID, or a hook is registered already.
    ``ValueError``: ``hook`` is not callable.
    """
    if not self.check_is_root():
        raise AssertionError("register_comm_hook can only be called on a root instance.")
    members = unit_modules(self)
    for member in members:
        if member.sharding_strategy in HYBRID:
            raise AssertionError(
                "Communication hook is not supported for hybrid strategies: "
                f"{member.sharding_strategy} of unit {member._name!r}"
            )
        if member._comm_hook is not None:
            raise AssertionError("A communication hook is already registered")
    if not callable(hook):
        raise ValueError(f"The communication hook must be callable but got {hook}")
    for member in members:
        member._comm_hook, member._comm_hook_state = hook, state
    attach_hooks(self)


def summing_of(member: Any) -> Summing | None:
    """Return the instance's registered hook in the form that the engine calls, or None. Local."""
    hook, state = member._comm_hook, member._comm_hook_state
    return None if hook is None else partial(_sum, hook, state)


def _sum(
    hook: Hook,
    state: object,
    unit: Any,
    grads: list[torch.Tensor],
    segments: list[dict[str, Any]],
) -> list[torch.Tensor]:
    return [
        _call(hook, state, unit, grad, segment["piece_numel"])
        for grad, segment in zip(grads, segments, strict=True)
    ]


def _call(hook: Hook, state: object, unit: Any, grad: torch.Tensor, piece: int) -> torch.Tensor:
    output = None
    if unit.is_sharded:
        output = torch.empty(piece, dtype=grad.dtype, device=unit.device)
    tensors = (grad,) if output is None else (grad, output)
    for compressing, low in _COMPRESSING:
        if hook is compressing:
            return _compressed(low, state, *tensors)
    hook(state, *tensors)
    return tensors[-1]


def _compressed(
    dtype: torch.dtype, state: Any, grad: torch.Tensor, output: torch.Tensor | None = None
) -> torch.Tensor:
    """Do what torch's two compressing hooks do, without their last step, the cast to full
    precision. That cast needs a stream, so it fails on the CPU. The engine casts the result.
    """
    grad = grad.to(dtype)
    if output is None:
        default_hooks.allreduce_hook(state, grad)
        return grad
    output = output.to(dtype)
    default_hooks.reduce_scatter_hook(state, grad, output)
    return output
