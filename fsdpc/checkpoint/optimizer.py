"""An optimizer's state as entries named ``state.<parameter>.<key>``, and its structure in JSON.

``cut``: a tensor of the parameter's shape on each rank, one element per element of the parameter.
``whole``: any other tensor (Adam's 0-dim ``step``), equal on all ranks that hold elements of the
parameter. ``value``: a number or text, in JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from fsdpc import _C
from fsdpc.checkpoint.entries import Entry, flat, whole_span
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.model import Model, Seen
from fsdpc.checkpoint.ranks import Ranks

_MOST_SHOWN = 3


@dataclass
class State:
    """What a checkpoint holds of an optimizer. ``kinds``: parameter -> key -> ``"cut"``,
    ``"whole"`` or ``["value", v]``; ``groups``: with names for parameters.
    """

    entries: list[Entry] = field(default_factory=list)
    kinds: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


def state_name(parameter: str, key: str) -> str:
    """The name of a state tensor, which torch's flattened optimizer state dicts have too."""
    return f"state.{parameter}.{key}"


def held_params(optimizer: torch.optim.Optimizer, model: Model) -> list[list[Seen]]:
    """Per group, the optimizer's parameters. ``ValueError``: one is not in the model."""
    seen = {id(entry.param): entry for entry in model.seen}
    groups = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in seen:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not "
                    "in the model: make the optimizer from the parameters of the wrapped model"
                )
        groups.append([seen[id(param)] for param in group["params"]])
    return groups


def names_of(seen: Seen) -> list[str]:
    return [entry.name for entry, _ in seen.covers]


def read_state(optimizer: torch.optim.Optimizer, model: Model, ranks: Ranks) -> State:
    """The optimizer's state. Collective over ``ranks``; errors are this rank's or all ranks'.

    ``CheckpointError``: ranks differ in what state a parameter has, or a tensor that is not cut
    differs between ranks.
    """
    groups = held_params(optimizer, model)
    with ranks.step("reading the optimizer's state") as step:
        held = [seen for group in groups for seen in group]
        mine = {id(seen.param): _tensors(optimizer, seen) for seen in held}
        numbers = _numbers(held, mine)
        step.value = [_outline(seen, mine[id(seen.param)], numbers) for seen in held]
    found = State()
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        found.groups.append({**options, "params": [n for seen in members for n in names_of(seen)]})
    merged = [_merge(seen, [told[i] for told in step.values]) for i, seen in enumerate(held)]
    order = {entry.name: place for place, entry in enumerate(model.entries)}
    rows: list[tuple[str, int, Entry]] = []
    for seen, (outline, first) in zip(held, merged, strict=True):
        for key, (kind, *rest) in outline.items():
            for name in names_of(seen):
                found.kinds.setdefault(name, {})[key] = (
                    ["value", rest[0]] if kind == "value" else kind
                )
            if kind == "cut":
                for entry in _cut_entries(seen, key, rest[0], mine[id(seen.param)].get(key)):
                    rows.append((key, order[entry[0]], entry[1]))
            elif kind == "whole":
                value = mine[id(seen.param)].get(key)
                for name in names_of(seen):
                    entry = _whole_entry(name, key, rest, value, ranks.rank == first)
                    rows.append((key, order[name], entry))
    found.entries = [entry for _, _, entry in sorted(rows, key=lambda row: row[:2])]
    return found


def _tensors(optimizer: torch.optim.Optimizer, seen: Seen) -> dict[str, Any]:
    state = optimizer.state.get(seen.param, {})
    for key in state:
        if not isinstance(key, str):
            raise TypeError(f"the optimizer state of {names_of(seen)} has a key {key!r}")
    return {key: _local(value) for key, value in state.items()}


def _local(value: Any) -> Any:
    return value.to_local().detach() if isinstance(value, DTensor) else value


def local_shape(param: torch.Tensor) -> tuple[int, ...]:
    return tuple(_local(param).shape)


