"""Base classes of optimizers whose result depends on the index of an element in its parameter."""

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
    """A span of a parameter, with the memory of its values and gradients on this rank."""

    param: Tensor
    span: ParamSpan
    key: int  # a number that identifies the whole parameter, and is the same on all ranks
    value: Tensor
    grad: Tensor


class Blocks(NamedTuple):
    """State values, each of which belongs to a block of ``length`` consecutive elements of a whole
    parameter. ``values`` is 1-D and has one value for each block that this rank's span touches.
    All ranks that share a block have the same value for the block.
    """

    values: Tensor
    length: int


class Held(NamedTuple):
    """A state that one rank keeps as a whole. ``values`` is the state on that rank and None on
    other ranks.
    """

    values: Tensor | None
    dtype: torch.dtype
    shape: tuple[int, ...]


class SpannedOptimizer(FusedOptimizer):
    """An optimizer that steps each ``ParamSpan`` of a parameter separately."""

    _known: dict[Tensor, Place] | None = None
    _order: dict[Tensor, int] | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._known = self._order = None

    def _place(self, param: Tensor) -> Place:
        """Return a parameter's ``Place``, which is computed only once for each parameter."""
        if self._known is None:
            self._known = {}
        if param not in self._known:
            self._known[param] = place_of(param)
        return self._known[param]

    def states_device(self, param: Tensor) -> torch.device:
        """Return the device on which a checkpoint must make a parameter's states. Offloaded states
        are made in host memory and then copied to their places. Local.
        """
        if self._store is not None and not self._store.knows(param):
            self._place_states(set())
        return self._made_on(param)

    def _made_on(self, param: Tensor) -> torch.device:
        return CPU if self._store is not None and self._store.takes(param) else param.device

    def _spans(self, param: Tensor) -> list[ParamSpan]:
        """Return the spans of a parameter that a step updates."""
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
        """Return the parameter's position in the optimizer."""
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
        """Return, for each state name, a list with each stretch's elements of that state. The
        states must have the shape of their parameter.
        """
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
        """Call ``_run`` for stretches. ``lengths``: the length of each stretch's blocks, or None if
        the rule does not depend on the positions of elements in whole parameters.
        """
        steps = [self.state[stretch.param]["step"] for stretch in stretches]
        places = None
        if lengths is not None:
            pairs = zip(stretches, lengths, strict=True)
            places = tuple((s.span.begin, s.key, length) for s, length in pairs)
        self._run(kind, rule, scaling, members_of(stretches), states, steps, places, edges)


class BlockOptimizer(SpannedOptimizer):
    """An optimizer whose states are not tensors of the parameter's shape. It has five methods for
    checkpoints. The first four return a list with one item for each span in ``Place.every``. An
    item is:

    - ``span_forms(param)``: a dict from the name of each state tensor to (dtype, number of elements
      that share a value), or to (dtype, shape) if one rank keeps the state as a whole. The result
      is the same on all ranks.
    - ``span_states(param)``: a dict of the states, including ``step``. A state is a 1-D tensor, a
      ``Blocks`` if several elements share a value, or a ``Held``. The dict is empty before the
      first step, and if the span has no elements on this rank.
    - ``span_owned(param)``: the names of the states that this rank keeps as a whole.
    - ``spans_counted(param)``: whether the span's state has ``step``.

    ``take_span_states(param, states)`` sets the states that ``span_states`` returns, but gets
    tensors in place of ``Blocks`` and ``Held``. Local.
    """

    keeps_whole_states = False  # whether there are ``Held`` states; fsdpc.checkpoint reads this

    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        params = [p for group in self.param_groups for p in group["params"]]
        numbers = [i for group in packed["param_groups"] for i in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            if number in packed["state"]:
                packed["state"][number] = self._expanded(param, packed["state"][number])
        return packed

    def _expanded(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter's state for ``state_dict``: its tensors have the parameter's shape."""
        return state

    def span_forms(self, param: Tensor) -> list[dict[str, Any]]:
        """Described in the docstring of the class. Local."""
        raise NotImplementedError

    def span_owned(self, param: Tensor) -> list[set[str]]:
        """Described in the docstring of the class. Local."""
        return [set() for _ in self._place(param).every]

    def span_states(self, param: Tensor) -> list[dict[str, Any]]:
        """Described in the docstring of the class. Local."""
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
        """Described in the docstring of the class. Local."""
        return [True] * len(self._place(param).every)

    def _span_values(self, param: Tensor, state: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
        """Yield, for each span with elements on this rank, the state tensors that ``span_forms``
        names, as 1-D tensors.
        """
        raise NotImplementedError


def members_of(stretches: Sequence[Stretch]) -> Members:
    """Return the stretches as ``Members``, which is the form that a step takes."""
    values, grads = [s.value for s in stretches], [s.grad for s in stretches]
    return Members([s.param for s in stretches], values, grads, [])


def part(value: Tensor, span: ParamSpan) -> Tensor:
    """Return a span's elements of a contiguous local tensor."""
    value = local_of(value)
    if span.count == value.numel():
        return value
    return value.view(-1)[span.at : span.at + span.count]
