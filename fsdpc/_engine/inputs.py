"""Tensors in a module's arguments: moved to the compute device, cast to the compute dtype.
Containers are traversed (``containers.within``); a value without changes is returned as the same
object.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from fsdpc._engine.containers import within

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_PLAIN = (int, float, str, bytes)


def preparation(
    device: torch.device | None, dtype: torch.dtype | None
) -> Callable[[tuple[Any, ...], dict[str, Any]], Arguments] | None:
    """A function of positional and keyword arguments that moves all tensors to ``device`` (not to
    a CPU), then casts floating ones to ``dtype``; None if there is nothing to do. Local.
    """
    moves = device is not None and device.type != "cpu"
    if moves and dtype is not None:
        return lambda args, kwargs: cast_arguments(dtype, *move_arguments(device, args, kwargs))
    if moves:
        return partial(move_arguments, device)
    return None if dtype is None else partial(cast_arguments, dtype)


def _arguments(
    change: Callable[[Any, Any], Any], to: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    args = tuple([change(to, value) for value in args])
    if kwargs:
        kwargs = {key: change(to, value) for key, value in kwargs.items()}
    return args, kwargs


def cast_tree(dtype: torch.dtype, value: Any) -> Any:
    """``value`` with its floating tensors in ``dtype``."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype is not dtype and value.is_floating_point() else value
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, PackedSequence):
        return value.to(dtype) if value.data.is_floating_point() else value
    return within(partial(cast_tree, dtype), value)


def move_tree(device: torch.device, value: Any) -> Any:
    """``value`` with its tensors on ``device``."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device)
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, PackedSequence):
        return value if value.data.device == device else value.to(device)
    return within(partial(move_tree, device), value)


# cast_arguments(dtype, args, kwargs) casts every floating tensor; move_arguments(device, args,
# kwargs) moves every tensor to a device that has an index. Both are differentiable: gradients have
# the input's dtype and lie on the input's device.
cast_arguments, move_arguments = partial(_arguments, cast_tree), partial(_arguments, move_tree)


def alias_arguments(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Arguments:
    """``args`` and ``kwargs`` with a view in place of each tensor that requires a gradient and is
    an argument, or in a tuple argument: the view's autograd node is this call's alone.

    Each tensor gets one view, so that equal objects stay equal. Containers that a forward may
    mutate are passed unchanged.
    """
    views: dict[int, torch.Tensor] = {}
    args = tuple([_alias(views, value) for value in args])
    return args, {key: _alias(views, value) for key, value in (kwargs or {}).items()}


def _alias(views: dict[int, torch.Tensor], value: Any) -> Any:
    # No closure that names itself: the cycle would keep the inputs until Python's next collection.
    if isinstance(value, torch.Tensor):
        if not value.requires_grad or value.is_sparse:
            return value
        view = views.get(id(value))
        if view is None:
            view = views[id(value)] = value.view_as(value)
        return view
    if type(value) is tuple:
        return tuple([_alias(views, item) for item in value])
    return value
