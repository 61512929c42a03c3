"""Preparation of a module's arguments: tensors are moved to the compute device and cast to the
compute dtype. The items of containers are changed in the same way (``containers.within``). A value
in which nothing changes is returned as the same object.
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
    """Return a function of positional and keyword arguments that moves all tensors to ``device``,
    unless that is the CPU, and then casts floating-point tensors to ``dtype``. Return None if there
    is nothing to do. Local.
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
    """Return ``value`` with its floating-point tensors cast to ``dtype``."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype is not dtype and value.is_floating_point() else value
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, PackedSequence):
        return value.to(dtype) if value.data.is_floating_point() else value
    return within(partial(cast_tree, dtype), value)


def move_tree(device: torch.device, value: Any) -> Any:
    """Return ``value`` with its tensors moved to ``device``."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device)
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, PackedSequence):
        return value if value.data.device == device else value.to(device)
    return within(partial(move_tree, device), value)


# cast_arguments(dtype, args, kwargs) casts every floating-point tensor.
# move_arguments(device, args, kwargs) moves every tensor to a device that has an index.
# Both are differentiable: a gradient gets the dtype and the device of the original input.
cast_arguments, move_arguments = partial(_arguments, cast_tree), partial(_arguments, move_tree)


def alias_arguments(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Arguments:
    """Return ``args`` and ``kwargs`` with views in the place of tensors that require a gradient. No
    other call shares the views' autograd nodes.

    Arguments and items of tuples are replaced. Containers that a forward may mutate are passed
    unchanged. An object that occurs several times gets one view.
    """
    views: dict[int, torch.Tensor] = {}
    args = tuple([_alias(views, value) for value in args])
    return args, {key: _alias(views, value) for key, value in (kwargs or {}).items()}


def _alias(views: dict[int, torch.Tensor], value: Any) -> Any:
    # Not a recursive closure: its reference cycle would keep the inputs until Python's gc runs.
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
