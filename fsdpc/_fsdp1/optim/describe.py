"""The optimizer state on a unit's ranks, and the plan for each value.

``cut``: a tensor of the shard's shape, one element per element of the parameter; the full value is
assembled from the ranks. ``same``: anything else (Adam's ``step``, a number, a table); it must be
equal on every rank that holds elements of the parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fsdpc._comm.objects import exchange
from fsdpc._comm.plain import Outline
from fsdpc._fsdp1.optim.book import UnitEntry
from fsdpc._torch import tree_flatten

ABSENT = "absent"  # the parameter is not in the optimizer
State = dict[str, Any]


@dataclass
class Plan:
    """How to gather the state of one sharded parameter; equal on all ranks."""

    cut: dict[str, torch.dtype]
    same: dict[str, Any]


def plan_states(entry: UnitEntry, states: list[State | str | None]) -> list[Plan | None]:
    """Plan the state of each of the unit's parts. Collective over the sharding group.

    ``states``: this rank's state per part, ``None`` without state, ``ABSENT`` if the part is not in
    the optimizer. Returns ``None`` for parts without state. Errors are raised on every rank:
    ``RuntimeError``: some rank lacks state, or has it in another form. ``AssertionError``: ``same``
    values differ. ``NotImplementedError``: state of the bytes of integers.
    """
    what = f"optimizer state of unit {entry.unit.name}"
    described = exchange(entry.comm, [_describe(state) for state in states], what)
    plans: list[Plan | None] = []
    whole: list[tuple[int, str]] = []
    for j in range(len(entry.parts)):
        holders = _holders(entry, described, j)
        if not holders:
            plans.append(None)
            continue
        plan = Plan({}, {})
        _check_same_names(entry, described, j, holders)
        for name in described[holders[0]][j]:
            _sort(entry, described, j, name, holders, plan, whole)
        plans.append(plan)
    if whole:
        mine = [_own(states, j, name) for j, name in whole]
        _agree_on_whole(entry, described, exchange(entry.comm, mine, what), whole, plans)
    _check_complete(entry, described, plans)
    return plans


def _describe(state: State | str | None) -> Any:
    if not isinstance(state, dict):
        return state
    return {name: _outline(value) for name, value in sorted(state.items())}


def _outline(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dim() > 0:
            return Outline(tuple(value.shape), value.dtype)
        return value.detach().to("cpu", copy=True)
    return value


def _holders(entry: UnitEntry, described: list[Any], j: int) -> list[int]:
    """Ranks with elements of the part (all ranks for an empty part), if the part has state."""
    part = entry.parts[j]
    ranks = [rank for rank in range(len(described)) if entry.length(part, rank) > 0]
    ranks = ranks or list(range(len(described)))
    having = [rank for rank in ranks if isinstance(described[rank][j], dict)]
    if having and len(having) != len(ranks):
        text = (
            "FSDP currently requires each rank to have at least the optimizer states needed by "
            "rank 0's optimizer but some ranks are missing some of those states"
        )
        for rank in sorted(set(ranks) - set(having)):
            text += (
                f"\nRank {rank} is missing states for the parameters: {entry.first_names(part)} "
                f"(unit {entry.unit.name!r})"
            )
        raise RuntimeError(text)
    return having


def _check_same_names(entry: UnitEntry, described: list[Any], j: int, holders: list[int]) -> None:
    first = described[holders[0]][j]
    for rank in holders:
        if described[rank][j].keys() != first.keys():
            raise RuntimeError(
                f"the optimizer state of {_text(entry, j)} has {sorted(first)} on rank "
                f"{holders[0]} but {sorted(described[rank][j])} on rank {rank}: step the same "
                "optimizer on every rank before saving its state"
            )


def _sort(
    entry: UnitEntry,
    described: list[Any],
    j: int,
    name: str,
    holders: list[int],
    plan: Plan,
    whole: list[tuple[int, str]],
) -> None:
    values = [described[rank][j][name] for rank in holders]
    if not any(isinstance(value, Outline) for value in values):
        for rank, value in zip(holders, values, strict=True):
            if not equal(value, values[0]):
                raise AssertionError(
                    f"Rank {rank} has different values for {name}: {value}. Other ranks: "
                    f"{values[0]} ({_text(entry, j)})"
                )
        plan.same[name] = values[0]
        return
    if len({value.dtype if isinstance(value, Outline) else None for value in values}) > 1:
        raise RuntimeError(f"{_state(entry, j, name)} differs between ranks in type or dtype")
    shapes = [entry.shape(entry.parts[j], rank) for rank in holders]
    if [value.shape for value in values] == shapes:
        entry.check_cut(entry.parts[j], name)
        plan.cut[name] = values[0].dtype
    elif len({value.shape for value in values}) == 1:
        whole.append((j, name))
    else:
        raise RuntimeError(
            f"{_state(entry, j, name)} has shapes {[value.shape for value in values]} on ranks "
            f"{holders}, but their shards of the parameter have shapes {shapes}: only state with "
            "one element per element of the parameter can be assembled from shards"
        )


def _own(states: list[State | str | None], j: int, name: str) -> Any:
    state = states[j]
    value = state.get(name) if isinstance(state, dict) else None
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else None


def _agree_on_whole(
    entry: UnitEntry,
    described: list[Any],
    values: list[list[Any]],
    whole: list[tuple[int, str]],
    plans: list[Plan | None],
) -> None:
    for index, (j, name) in enumerate(whole):
        holders = _holders(entry, described, j)
        first = values[holders[0]][index]
        for rank in holders:
            if not equal(values[rank][index], first):
                raise AssertionError(
                    f"Rank {rank} has different values for {name} than rank {holders[0]}, and its "
                    f"shape {tuple(first.shape)} is not the shard's: {_state(entry, j, name)} "
                    "cannot be assembled from shards"
                )
        plan = plans[j]
        assert plan is not None
        plan.same[name] = first


def _check_complete(entry: UnitEntry, described: list[Any], plans: list[Plan | None]) -> None:
    """With original parameters, the optimizer must hold all or none of a unit's trainable ones."""
    unit = entry.unit
    if not unit.use_orig_params or not any(plans):
        return
    held = [
        entry.names[p.covers[0]][0] for j, p in enumerate(entry.parts) if described[0][j] != ABSENT
    ]
    managed = [names[0] for names in entry.names]
    for j, part in enumerate(entry.parts):
        if described[0][j] == ABSENT and part.param.requires_grad:
            raise RuntimeError(
                f"{entry.first_names(part)[0]} is not in the optimizer state. The FSDPParamInfo "
                f"has the param keys {sorted(managed)} while the optimizer has the param keys "
                f"{sorted(held)}. (unit {unit.name!r}: give the optimizer all trainable "
                "parameters, or freeze the others with requires_grad_(False))"
            )


def equal(one: Any, other: Any) -> bool:
    """Equality that recurses into containers and compares tensors element by element."""
    ours, shape = tree_flatten(one)
    theirs, other_shape = tree_flatten(other)
    if shape != other_shape:
        return False
    return all(map(_leaf_equal, ours, theirs))


def _leaf_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same_form = one.shape == other.shape and one.dtype == other.dtype
        return same_form and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _text(entry: UnitEntry, j: int) -> str:
    names = entry.first_names(entry.parts[j])
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{shown} of unit {entry.unit.name!r}"


def _state(entry: UnitEntry, j: int, name: str) -> str:
    return f"the optimizer state {name!r} of {_text(entry, j)}"