def _numbers(held: list[Seen], states: dict[int, dict[str, Any]]) -> set[str]:
    """Keys with one number per parameter, found on parameters that have dimensions: the state of a
    0-dim parameter does not show whether it is a number or an element.
    """
    found = {"step"}
    for seen in held:
        if local_shape(seen.param) != ():
            for key, value in states[id(seen.param)].items():
                if isinstance(value, torch.Tensor) and value.dim() == 0:
                    found.add(key)
    return found


def _outline(seen: Seen, state: dict[str, Any], numbers: set[str]) -> Any:
    """What this rank tells the others: its elements, and kind, dtype and form of each value."""
    count = sum(int(spans[:, 2].sum()) for _, spans in seen.covers)
    form: dict[str, list[Any]] = {}
    for key, value in sorted(state.items()):
        if not isinstance(value, torch.Tensor):
            form[key] = ["value", value]
            continue
        is_cut = tuple(value.shape) == local_shape(seen.param)
        if is_cut and (value.dim() > 0 or key not in numbers):
            form[key] = ["cut", value.dtype]
        else:
            raw = flat(value).view(torch.uint8).cpu().numpy()
            form[key] = ["whole", value.dtype, tuple(value.shape), _C.ckpt_crc32c(raw)]
    return [count, form]


def _merge(seen: Seen, told: list[Any]) -> tuple[dict[str, list[Any]], int]:
    """The parameter's outline, and the first rank that has it. ``CheckpointError``: they differ."""
    ranks = [rank for rank, (count, _) in enumerate(told) if count > 0] or [0]
    first = ranks[0]
    outline = told[first][1]
    for rank in ranks[1:]:
        other = told[rank][1]
        if other == outline:
            continue
        names = names_of(seen)
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


def _cut_entries(
    seen: Seen, key: str, dtype: torch.dtype, value: Any
) -> Iterable[tuple[str, Entry]]:
    memory = (
        flat(value)
        if isinstance(value, torch.Tensor)
        else torch.empty(0, dtype=dtype, device="cpu")
    )
    for entry, spans in seen.covers:
        own = spans if len(memory) else spans[:0]
        name = state_name(entry.name, key)
        made = Entry(name, entry.shape, dtype, memory, own, entry.replica, entry.first_writes)
        yield entry.name, made


def _whole_entry(name: str, key: str, rest: list[Any], value: Any, writes: bool) -> Entry:
    dtype, shape = rest[0], tuple(rest[1])
    entry = Entry(state_name(name, key), shape, dtype, torch.empty(0, dtype=dtype, device="cpu"))
    if writes:
        entry.memory = flat(value)
        entry.spans = whole_span(len(entry.memory))
    return entry


# --- loading -------------------------------------------------------------------------------------


