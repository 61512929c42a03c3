"""The state of an optimizer in a checkpoint: tensors named ``state.<parameter>.<key>``, and a
description in JSON of the state's structure.

Each value of a state has one of four kinds. ``cut``: a tensor that has the local shape of the
parameter on each rank, with one element per element of the parameter. ``whole``: any other tensor
(Adam's 0-dim ``step``), equal on all ranks that have elements of the parameter. ``value``: a number
or text, in JSON. ``blocks``: a tensor with one element per block of a fixed number of consecutive
elements of the whole parameter (the scales and means of ``fsdpc.optim``). The rank that has the
first element of a block writes the block's value, and every rank that has elements of the block
reads the value. A value of which one rank keeps all elements (``Held``) is ``cut`` if it has the
parameter's shape, else ``whole``.

An optimizer with ``span_states`` (see ``fsdpc.optim._spanned``) has a separate state for each
parameter of the unsharded model, even if one flat parameter covers several of these parameters.
"""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from fsdpc import _C
from fsdpc._companions.spans import NO_SPANS, begun, count_of, moved_to, touched, whole_span
from fsdpc._engine.device import CPU
from fsdpc._engine.interop import around
from fsdpc._spans.span import Span
from fsdpc._states.groups import group_of, owners_of, plain_options
from fsdpc._states.keys import is_cut, numbers_of, shape_of
from fsdpc.checkpoint.entries import Entry, OptimParam, flat
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.model import Model
from fsdpc.checkpoint.ranks import Ranks
from fsdpc.checkpoint.values import to_json
from fsdpc.optim._chunks import AVERAGE
from fsdpc.optim._spanned import Blocks, Held
from fsdpc.optim.average import average_of, wide

_MOST_SHOWN = 3
IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable", "maximize", "initial_lr"}
IMPLEMENTATION |= {"param_names", "params", "decoupled_weight_decay", "name"}


@dataclass
class State:
    """What a checkpoint saves of an optimizer. ``kinds[parameter][key]`` is the kind of one value
    of a parameter's state: ``"cut"``, ``"whole"``, ``["value", v]`` or ``["blocks", elements]``.
    ``entries`` are the tensors of the states. ``groups`` are the ``param_groups`` with names in
    place of parameters.
    """

    entries: list[Entry] = field(default_factory=list)
    kinds: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)

    @functools.cached_property
    def kinds_text(self) -> str:
        """Return ``kinds`` in JSON. The text is cached, so ``kinds`` must not change afterwards."""
        return json.dumps(to_json(self.kinds, "the optimizer's state"))


@dataclass
class StateRow:
    """The state of one parameter, or of all parameters that a flat parameter covers. ``covers`` has
    these parameters, each with the spans of its elements on this rank. ``shape`` is the shape of a
    value that has one element for each of these elements.
    """

    covers: list[tuple[Entry, np.ndarray]]
    shape: tuple[int, ...]
    state: dict[str, Any]
    check_cut: Callable[[str], None] | None = None

    @property
    def names(self) -> list[str]:
        return [entry.name for entry, _ in self.covers]

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Return the shapes of the state's values, ``None`` for a value that is not a tensor."""
        return {key: shape_of(value) for key, value in self.state.items()}


