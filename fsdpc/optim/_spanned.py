"""Optimizers whose result depends on where an element lies in its whole parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdpc._engine.device import CPU
from fsdpc.optim._base import FusedOptimizer
from fsdpc.optim._chunks import Ends, slice_of_place
from fsdpc.optim._places import Place, Span, local_of, place_of


class Piece(NamedTuple):
    """A span of a parameter with its memory on this rank."""

    param: Tensor
    span: Span
    key: int  # the same on all ranks, different for each whole parameter
    value: Tensor
    grad: Tensor


class Blocks(NamedTuple):
    """State values of which each belongs to ``length`` consecutive elements of a whole parameter.
    ``values``: 1-D, one per block that a span touches; equal on all ranks that share a block.
    """

    values: Tensor
    length: int


class SpannedOptimizer(FusedOptimizer):
    """Steps span by span, see ``Span``.

    A class whose states are not tensors of the parameter's shape also has, for checkpoints,

    - ``span_forms(param)``: for each of ``Place.every``, the dtype of every state tensor and how
      many elements share a value, by name: the same on all ranks;
    - ``span_states(param)``: for each, its state with ``step``: 1-D tensors, and ``Blocks`` where
      more than one element shares a value; ``{}`` without elements here, or before the first step;
    - ``take_span_states(param, states)``: the reverse, with tensors in place of ``Blocks``. Local.
    """

    _known: dict[Tensor, Place] | None = None
    _order: dict[Tensor, int] | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._known = self._order = None

    def _place(self, param: Tensor) -> Place:
        """The place of a parameter, computed once."""
        if self._known is None:
            self._known = {}
        if param not in self._known:
            self._known[param] = place_of(param)
        return self._known[param]

    def states_device(self, param: Tensor) -> torch.device:
        """Where a checkpoint makes states of a parameter: offloaded ones in memory of the host, on
        their way to their place. Local.
        """
        if self._store is not None and not self._store.knows(param):
            self._place_states(set())
        return self._made_on(param)

    def _made_on(self, param: Tensor) -> torch.device:
        return CPU if self._store is not None and self._store.takes(param) else param.device

    def _spans(self, param: Tensor) -> list[Span]:
        """What a step goes through."""
        return self._place(param).spans

    def _lend(
        self, worker: Any, part: Tensor, param: Tensor, ends: Ends, held: dict[str, Any]
    ) -> None:
        super()._lend(worker, part, param, ends, held)
        worker._known[part] = slice_of_place(self._place(param), ends.begin, ends.end)
        worker._order[part] = self._number(param)

    def _key(self, param: Tensor, span: Span) -> int:
        return self._number(param) << 32 | span.key

    def _number(self, param: Tensor) -> int:
        """The parameter's position in the optimizer."""
        if self._order is None:
            all_params = (p for group in self.param_groups for p in group["params"])
            self._order = {p: number for number, p in enumerate(all_params)}
        return self._order[param]

    def _pieces(
        self, params: Sequence[Tensor], values: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> Iterator[Piece]:
        for param, value, grad in zip(params, values, grads, strict=True):
            for span in self._spans(param):
                key = self._key(param, span)
                yield Piece(param, span, key, part(value, span), part(grad, span))


def part(value: Tensor, span: Span) -> Tensor:
    """A span's elements of a contiguous local tensor."""
    value = local_of(value)
    if span.length == value.numel():
        return value
    return value.view(-1)[span.start : span.start + span.length]


def numel_of(span: Span) -> int:
    """The number of elements of the whole parameter."""
    count = 1
    for size in span.shape:
        count *= size
    return count
