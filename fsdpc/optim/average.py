"""Averages of parameters over the steps of an optimizer, kept where the parameters' shards are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdpc._companions.lane import before_write
from fsdpc._engine.compiled import hook
from fsdpc._engine.interop import around
from fsdpc._engine.writeback import gathered_of, owner_of
from fsdpc._torch import calls_hooks, first_step_post_hook, foreach_lerp
from fsdpc.optim._chunks import AVERAGE
from fsdpc.optim._places import local_of, locals_of

COUNT = "averaged"  # a group's option: the number of values taken into the group's averages
Decay = float | Callable[[int], float]


class Average:
    """An average of an optimizer's parameters over its steps: exponential (EMA), or uniform (SWA).

    Every ``optimizer.step()`` ends with ``average = lerp(average, parameter, 1 - decay)`` on this
    rank's shards. This needs no communication, and the averages have the same bits as those of the
    unsharded model. The first value taken is a copy of the parameter, as in
    ``torch.optim.swa_utils.AveragedModel``. Averages are float32 (float64 for float64 parameters)
    and part of the optimizer's state, under the name ``average``: state dicts,
    ``FSDP.optim_state_dict`` and ``fsdpc.checkpoint`` save, load and reshard averages like any
    other state. A float32 average takes 4 bytes per element of a shard.

    Args:
        optimizer: any ``torch.optim.Optimizer``, of ``fsdpc.optim`` or torch, over parameters of
            ``FullyShardedDataParallel``, of ``fully_shard``, or plain parameters. Make the average
            on every rank, before a state dict with averages is loaded.
        decay: the weight of the old average when a value is taken, from 0 to 1. It may be a
            function of the number of values taken before (1 when the second value is taken), for
            example for a warm-up: ``Average.warm_up(0.999)``. None: the uniform average. The option
            ``average_decay`` of a parameter group overrides ``decay`` for that group.
        every: a value is taken in each ``every``-th step.
        after: steps before the first value is taken.

    ``ValueError``: a number is out of range. ``TypeError``: ``optimizer`` is only a wrapper around
    another optimizer. ``NotImplementedError``: the optimizer has an average already.

    Sources: Polyak and Juditsky 1992; arXiv 1803.05407 (SWA); ``torch.optim.swa_utils``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        decay: Decay | None = 0.999,
        *,
        every: int = 1,
        after: int = 0,
    ) -> None:
        _check_decay(decay)
        if every < 1 or after < 0:
            raise ValueError(f"Average: every={every} must be at least 1, after={after} at least 0")
        if not calls_hooks(optimizer):
            raise TypeError(
                f"a {type(optimizer).__name__} calls no hooks of its steps: make the Average of "
                "the torch.optim.Optimizer inside (accelerate: optimizer.optimizer)"
            )
        if average_of(optimizer) is not None:
            raise NotImplementedError(
                f"this {type(optimizer).__name__} has an average: groups with their own "
                "average_decay can have others"
            )
        self.optimizer = optimizer
        self.decay = decay
        self.every = every
        self.after = after
        # For each parameter that holds its average now: a copy of the parameter's own values (None:
        # they are in the average's memory), and the parameter's counts of writes at the swap.
        self._in_model: dict[Tensor, tuple[Tensor | None, list[int]]] = {}
        self._loading: Mapping[str, Any] | None = None
        # For the current step: ids of the parameters whose averages have been updated, and the
        # weight of the new values by the id of the group.
        self._taken: set[int] = set()
        self._weights: dict[int, float] = {}
        optimizer._fsdpc_average = self  # type: ignore[attr-defined]
        optimizer.register_step_pre_hook(self._before_step)
        self._behind = optimizer.register_step_post_hook(self._take)
        optimizer.register_state_dict_pre_hook(self._before_state_dict)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    @staticmethod
    def warm_up(decay: float, ramp: float = 10.0) -> Callable[[int], float]:
        """Return a decay function whose value is ``min(decay, (1 + n) / (ramp + n))`` after n
        values, like the decay of TensorFlow's ``ExponentialMovingAverage`` with ``num_updates``.
        Local.
        """
        _check_decay(decay)
        return lambda taken: min(decay, (1 + taken) / (ramp + taken))

    def of(self, param: Tensor) -> Tensor:
        """Return the average of a parameter's shard. The average has the shard's shape, and is a
        DTensor if the parameter is a DTensor. Local.

        ``KeyError``: no value of this parameter has been taken yet.
        """
        if AVERAGE not in self.optimizer.state.get(param, {}):
            if local_of(param).numel() == 0:
                return _copy(param)  # this rank has no element of the parameter
            raise KeyError(
                f"a parameter of shape {tuple(param.shape)} has no average: no step of the "
                "optimizer that trains it has been taken yet"
            )
        return self.optimizer.state[param][AVERAGE]

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Let the parameters of ``model`` hold their averages inside the ``with`` block. After the
        block they hold their own values again, to the bit.

        Use the block for evaluation and for exports: ``fsdpc.checkpoint.save(path, model)`` inside
        the block writes the averages as plain files. Parameters are changed one at a time. A
        float32 parameter swaps its values with the average. A narrower parameter is overwritten,
        after a copy of its values has been made. Buffers, and parameters without an average, do not
        change. Every rank must enter the block, between the same steps. Local.

        Raises ``RuntimeError`` if a block for the same parameters is open, or if the model has
        gathered parameters (between a forward and its backward, or in ``summon_full_params``).
        Inside the block, the optimizer's ``step``, ``state_dict`` and ``load_state_dict``, and a
        backward that steps units, raise ``RuntimeError``. The end of the block restores the values,
        and then raises ``RuntimeError`` if the block wrote to parameters (by a load, or a step of
        another optimizer; writes through ``summon_full_params`` are not detected).
        """
        own = set(model.parameters())
        units = (owner_of(param) for param in self._averaged())
        summoned = any(unit is not None and unit.summoned for unit in units)
        if summoned or any(gathered_of(param) for param in own):
            raise RuntimeError(
                "Average.applied: the model has gathered parameters in place of its own, between a "
                "forward and its backward or inside summon_full_params. Run the backward, call "
                "model.reshard(), or leave the context first"
            )
        chosen = [param for param in self._averaged() if param in own]
        if any(param in self._in_model for param in chosen):
            raise RuntimeError("Average.applied: the model has its averages already")
        before_write()
        shown: list[Tensor] = []
        written = 0
        try:
            for param in chosen:
                self._show(param)
                shown.append(param)
            yield
            written = sum(_versions(param) != self._in_model[param][1] for param in shown)
        finally:
            before_write()
            for param in reversed(shown):
                self._hide(param)
        if written:
            raise RuntimeError(
                f"{written} parameters were written inside Average.applied(), by a load or a step. "
                "They have their values of before again, and what was written is now in the "
                "averages, or lost where those are wider. Load model and optimizer again, outside"
            )

    # --- taking values ---------------------------------------------------------------------------

    def _weight_in_pass(self, group: dict[str, Any]) -> float | None:
        """Return the weight of a group's new values for an optimizer that updates averages while it
        updates the parameters, and then calls ``_took``. Return None if the optimizer must not
        update averages: this step takes no value, this step takes the first value, or other hooks
        of the step run before ``_take``. Local.
        """
        first = first_step_post_hook(self.optimizer) == self._behind.id
        return self._weight(group) if first and self._is_due(group) and group.get(COUNT) else None

    def _took(self, params: Iterable[Tensor]) -> None:
        """Record that the current step has updated the averages of these parameters. Local."""
        self._taken.update(map(id, params))

    def _within(self, params: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor | None]:
        """Return, for each value, the average that a pass over the values can update. It is None if
        the value is only a part of its parameter, or if there is no average of the right layout and
        dtype. Local.
        """
        found: list[Tensor | None] = []
        for param, value in zip(params, values, strict=True):
            average = self.optimizer.state.get(param, {}).get(AVERAGE)
            own = None if average is None else local_of(average)
            fits = own is not None and own.is_contiguous() and own.numel() == value.numel()
            found.append(own if fits and own.dtype == wide(value.dtype) else None)
        return found

    def _is_due(self, group: dict[str, Any]) -> bool:
        steps = group.get("average_steps", 0)
        return steps >= self.after and (steps - self.after) % self.every == 0

    def _weight(self, group: dict[str, Any]) -> float:
        if id(group) not in self._weights:
            self._weights[id(group)] = 1.0 - self._decay_of(group, group.get(COUNT, 0))
        return self._weights[id(group)]

    def _forget(self) -> None:
        """Clear the records of the current step."""
        self._taken.clear()
        self._weights.clear()

    @torch.no_grad()
    @hook
    def _take(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        found = getattr(optimizer, "found_inf", None)
        on_gpu = isinstance(found, Tensor) and not found.is_cpu
        if found is not None and not on_gpu and float(found) != 0:
            return  # the step was skipped
        skipped = found if on_gpu else None
        for group in optimizer.param_groups:
            if self._is_due(group):
                self._take_group(group, skipped)
            group["average_steps"] = group.get("average_steps", 0) + 1
        self._forget()

    def _is_stepped(self, group: dict[str, Any], param: Tensor) -> bool:
        """Return whether the optimizer steps ``param``. A parameter that is not stepped must not
        get an average, because optimizers create a parameter's states only if the parameter has
        no state yet.
        """
        if self.optimizer.state.get(param) or param.grad is not None:
            return True
        names = getattr(self.optimizer, "_names", None)
        # An optimizer that steps units in backward has freed their gradients by now.
        inside = getattr(self.optimizer, "_inside", None) is not None
        return inside and names is not None and not names(group)

    def _take_group(self, group: dict[str, Any], skipped: Tensor | None) -> None:
        left = [param for param in group["params"] if id(param) not in self._taken]
        params = [param for param in left if self._is_stepped(group, param)]
        state = self.optimizer.state
        new = [param for param in params if AVERAGE not in state[param]]
        old = [param for param in params if AVERAGE in state[param]] if new else params
        if old:
            averages = locals_of([state[param][AVERAGE] for param in old])
            values = [
                value if value.dtype == average.dtype else value.to(average.dtype)
                for value, average in zip(locals_of(list(old)), averages, strict=True)
            ]
            _lerp(averages, values, self._weight(group), skipped)
        for param in new:
            state[param][AVERAGE] = _copy(param)
        group[COUNT] = group.get(COUNT, 0) + 1

    def _decay_of(self, group: dict[str, Any], taken: int) -> float:
        decay = group.get("average_decay", self.decay)
        if decay is None:
            return taken / (taken + 1)
        return float(decay(taken)) if callable(decay) else float(decay)

    def _averaged(self) -> list[Tensor]:
        state = self.optimizer.state
        every = (p for group in self.optimizer.param_groups for p in group["params"])
        return [param for param in every if param in state and AVERAGE in state[param]]

    # --- showing averages ------------------------------------------------------------------------

    @torch.no_grad()
    def _show(self, param: Tensor) -> None:
        value, average = locals_of([param, self.of(param)])
        kept = None if value.dtype == average.dtype else value.clone()
        if kept is None:
            _swap(value, average)
        else:
            value.copy_(average)
        self._written(param, value)
        self._in_model[param] = kept, _versions(param)

    @torch.no_grad()
    def _hide(self, param: Tensor) -> None:
        value, average = locals_of([param, self.of(param)])
        kept, _ = self._in_model.pop(param)
        if kept is None:
            _swap(value, average)
        else:
            value.copy_(kept)
        self._written(param, value)

    def _written(self, param: Tensor, value: Tensor) -> None:
        if value is not param:
            increment_version([param])
        copies = getattr(self.optimizer, "_copies", None)
        if copies and param in copies:
            copies[param].copy_(value)

    def refuse_shown(self, what: str) -> None:
        """Raise ``RuntimeError`` inside a block of ``applied``. ``what``: the call that would use
        the averages as values. Local.
        """
        if self._in_model:
            raise RuntimeError(
                f"{what} inside Average.applied(): {len(self._in_model)} parameters have their "
                "averages there instead of their values. Leave the block first"
            )

    def _before_step(self, *_: Any) -> None:
        self.refuse_shown("optimizer.step()")
        # If units step in backward, updates of averages have already been recorded: keep them.
        if getattr(self.optimizer, "_inside", None) is None:
            self._forget()

    def _before_state_dict(self, *_: Any) -> None:
        self.refuse_shown("optimizer.state_dict()")

    # --- loading ---------------------------------------------------------------------------------

    def _before_load(self, _: Any, state_dict: Mapping[str, Any]) -> None:
        self.refuse_shown("optimizer.load_state_dict()")
        self._loading = state_dict

    def _after_load(self, optimizer: Any) -> None:
        """Load averages again from the state dict, because torch has cast them to the parameters'
        dtypes.
        """
        given, self._loading = self._loading, None
        assert given is not None
        self._forget()
        ids = [number for group in given["param_groups"] for number in group["params"]]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for number, param in zip(ids, params, strict=True):
            saved = given["state"].get(number, {}).get(AVERAGE)
            if saved is not None:
                optimizer.state[param][AVERAGE] = _copy(saved, like=param)
            elif param in optimizer.state:  # made by a step whose only purpose is to create states
                optimizer.state[param].pop(AVERAGE, None)

    def take_spans(self, param: Tensor, parts: Sequence[Tensor | None]) -> None:
        """Set the average of a parameter of a ``BlockOptimizer`` from a checkpoint. ``parts``: this
        rank's elements of the average of each whole parameter in ``param``; None where the
        checkpoint has no average. Local.
        """
        value = local_of(param)
        made = torch.zeros(value.numel(), dtype=wide(param.dtype), device=value.device)
        spans = self.optimizer._place(param).every  # type: ignore[attr-defined]
        for span, part in zip(spans, parts, strict=True):
            if part is not None:
                made[span.at : span.at + span.count].copy_(part)
        self.optimizer.state[param][AVERAGE] = _copy(made.view(value.shape), like=param)


def average_of(optimizer: Any) -> Average | None:
    """The average of an optimizer's parameters, if there is one. Local."""
    found: Average | None = getattr(optimizer, "_fsdpc_average", None)
    return found


