"""Mixed precision on the module side: casting of inputs and buffers, and modules that stay in full
precision.

Parameters and gradients are cast by the engine. What remains for the front end is everything that
is a plain tensor: forward inputs (differentiable casts, so that input gradients come back in the
input's dtype), buffers, and the inputs and outputs of modules such as BatchNorm that must compute
in fp32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from fsdpc._collect import owned_modules
from fsdpc._names import join


def cast_arguments(
    dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``args`` and ``kwargs`` with every floating tensor in ``dtype``, also inside containers and
    dataclasses.
    """
    args = tuple([cast_tree(dtype, value) for value in args])
    if kwargs:
        kwargs = {key: cast_tree(dtype, value) for key, value in kwargs.items()}
    return args, kwargs


def cast_tree(dtype: torch.dtype, value: Any) -> Any:
    """``value`` with its floating tensors in ``dtype``. What needs no cast is returned as the same
    object.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype is not dtype and value.is_floating_point() else value
    if value is None or isinstance(value, (int, float, str, bytes)):
        return value
    if isinstance(value, PackedSequence):
        return value.to(dtype) if value.data.is_floating_point() else value
    if isinstance(value, dict):
        return _cast_dict(dtype, value)
    if isinstance(value, (list, tuple, set)):
        return _cast_sequence(dtype, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_dataclass(dtype, value)
    return value


def _cast_dict(dtype: torch.dtype, value: dict[Any, Any]) -> Any:
    cast = {key: cast_tree(dtype, item) for key, item in value.items()}
    if all(cast[key] is item for key, item in value.items()):
        return value
    if type(value) is dict:
        return cast
    copy = value.copy()
    copy.update(cast)
    return copy


def _cast_sequence(dtype: torch.dtype, value: Any) -> Any:
    items = list(value)
    cast = [cast_tree(dtype, item) for item in items]
    if all(new is old for new, old in zip(cast, items, strict=True)):
        return value
    if hasattr(value, "_fields"):
        return type(value)(*cast)
    return type(value)(cast)


def _cast_dataclass(dtype: torch.dtype, value: Any) -> Any:
    names = [field.name for field in dataclasses.fields(value)]
    cast = {name: cast_tree(dtype, getattr(value, name)) for name in names}
    if all(cast[name] is getattr(value, name) for name in names):
        return value
    fields = {field.name: field.init for field in dataclasses.fields(value)}
    copy = dataclasses.replace(value, **{name: cast[name] for name in names if fields[name]})
    for name in names:
        if not fields[name]:
            object.__setattr__(copy, name, cast[name])
    return copy


def cast_buffers(
    root: nn.Module, ignored: set[nn.Module], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Cast the unit's own floating buffers in place to ``dtype``.

    Returns ``{clean name below root: original dtype}`` of those that changed, for state dicts.
    Local.
    """
    changed: dict[str, torch.dtype] = {}
    originals: dict[int, torch.dtype] = {}
    if dtype is None:
        return changed
    for module_name, module in owned_modules(root, ignored, shared_twice=True):
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer.is_floating_point() and buffer.dtype != dtype:
                originals[id(buffer)] = buffer.dtype
                buffer.data = buffer.to(dtype)
            if id(buffer) in originals:
                changed[join(module_name, name)] = originals[id(buffer)]
    return changed


class FullPrecisionHooks:
    """Forward hooks of one module that computes in fp32 inside a low-precision model (BatchNorm).

    Outputs go back to the dtype of the last floating input seen, which is the model's compute
    dtype.
    """

    def __init__(self, module: nn.Module):
        self._dtype: torch.dtype | None = None
        module.register_forward_pre_hook(self._before, prepend=False)
        module.register_forward_hook(self._after, prepend=False)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        for value in args:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self._dtype = value.dtype
        return tuple(cast_tree(torch.float32, value) for value in args)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return output if self._dtype is None else cast_tree(self._dtype, output)