def check_objects(optimizer: Any, scheduler: Any, method: str) -> Any:
    """Return the optimizer without a framework's wrapper around it, such as accelerate's. An object
    is such a wrapper if its ``state`` is the same object as the optimizer's ``state``.

    Raises ``TypeError`` if ``optimizer`` is not a single optimizer, or if the scheduler does not
    have the method ``method``. Raises ``RuntimeError`` inside ``Average.applied()``, where the
    parameters have averaged values.
    """
    wrapped = getattr(optimizer, "optimizer", None)
    shown = getattr(optimizer, "state", None)
    if isinstance(wrapped, torch.optim.Optimizer) and wrapped.state is shown:
        optimizer = wrapped
    name = type(optimizer).__name__
    inner = getattr(optimizer, "optimizers", None)
    several = "save each in a folder of its own, or put the parameters into groups of one optimizer"
    if optimizer is not None and not (
        hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")
    ):
        raise TypeError(f"optimizer must be one torch.optim.Optimizer, not a {name}: {several}")
    if isinstance(inner, list | tuple) and inner and not optimizer.state:
        raise TypeError(f"optimizer is a {name} of {len(inner)} optimizers: {several}")
    if scheduler is not None and not hasattr(scheduler, method):
        raise TypeError(
            f"scheduler must have {method}(), and {type(scheduler).__name__} has not: pass one "
            "scheduler, and the states of others in extra="
        )
    average = average_of(optimizer)
    if average is not None:
        average.refuse_shown("saving or loading the optimizer")
    return optimizer


def state_name(parameter: str, key: str) -> str:
    """Return the name of a state tensor, as in torch's flattened optimizer state dicts."""
    return f"state.{parameter}.{key}"


def params_of(optimizer: torch.optim.Optimizer, model: Model) -> list[list[OptimParam]]:
    """Return the optimizer's parameters by group. Raises ``ValueError`` if a parameter is not in
    the model.
    """
    known = {id(each.param): each for each in model.params}
    groups = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in known:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not "
                    "in the model: make the optimizer from the parameters of the wrapped model"
                )
        groups.append([known[id(param)] for param in group["params"]])
    return groups


def read_state(optimizer: torch.optim.Optimizer, model: Model, ranks: Ranks) -> State:
    """Return the optimizer's state. Collective over ``ranks``.

    Raises ``CheckpointError`` on all ranks if the states of a parameter have different keys or
    kinds on different ranks, or if a tensor that is not cut differs between ranks. Raises
    ``ValueError`` on this rank, before any communication, if a parameter is not in the model.
    """
    groups = params_of(optimizer, model)
    with ranks.step("reading the optimizer's state") as step:
        states = [row for group in groups for member in group for row in _rows(optimizer, member)]
        numbers = numbers_of((each.shape, each.shapes) for each in states)
        step.value = _packed([_outline(each, numbers) for each in states])
    found = State()
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        names = [name for member in members for name in member.names]
        found.groups.append({**plain_options(group), "params": names})
    everyone = [_unpacked(received) for received in step.values]
    for rank, received in enumerate(everyone):
        if len(received) != len(everyone[0]):
            raise CheckpointError(
                f"the optimizer has {len(everyone[0])} parameters on rank 0 but {len(received)} on "
                f"rank {rank}"
            )
    alike: dict[tuple[int, int], bool] = {}
    merged = [_merge(*row, alike) for row in zip(states, zip(*everyone, strict=True), strict=True)]
    order = {entry.name: place for place, entry in enumerate(model.entries)}
    rows: list[tuple[str, int, Entry]] = []
    for each, (outline, first) in zip(states, merged, strict=True):
        for entry, _ in each.covers if outline else ():
            kinds = found.kinds.setdefault(entry.name, {})
            for key, (kind, *rest) in outline.items():
                kinds[key] = _kind(kind, rest, entry)
        for key, (kind, *rest) in outline.items():
            value = each.state.get(key)
            for entry, spans in each.covers if kind != "value" else ():
                if kind == "cut":
                    made = _cut_entry((entry, spans), key, rest[0], _memory(value, rest[0]))
                elif kind == "blocks":
                    values = value.values if isinstance(value, Blocks) else None
                    made = _block_entry((entry, spans), key, *rest, _memory(values, rest[0]))
                elif kind == "held":
                    values = value.values if isinstance(value, Held) else None
                    made = _held_entry(entry, key, *rest, _memory(values, rest[0]))
                else:
                    memory = _memory(value if ranks.rank == first else None, rest[0])
                    spans, name = whole_span(memory.numel()), state_name(entry.name, key)
                    made = Entry(name, tuple(rest[1]), rest[0], memory, spans)
                rows.append((key, order[entry.name], made))
    found.entries = [entry for _, _, entry in sorted(rows, key=lambda row: row[:2])]
    return found