@dataclass
class NewState:
    """Tensors to be filled and then given to the optimizer."""

    everyone: tuple[int, int]
    entries: list[Entry] = field(default_factory=list)
    states: list[tuple[torch.Tensor, dict[str, Any]]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)

    def give(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer's state and its groups' options. Local."""
        optimizer.state.clear()
        for param, state in self.states:
            optimizer.state[param] = state
            increment_version([_local(v) for v in state.values() if isinstance(v, torch.Tensor)])
        for group, options in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(options)


def make_state(
    optimizer: torch.optim.Optimizer,
    model: Model,
    kinds: dict[str, dict[str, Any]],
    saved_groups: list[dict[str, Any]],
    dtypes: dict[str, tuple[torch.dtype, tuple[int, ...]]],
) -> NewState:
    """Tensors for the saved state, of this rank's shapes. Local. ``dtypes``: of the state tensors
    in the checkpoint, with their shapes. ``ValueError``: the state does not fit this optimizer.
    """
    made = NewState(model.everyone)
    groups = held_params(optimizer, model)
    made.groups = _options(optimizer, groups, saved_groups)
    aliases = {entry.name: entry.name for entry in model.entries} | model.aliases
    by_name = {aliases.get(name, name): form for name, form in kinds.items()}
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        on_device = bool(group.get("capturable") or group.get("fused"))
        for seen in members:
            _make_one(made, optimizer, seen, by_name, dtypes, on_device)
    return made


def _make_one(
    made: NewState,
    optimizer: torch.optim.Optimizer,
    seen: Seen,
    kinds: dict[str, dict[str, Any]],
    dtypes: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    on_device: bool,
) -> None:
    forms = {name: kinds[name] for name in names_of(seen) if kinds.get(name)}
    empty = not any(len(spans) for _, spans in seen.covers)
    elsewhere = any(entry.numel for entry, _ in seen.covers) and not isinstance(seen.param, DTensor)
    if not forms or (empty and elsewhere):
        return
    first_name, form = next(iter(forms.items()))
    for name, other in forms.items():
        if other != form:
            raise ValueError(
                f"parameters {first_name!r} and {name!r} share a flat parameter but have "
                f"different state: {form} and {other}. Wrap with use_orig_params=True"
            )
    old = dict.get(optimizer.state, seen.param, {})  # also of states that raise when they are used
    place = getattr(optimizer, "state_memory", lambda param, name: None)  # fsdpc's, on a disk
    state: dict[str, Any] = {}
    for key, kind in form.items():
        if kind == "cut":
            own = old.get(key) if key in old else place(seen.param, key)
            state[key] = _cut_target(made, seen, key, dtypes, own)
        elif kind == "whole":
            state[key] = _whole_target(made, seen, first_name, key, dtypes, on_device)
        else:
            state[key] = kind[1]
    made.states.append((seen.param, state))


def _cut_target(
    made: NewState,
    seen: Seen,
    key: str,
    dtypes: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    old: Any,
) -> torch.Tensor:
    known = {
        entry.name: dtypes[state_name(entry.name, key)]
        for entry, _ in seen.covers
        if state_name(entry.name, key) in dtypes
    }
    dtype = next(iter(known.values()))[0]
    local = _local(seen.param)
    fits = isinstance(old, torch.Tensor) and _local(old).shape == local.shape
    if fits and _local(old).dtype == dtype and _local(old).is_contiguous():
        target = _local(old).detach()
    else:
        target = torch.zeros(local.shape, dtype=dtype, device=local.device)
    for entry, spans in seen.covers:
        if entry.name not in known:
            continue
        name = state_name(entry.name, key)
        if known[entry.name] != (dtype, tuple(entry.shape)):
            raise ValueError(f"{name} has {known[entry.name]}, expected {(dtype, entry.shape)}")
        made.entries.append(Entry(name, entry.shape, dtype, target.view(-1), spans, entry.replica))
    if isinstance(seen.param, DTensor):
        return DTensor.from_local(
            target,
            seen.param.device_mesh,
            seen.param.placements,
            run_check=False,
            shape=seen.param.shape,
            stride=seen.param.stride(),
        )
    return target


def _whole_target(
    made: NewState,
    seen: Seen,
    name: str,
    key: str,
    dtypes: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    on_device: bool,
) -> torch.Tensor:
    """A flat parameter's common value is read under the first name."""
    dtype, shape = dtypes[state_name(name, key)]
    device = _local(seen.param).device if shape or on_device else torch.device("cpu")
    target = torch.empty(shape, dtype=dtype, device=device)
    spans = whole_span(target.numel())
    full = state_name(name, key)
    made.entries.append(Entry(full, shape, dtype, target.view(-1), spans, made.everyone))
    return target


def _options(
    optimizer: torch.optim.Optimizer, groups: list[list[Seen]], saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Per group of the optimizer, the saved options of its parameters, whatever group they were in.
    ``ValueError``: parameters of one group were saved with different options.
    """
    options = [{k: v for k, v in group.items() if k != "params"} for group in saved]
    owner = {name: place for place, group in enumerate(saved) for name in group["params"]}
    result = []
    for members in groups:
        names = [name for seen in members for name in names_of(seen) if name in owner]
        places = sorted({owner[name] for name in names})
        for place in places[1:]:
            if not _equal(options[place], options[places[0]]):
                one = next(name for name in names if owner[name] == places[0])
                other = next(name for name in names if owner[name] == place)
                raise ValueError(
                    f"parameters {one!r} and {other!r} were saved with different options but share "
                    "a param group of this optimizer"
                )
        result.append(options[places[0]] if places else {})
    return result


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        bool(np.all(np.asarray(one[key] == other[key]))) for key in one
    )
