"""The rule that tells which states of a parameter have one element per element of the parameter,
and are sharded like the parameter.

These are the states that have the parameter's shape. A parameter without dimensions is ambiguous:
its 0-dim state may belong to its only element, or be one number per parameter, such as Adam's
``step``. The state counts as one number if the state of the same name is one number for a
parameter with dimensions.
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
    """Return the shape of a tensor or of an ``Outline``, which stands for a tensor; ``None`` for
    other values.
    """
    if isinstance(value, Outline):
        return value.shape
    return size_of(value) if isinstance(value, (torch.Tensor, ShardedTensor)) else None


def numbers_of(states: Iterable[tuple[Shape | None, Mapping[str, Shape | None]]]) -> set[str]:
    """Return the names of the states that are one number per parameter. ``states``: for each
    parameter, its shape and the shapes of its states by name.
    """
    numbers, elements = set(), set()
    for shape, state in states:
        if shape:
            for name, of in state.items():
                if of is not None:
                    (elements if of else numbers).add(name)
    return numbers | ({"step"} - elements)


def is_cut(name: str, shape: Shape | None, of: Shape | None, numbers: set[str]) -> bool:
    """Return whether a state of this name and shape has one element per element of a parameter of
    shape ``of``. A shape is ``None`` if the value is not a tensor or the shape is not known.
    """
    return shape is not None and shape == of and (shape != () or name not in numbers)