def _kind(kind: str, rest: list[Any], entry: Entry) -> Any:
    """Return the kind of a state in the form that is saved in JSON."""
    if kind == "held":
        return "cut" if tuple(rest[1]) == tuple(entry.shape) else "whole"
    if kind == "value":
        return ["value", *rest]
    return ["blocks", *rest[1:]] if kind == "blocks" else kind


def _rows(optimizer: torch.optim.Optimizer, member: OptimParam) -> list[StateRow]:
    if not hasattr(optimizer, "span_states"):
        state = _tensors(optimizer, member)
        return [StateRow(member.covers, tuple(_local(member.param).shape), state, member.check_cut)]
    states = optimizer.span_states(member.param)
    return [
        StateRow([(entry, moved_to(spans, 0))], (int(spans[:, 2].sum()),), state)
        for (entry, spans), state in zip(member.covers, states, strict=True)
    ]


def _tensors(optimizer: torch.optim.Optimizer, member: OptimParam) -> dict[str, Any]:
    state = optimizer.state.get(member.param, {})
    for key in state:
        if not isinstance(key, str):
            raise TypeError(
                f"the optimizer state of {member.names} has the key {key!r} of type "
                f"{type(key).__name__}: a checkpoint holds states under keys of type str"
            )
    return {key: _local(value) for key, value in state.items()}


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _outline(each: StateRow, numbers: set[str]) -> tuple[int, dict[str, list[Any]]]:
    """Return how many elements of the row's parameters this rank has, and a list for each value of
    their state: the kind, and what must be equal on all ranks (such as the dtype).
    """
    count = sum(count_of(spans) for _, spans in each.covers)
    form: dict[str, list[Any]] = {}
    for key, value in sorted(each.state.items()):
        if isinstance(value, Blocks):
            form[key] = ["blocks", value.values.dtype, value.length]
            continue
        if isinstance(value, Held):
            form[key] = ["held", value.dtype, value.shape]
            continue
        if not isinstance(value, Tensor):
            form[key] = ["value", value]
            continue
        shape = each.shapes[key]
        if is_cut(key, shape, each.shape, numbers):
            if each.check_cut is not None:
                each.check_cut(key)
            form[key] = ["cut", value.dtype]
        else:
            form[key] = ["whole", value.dtype, shape, _C.ckpt_crc32c(_raw(value))]
    return count, form


def _raw(value: Tensor) -> bytes | np.ndarray:
    if value.numel() == 1 and value.device.type == "cpu":  # such as `step`: faster than a view
        return ctypes.string_at(value.data_ptr(), value.dtype.itemsize)
    return flat(value).view(torch.uint8).cpu().numpy()


def _packed(outlines: list[tuple[int, dict[str, list[Any]]]]) -> dict[str, Any]:
    """Return the outlines in the form in which this rank sends them to the other ranks. Each
    distinct description of a state (``form``) is sent only once, because most parameters have equal
    ones.
    """
    forms: list[dict[str, list[Any]]] = []
    known: dict[Any, int] = {}
    which = np.empty(len(outlines), dtype=np.int64)
    for i, (_, form) in enumerate(outlines):
        own = any(row[0] == "value" for row in form.values())  # dict keys 1, 1.0 and True are equal
        parts = i if own else tuple((key, *row) for key, row in form.items())
        number = known.setdefault(parts, len(forms))
        if number == len(forms):
            forms.append(form)
        which[i] = number
    counts = np.array([count for count, _ in outlines], dtype=np.int64)
    return {"forms": forms, "which": which, "counts": counts}


def _unpacked(received: dict[str, Any]) -> list[tuple[int, dict[str, list[Any]]]]:
    pairs = zip(received["counts"].tolist(), received["which"].tolist(), strict=True)
    return [(count, received["forms"][number]) for count, number in pairs]


