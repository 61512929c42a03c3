"""Optimizers whose result depends on where an element lies in its whole parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdpc._engine.device import CPU
from fsdpc.optim._base import FusedOptimizer
from fsdpc.optim._chunks import AVERAGE, Ends, slice_of_place
from fsdpc.optim._places import ParamSpan, Place, local_of, place_of
from fsdpc.optim._scaling import Members, Rule, Scaling


class Stretch(NamedTuple):
    """A span of a parameter with its memory on this rank."""

    param: Tensor
    span: ParamSpan
    key: int  # the same on all ranks, different for each whole parameter
    value: Tensor
    grad: Tensor


class Blocks(NamedTuple):
    """State values, each of which belongs to ``length`` consecutive elements of a whole parameter.
    ``values``: 1-D, one per block that a span touches; equal on all ranks that share a block.
    """

    values: Tensor
    length: int


class Held(NamedTuple):
    """A state that one rank keeps whole. ``values``: the state on that rank, None on others."""

    values: Tensor | None
    dtype: torch.dtype
    shape: tuple[int, ...]


class SpannedOptimizer(FusedOptimizer):
    """An optimizer that steps span by span, see ``ParamSpan``."""

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
        """Where a checkpoint makes a parameter's states: offloaded ones in host memory, from where
        they go to their place. Local.
        """
        if self._store is not None and not self._store.knows(param):
            self._place_states(set())
        return self._made_on(param)

    def _made_on(self, param: Tensor) -> torch.device:
        return CPU if self._store is not None and self._store.takes(param) else param.device

    def _spans(self, param: Tensor) -> list[ParamSpan]:
        """The spans that a step goes through."""
        return self._place(param).spans

    def _lend(
        self, worker: Any, part: Tensor, param: Tensor, ends: Ends, held: dict[str, Any]
    ) -> None:
        super()._lend(worker, part, param, ends, held)
        worker._known[part] = slice_of_place(self._place(param), ends.begin, ends.end)
        worker._order[part] = self._number(param)

    def _key(self, param: Tensor, span: ParamSpan) -> int:
        return self._number(param) << 32 | span.key

    def _number(self, param: Tensor) -> int:
        """The parameter's position in the optimizer."""
        if self._order is None or param not in self._order:
            all_params = (p for group in self.param_groups for p in group["params"])
            self._order = {p: number for number, p in enumerate(all_params)}
        return self._order[param]

    def _stretches(
        self, params: Sequence[Tensor], values: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> Iterator[Stretch]:
        for param, value, grad in zip(params, values, grads, strict=True):
            for span in self._spans(param):
                key = self._key(param, span)
                yield Stretch(param, span, key, part(value, span), part(grad, span))

    def _states_of(
        self, stretches: Sequence[Stretch], names: Sequence[str]
    ) -> tuple[list[Tensor], ...]:
        """For each name the stretches' elements of that state, which is shaped as its parameter."""
        return tuple([part(self.state[s.param][name], s.span) for s in stretches] for name in names)

    def _run_over(
        self,
        kind: Any,
        rule: Rule,
        scaling: Scaling,
        stretches: Sequence[Stretch],
        states: tuple[list[Tensor], ...],
        lengths: Sequence[int] | None = None,
        edges: Any = None,
    ) -> None:
        """``_run`` for stretches. ``lengths``: of each one's blocks, if the rule needs places."""
        steps = [self.state[stretch.param]["step"] for stretch in stretches]
        places = None
        if lengths is not None:
            pairs = zip(stretches, lengths, strict=True)
            places = tuple((s.span.begin, s.key, length) for s, length in pairs)
        self._run(kind, rule, scaling, members_of(stretches), states, steps, places, edges)


class BlockOptimizer(SpannedOptimizer):
    """An optimizer whose states are not tensors of the parameter's shape. For checkpoints it has

    - ``span_forms(param)``: for each of ``Place.every``, the dtype of every state tensor and how
      many elements share a value, or its shape if one rank keeps it whole, by name: the same on all
      ranks;
    - ``span_states(param)``: for each, its state with ``step``: 1-D tensors, ``Blocks`` where
      more than one element shares a value, and ``Held``; ``{}`` without elements here, or before
      the first step;
    - ``span_owned(param)``: for each, the names of the states that this rank keeps whole;
    - ``spans_counted(param)``: for each, whether its state has ``step``;
    - ``take_span_states(param, states)``: sets such states, with tensors for ``Blocks``. Local.
    """

    keeps_whole_states = False  # each at one rank; fsdpc.checkpoint needs to know

    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        params = [p for group in self.param_groups for p in group["params"]]
        numbers = [i for group in packed["param_groups"] for i in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            if number in packed["state"]:
                packed["state"][number] = self._expanded(param, packed["state"][number])
        return packed

    def _expanded(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """The state as ``state_dict`` has it: with tensors of the parameter's shape."""
        return state

    def span_forms(self, param: Tensor) -> list[dict[str, Any]]:
        """See the class. Local."""
        raise NotImplementedError

    def span_owned(self, param: Tensor) -> list[set[str]]:
        """See the class. Local."""
        return [set() for _ in self._place(param).every]

    def span_states(self, param: Tensor) -> list[dict[str, Any]]:
        """See the class. Local."""
        state = self.state.get(param, {})
        held = iter(self._span_values(param, state) if state else ())
        found: list[dict[str, Any]] = []
        counted = self.spans_counted(param)
        every = zip(self._place(param).every, self.span_forms(param), counted, strict=True)
        for span, forms, has_step in every:
            found.append({})
            if state and span.count:
                for name, value in next(held).items():
                    length = forms[name][1]
                    found[-1][name] = value if length == 1 else Blocks(value, length)
                if AVERAGE in state:
                    found[-1][AVERAGE] = part(state[AVERAGE], span).detach().reshape(-1)
                if has_step:
                    found[-1]["step"] = state["step"]
        return found

    def spans_counted(self, param: Tensor) -> list[bool]:
        """See the class. Local."""
        return [True] * len(self._place(param).every)

    def _span_values(self, param: Tensor, state: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
        """For each span with elements here, the state tensors that ``span_forms`` names, 1-D."""
        raise NotImplementedError


def members_of(stretches: Sequence[Stretch]) -> Members:
    """Stretches in the form that a step takes."""
    values, grads = [s.value for s in stretches], [s.grad for s in stretches]
    return Members([s.param for s in stretches], values, grads, [])


def part(value: Tensor, span: ParamSpan) -> Tensor:
    """A span's elements of a contiguous local tensor."""
    value = local_of(value)
    if span.count == value.numel():
        return value
    return value.view(-1)[span.at : span.at + span.count]
