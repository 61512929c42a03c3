"""Replacement of those outputs of a forward that lie in the memory of the unit's gathered
parameters. Copies take their place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.forward_ad import unpack_dual

from fsdpc import _torch
from fsdpc._engine.containers import is_dataclass, within


def copy_outputs(output: Any, begin: int, end: int) -> Any:
    """Return ``output`` with a differentiable copy in the place of each tensor whose memory is in
    the address range ``[begin, end)``. Local.
    """
    return copy_within(output, [(begin, end)])


def copy_within(output: Any, ranges: Sequence[tuple[int, int]]) -> Any:
    """Return ``output`` with copies as ``copy_outputs`` makes them, for several address ranges.

    Lists, dicts and dataclasses are changed in place; tuples, sets and registered pytree nodes are
    rebuilt. Each container is visited once.
    """
    return _Copies(ranges).of(output)


def inner_tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors in ``output`` and the tensors' tangents, all without torch.func's
    wrappers.
    """
    found: list[torch.Tensor] = []
    pending = [leaf for leaf in _torch.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    while pending:
        tensor = pending.pop()
        if not _torch.is_wrapped(tensor):
            found.append(tensor)
            continue
        pending.append(_torch.unwrapped(tensor))
        tangent = unpack_dual(tensor).tangent
        if tangent is not None:
            pending.append(tangent)
    return found


class _Copies:
    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.ranges = ranges
        self.done: dict[int, Any] = {}
        self.kept: list[Any] = []  # keeps objects alive, so that their ids stay unique

    def of(self, value: Any) -> Any:
        if id(value) not in self.done:
            self.kept.append(value)
            self.done[id(value)] = value  # ends the recursion for a container that contains itself
            self.done[id(value)] = self._copy(value)
        return self.done[id(value)]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.clone() if self._is_own(value) else value
        if isinstance(value, list):
            value[:] = [self.of(item) for item in value]
        elif isinstance(value, dict):
            for key, item in list(value.items()):
                new = self.of(item)
                if new is not item:
                    value[key] = new
        elif is_dataclass(value):
            for field in dataclasses.fields(value):
                item = getattr(value, field.name, None)
                new = self.of(item)
                if new is not item:
                    object.__setattr__(value, field.name, new)
        else:
            return within(self.of, value)
        return value

    def _is_own(self, tensor: torch.Tensor) -> bool:
        return any(self._lies_in(one) for one in inner_tensors(tensor))

    def _lies_in(self, tensor: torch.Tensor) -> bool:
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # the tensor has no memory, e.g. on the meta device
            return False
        return any(begin <= address < end for begin, end in self.ranges)