def _merge(
    each: StateRow, received: Sequence[Any], alike: dict[tuple[int, int], bool]
) -> tuple[dict[str, list[Any]], int]:
    """Return the description of a state from the first rank that has elements of the parameters,
    and the number of this rank. ``alike`` is a cache: for the ids of two descriptions, it says
    whether the descriptions are equal. Raises ``CheckpointError`` if the ranks' outlines differ.
    """
    ranks = [rank for rank, (count, _) in enumerate(received) if count > 0] or [0]
    first = ranks[0]
    outline = received[first][1]
    for rank in ranks[1:]:
        other = received[rank][1]
        pair = id(outline), id(other)
        if pair not in alike:
            alike[pair] = other == outline
        if alike[pair]:
            continue
        names = each.names
        shown = ", ".join(names[:_MOST_SHOWN]) + (", ..." if len(names) > _MOST_SHOWN else "")
        if sorted(other) != sorted(outline):
            detail = f"{sorted(outline)} on rank {first} but {sorted(other)} on rank {rank}"
        else:
            key = next(key for key in outline if outline[key] != other[key])
            detail = (
                f"{key!r} as {outline[key]} on rank {first} but {other[key]} on rank {rank}; a "
                "tensor must have one element per element of the shard, or be equal on all ranks"
            )
        raise CheckpointError(f"the optimizer state of {shown} differs between ranks: {detail}")
    return outline, first


def _cut_entry(
    covered: tuple[Entry, np.ndarray], key: str, dtype: torch.dtype, memory: Tensor
) -> Entry:
    entry, spans = covered
    spans = spans if memory.numel() else NO_SPANS
    name = state_name(entry.name, key)
    return Entry(name, entry.shape, dtype, memory, spans, entry.replica, entry.first_writes)


