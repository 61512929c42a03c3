"""The key rule: which states of a parameter have one element per element, and are cut with it.

These are the states of the parameter's shape. Where the parameter has no dimensions, a 0-dim state
may be its element or a number of the parameter, like Adam's ``step``; a state of that name on
parameters with dimensions tells which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fsdpc._comm.plain import Outline
from fsdpc._spans.rows import size_of
from fsdpc._torch import ShardedTensor

Shape = tuple[int, ...]


def shape_of(value: Any) -> Shape | None:
    """The shape of a tensor or of what stands for one; ``None`` for other values."""
    if isinstance(value, Outline):
        return value.shape
    return size_of(value) if isinstance(value, (torch.Tensor, ShardedTensor)) else None


def numbers_of(states: Iterable[tuple[Shape | None, Mapping[str, Shape | None]]]) -> set[str]:
    """Names of states with one number per parameter. ``states``: for each parameter its shape, and
    the shapes of its states by name.
    """
    numbers, elements = set(), set()
    for shape, state in states:
        if shape:
            for name, of in state.items():
                if of is not None:
                    (elements if of else numbers).add(name)
    return numbers | ({"step"} - elements)


def is_cut(name: str, shape: Shape | None, of: Shape | None, numbers: set[str]) -> bool:
    """True if a state of this name and shape has one element per element of a parameter of shape
    ``of``. A shape of ``None``: no tensor, or not known.
    """
    return shape is not None and shape == of and (shape != () or name not in numbers)