def _check_decay(decay: Decay | None) -> None:
    if decay is not None and not callable(decay) and not 0.0 <= decay <= 1.0:
        raise ValueError(f"Invalid decay value: {decay}")


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _copy(value: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a float32 or float64 copy of ``value`` on the device of ``like`` (None: of ``value``).
    The copy is a DTensor if ``like`` is a DTensor.
    """
    like = value if like is None else like
    own, target = local_of(value.detach()), local_of(like)
    made = own.to(target.device, wide(like.dtype), copy=True).contiguous()
    return around(made, like._spec) if isinstance(like, DTensor) else made


def _versions(param: Tensor) -> list[int]:
    """Counts of writes to a parameter, and to its local tensor."""
    return [param._version, local_of(param)._version]


def _swap(one: Tensor, other: Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def _lerp(
    averages: list[Tensor], values: list[Tensor], weight: float, skipped: Tensor | None
) -> None:
    """Update the averages. ``skipped``: None, or a tensor on a GPU that is 1 if the step was
    skipped. The averages of a skipped step do not change.
    """
    if skipped is None:
        foreach_lerp(averages, values, weight)
        return
    for average, value in zip(averages, values, strict=True):
        moved = weight * (1.0 - skipped.to(average.device, average.dtype))
        average.lerp_(value, moved.reshape(()))