def _block_entry(
    covered: tuple[Entry, np.ndarray], key: str, dtype: torch.dtype, length: int, memory: Tensor
) -> Entry:
    entry, spans = covered
    here, before = begun(spans if memory.numel() else NO_SPANS, length)
    name, shape = state_name(entry.name, key), (-(-entry.numel // length),)
    return Entry(
        name, shape, dtype, memory, here, entry.replica, entry.first_writes, borrowed=before
    )


def _held_entry(
    entry: Entry, key: str, dtype: torch.dtype, shape: tuple[int, ...], memory: Tensor
) -> Entry:
    """Return the entry of a state that one rank keeps whole. ``memory`` is the whole tensor on that
    rank, and empty on the other ranks.
    """
    name, spans = state_name(entry.name, key), whole_span(memory.numel())
    return Entry(name, shape, dtype, memory, spans, entry.replica, entry.first_writes)


def _memory(value: Any, dtype: torch.dtype) -> Tensor:
    """Return the value as a 1-D tensor, which is empty if this rank has no value."""
    return flat(value) if isinstance(value, Tensor) else _nothing(dtype)


@functools.cache
def _nothing(dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device="cpu")


# --- loading -------------------------------------------------------------------------------------


@dataclass
class NewState:
    """The new state of an optimizer: tensors that a load fills and then gives to the optimizer."""

    everyone: tuple[int, int]
    groups: list[dict[str, Any]]
    entries: list[Entry] = field(default_factory=list)
    states: list[tuple[Tensor, dict[str, Any]]] = field(default_factory=list)
    by_span: list[tuple[Tensor, list[dict[str, Any]]]] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)  # the parameters that keep their old states

    def give(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer's state and its groups' options. Local."""
        staying = {p: optimizer.state[p] for p in self.kept if p in optimizer.state}
        optimizer.state.clear()
        if staying:
            optimizer.state.update(staying)
        for param, state in self.states:
            optimizer.state[param] = state
            increment_version([_local(v) for v in state.values() if isinstance(v, Tensor)])
        if hasattr(optimizer, "settle_states"):  # an optimizer of fsdpc
            optimizer.settle_states([param for param, _ in self.states])
        for param, states in self.by_span:
            averages = [state.pop(AVERAGE, None) for state in states]
            optimizer.take_span_states(param, states)  # type: ignore[attr-defined]
            if any(each is not None for each in averages):
                average_of(optimizer).take_spans(param, averages)
        for group, options in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(options)


# The dtype and shape of each state tensor in the checkpoint, by the name of the tensor.
Stored = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def make_state(
    optimizer: torch.optim.Optimizer,
    model: Model,
    kinds: dict[str, dict[str, Any]],
    saved_groups: list[dict[str, Any]],
    stored: Stored,
    chosen: set[str],
) -> NewState:
    """Return tensors for the saved state, with the local shapes of this rank. Local. ``chosen`` has
    names of parameters; all other parameters, and parameters that are not in the saved groups, keep
    their states. Raises ``ValueError`` if the state does not fit this optimizer.
    """
    getattr(optimizer, "finish_states", lambda: None)()  # fsdpc's optimizers may still copy states
    groups = params_of(optimizer, model)
    saved = kinds.keys() | {name for group in saved_groups for name in group["params"]}
    aliases = {entry.name: entry.name for entry in model.entries} | model.aliases
    by_name = {aliases.get(name, name): form for name, form in kinds.items()}
    made = NewState(model.everyone, options_of(groups, saved_groups, chosen))
    maker = _Maker(optimizer, by_name, stored, made)
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        on_device = bool(group.get("capturable") or group.get("fused"))
        maker.on_device = on_device or hasattr(optimizer, "state_memory")  # fsdpc's optimizers
        for member in members:
            some = [name for name in member.names if name in chosen]
            if member.covers and (not some or not any(name in saved for name in some)):
                made.kept.append(member.param)
                continue
            if len(some) < len(member.covers):
                other = next(name for name in member.names if name not in chosen)
                raise ValueError(
                    f"only= has {some[0]!r} and not {other!r}, which share a flat parameter and "
                    "its state: wrap with use_orig_params=True, or load without optimizer="
                )
            (maker.by_span if hasattr(optimizer, "span_states") else maker.by_param)(member)
    return made


@dataclass
class _Maker:
    """Makes the tensors of a ``NewState``, one parameter at a time. If ``on_device`` is true,
    numbers (``step``) are tensors on the device of their parameter.
    """

    optimizer: Any
    kinds: dict[str, dict[str, Any]]
    stored: Stored
    made: NewState
    on_device: bool = False

    def by_param(self, member: OptimParam) -> None:
        """Make one dict with the new state of an optimizer's parameter."""
        forms = {name: self.kinds[name] for name in member.names if self.kinds.get(name)}
        empty = not any(len(spans) for _, spans in member.covers)
        elsewhere = any(entry.numel for entry, _ in member.covers)
        if not forms or (empty and elsewhere and not isinstance(member.param, DTensor)):
            return
        first_name, form = next(iter(forms.items()))
        for name, other in forms.items():
            if other != form:
                raise ValueError(
                    f"parameters {first_name!r} and {name!r} share a flat parameter but have "
                    f"different state: {form} and {other}. Wrap with use_orig_params=True"
                )
        state: dict[str, Any] = {}
        for key, kind in form.items():
            if kind == "cut":
                state[key] = self._cut(member, key)
            elif kind == "whole":
                state[key] = self._whole(member, first_name, key, self.on_device)
            elif kind[0] == "blocks":
                raise ValueError(
                    f"{state_name(first_name, key)} has one value per {kind[1]} elements of "
                    f"{first_name!r}, which {type(self.optimizer).__name__} has not: load into an "
                    "optimizer of the class that was saved"
                )
            else:
                state[key] = self._number(member, key, kind[1])
        self.made.states.append((member.param, state))

    def by_span(self, member: OptimParam) -> None:
        """Make one dict with the new state for each parameter that ``member`` covers. Such dicts
        are for an optimizer with ``span_states``.
        """
        states: list[dict[str, Any]] = []
        wanted = self.optimizer.span_forms(member.param)
        counts = getattr(self.optimizer, "spans_counted", lambda _: [True] * len(wanted))
        counted = counts(member.param)
        device = self.optimizer.states_device(member.param)
        owned = self.optimizer.span_owned(member.param)
        # Any rank may own the whole state of a DTensor. So every rank makes the state ``step`` of a
        # DTensor, even a rank that has no elements of the DTensor.
        whole = isinstance(member.param, DTensor) and self.optimizer.keeps_whole_states
        every = zip(member.covers, wanted, counted, owned, strict=True)
        for (entry, spans), forms, has_step, here in every:
            kind = self.kinds.get(entry.name, {})
            states.append({})
            if AVERAGE in kind and average_of(self.optimizer) is not None:
                forms = {**forms, AVERAGE: (wide(member.param.dtype), 1)}
            if kind:
                _check_forms(self.optimizer, entry, kind, forms, has_step, self.stored)
            if not kind or not (len(spans) or here or whole):
                continue
            for key, (dtype, length) in forms.items():
                if isinstance(length, tuple):
                    if key in here:
                        memory = torch.zeros(length, dtype=dtype, device=device)
                        made = _held_entry(entry, key, dtype, length, memory.view(-1))
                        self.made.entries.append(made)
                        states[-1][key] = memory
                    continue
                if not len(spans):
                    continue
                count = len(touched(Span(*spans[0].tolist()), length))
                memory = states[-1][key] = torch.zeros(count, dtype=dtype, device=device)
                made = _block_entry((entry, spans), key, dtype, length, memory)
                made.shape = self.stored[made.name][1]
                self.made.entries.append(made)
            if has_step and (len(spans) or whole):
                states[-1]["step"] = self._whole(member, entry.name, "step", True)
        if any(states):
            self.made.by_span.append((member.param, states))

    def _cut(self, member: OptimParam, key: str) -> Tensor:
        if member.check_cut is not None:
            member.check_cut(key)
        covers = [c for c in member.covers if state_name(c[0].name, key) in self.stored]
        dtype, local = self.stored[state_name(covers[0][0].name, key)][0], _local(member.param)
        old = _local(self._old(member.param, key))
        fits = isinstance(old, Tensor) and (old.shape, old.dtype) == (local.shape, dtype)
        if fits and old.is_contiguous():
            target = old.detach()
        else:
            target = torch.zeros(local.shape, dtype=dtype, device=local.device)
        for covered in covers:
            made = _cut_entry(covered, key, dtype, target.view(-1))
            has, expected = self.stored[made.name], (dtype, tuple(made.shape))
            if has != expected:
                raise ValueError(
                    f"{made.name} has dtype {has[0]} and shape {has[1]} in the checkpoint, but "
                    f"must have dtype {expected[0]} and shape {expected[1]} in this optimizer"
                )
            self.made.entries.append(made)
        return around(target, member.param._spec) if isinstance(member.param, DTensor) else target

    def _old(self, param: Tensor, key: str) -> Any:
        """Return the current state ``key`` of a parameter, even if an optimizer of fsdpc has
        offloaded the state.
        """
        held = dict.get(self.optimizer.state, param, {})  # get() of GuardedState may raise
        if key in held or not hasattr(self.optimizer, "state_memory"):
            return held.get(key)
        return self.optimizer.state_memory(param, key)

    def _whole(self, member: OptimParam, name: str, key: str, on_device: bool) -> Tensor:
        """Make the tensor of a state that is not cut. ``name`` is the parameter's name in the
        checkpoint. For a flat parameter, it is the name of a parameter that the flat parameter
        covers.
        """
        full = state_name(name, key)
        dtype, shape = self.stored[full]
        device = _local(member.param).device if shape or on_device else CPU
        target = torch.empty(shape, dtype=dtype, device=device)
        spans, everyone = whole_span(target.numel()), self.made.everyone
        self.made.entries.append(Entry(full, shape, dtype, target.view(-1), spans, everyone))
        return target

    def _number(self, member: OptimParam, key: str, value: Any) -> Any:
        """Return a saved number. A ``step`` becomes a tensor if the optimizer accepts states of
        older versions of torch: ``load_state_dict`` of such an optimizer makes ``step`` a tensor,
        too.
        """
        takes_old = type(self.optimizer).__setstate__ is not torch.optim.Optimizer.__setstate__
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key != "step" or not (takes_old and is_number):
            return value
        device = _local(member.param).device if self.on_device else CPU
        return torch.tensor(float(value), dtype=torch.float32, device=device)


def _check_forms(
    optimizer: Any,
    entry: Entry,
    kind: dict[str, Any],
    forms: dict[str, tuple[torch.dtype, Any]],
    has_step: bool,
    stored: Stored,
) -> None:
    """Raise ``ValueError`` if the states that the checkpoint has of a parameter are not those that
    the optimizer uses.
    """
    found = {}
    for key, each in kind.items():
        if each == "cut" or each[0] == "blocks":
            length = 1 if each == "cut" else each[1]
            dtype, shape = stored[state_name(entry.name, key)]
            found[key] = (dtype, length)
            expected = entry.shape if each == "cut" else (-(-entry.numel // length),)
            if tuple(shape) != tuple(expected):
                raise ValueError(f"{state_name(entry.name, key)} has shape {shape}, not {expected}")
        elif each == "whole" and key != "step":
            dtype, shape = stored[state_name(entry.name, key)]
            found[key] = (dtype, tuple(shape))
    wanted = {
        key: (dtype, 1 if length == tuple(entry.shape) else length)
        for key, (dtype, length) in forms.items()
    }
    if found != wanted or kind.get("step") != ("whole" if has_step else None):
        raise ValueError(
            f"the state of {entry.name!r} is {_shown(found)} in the checkpoint, "
            f"but {_shown(wanted)} in {type(optimizer).__name__}: load into an optimizer of the "
            "class and options that were saved; its state_dict() loads into this one"
        )


def _shown(forms: dict[str, tuple[torch.dtype, Any]]) -> str:
    def of(length: Any) -> str:
        if isinstance(length, tuple):
            return f" of shape {length}"
        return f" per {length} elements" if length > 1 else ""

    parts = [f"{key} {dtype}{of(length)}" for key, (dtype, length) in sorted(forms.items())]
    return ", ".join(parts) or "nothing"


def options_of(
    groups: list[list[OptimParam]], saved: list[dict[str, Any]], chosen: set[str]
) -> list[dict[str, Any]]:
    """Return for each group of the optimizer the saved options of its parameters, even if the
    parameters were in other groups when they were saved. A group with parameters that are not
    ``chosen`` gets no options. Raises ``ValueError`` if parameters of a group were saved with
    different options.
    """
    owner = owners_of(saved)
    result = []
    for members in groups:
        held = [name for member in members for name in member.names]
        found = group_of(saved, owner, held) if chosen.issuperset(held) else None
        result.append(plain_options(found or {}))
    return result


def check_options(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    """Raise ``ValueError`` if the saved groups are of another kind of optimizer. The sign of this
    is that the saved groups and the present groups each have options that the others lack. Options
    that choose an implementation (``foreach``) do not count.
    """
    theirs = {key for group in saved for key in group} - IMPLEMENTATION
    ours = {key for group in optimizer.param_groups for key in group} - IMPLEMENTATION
    if saved and theirs - ours and ours - theirs:
        raise ValueError(
            f"the checkpoint is of another optimizer than {type(optimizer).__name__}: its options "
            f"have {', '.join(sorted(theirs - ours))}, and not {', '.join(sorted(ours - theirs))} "
            "(strict=False loads the state all the same)"
        )
