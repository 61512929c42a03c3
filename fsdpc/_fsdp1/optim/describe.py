"""The plan by which the optimizer state of a unit's parameters is gathered from the ranks.

The plan distinguishes two kinds of values. ``cut``: a tensor of the shard's shape, with one element
per element of the parameter; the full value is assembled from the ranks. ``same``: any other value
(Adam's ``step``, a number, a table), which must be equal on every rank that has elements of the
parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fsdpc._comm.channel import numbers_in
from fsdpc._comm.objects import exchange
from fsdpc._comm.plain import Outline
from fsdpc._fsdp1.optim.book import ShardedParam, UnitEntry
from fsdpc._torch import tree_flatten

ABSENT = "absent"  # the parameter is not in the optimizer
State = dict[str, Any]


@dataclass
class Plan:
    """The plan by which the state of one sharded parameter is gathered. All ranks have the same
    plan. ``holders``: the ranks that have elements of the parameter, or all ranks if the parameter
    is empty.
    """

    holders: list[int]
    cut: dict[str, torch.dtype] = field(default_factory=dict)
    same: dict[str, Any] = field(default_factory=dict)


def plan_states(entry: UnitEntry, states: list[State | str | None]) -> list[Plan | None]:
    """Plan the state of each of the unit's parameters. Collective over the sharding group.

    ``states``: for each parameter, this rank's state, ``None`` if there is no state, or ``ABSENT``
    if the parameter is not in the optimizer. The plan of a parameter without state is ``None``.
    Errors are raised on every rank. ``RuntimeError``: a rank has no state where others have one, or
    has state in another form. ``AssertionError``: ``same`` values differ. ``NotImplementedError``:
    see ``ShardedParam.check_cut``.
    """
    what = f"optimizer state of unit {entry.unit.name}"
    described = exchange(entry.comm, [_describe(state) for state in states], what)
    plans: list[Plan | None] = []
    tables: list[tuple[ShardedParam, Plan, str, Any]] = []
    for j, sharded in enumerate(entry.params):
        plan = _plan(sharded, [outlines[j] for outlines in described])
        plans.append(plan)
        for name in described[plan.holders[0]][j] if plan is not None else ():
            if _sort(
                sharded, name, {rank: described[rank][j][name] for rank in plan.holders}, plan
            ):
                tables.append((sharded, plan, name, _table(states[j], name)))
    if tables:
        everyone = exchange(entry.comm, [table for *_, table in tables], what)
        for (sharded, plan, name, _), *values in zip(tables, *everyone, strict=True):
            first = plan.holders[0]
            for rank in plan.holders:
                if not equal(values[rank], values[first]):
                    raise AssertionError(
                        f"Rank {rank} has different values for {name} than rank {first}, and its "
                        f"shape {tuple(values[first].shape)} is not the shard's: the optimizer "
                        f"state {name!r} of {sharded.text} cannot be assembled from shards"
                        f"{numbers_in(entry.comm)}"
                    )
            plan.same[name] = values[first]
    _check_complete(entry, described[0], plans)
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


def _table(state: State | str | None, name: str) -> torch.Tensor | None:
    """Return a CPU copy of a value that is a tensor; the copy is sent to other ranks. Return None
    for other values.
    """
    value = state.get(name) if isinstance(state, dict) else None
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else None


def _plan(sharded: ShardedParam, outlines: list[Any]) -> Plan | None:
    """Return a plan without values, or None if the parameter has no state. ``outlines``: the
    outline of each rank's state.
    """
    ranks = [rank for rank in range(len(outlines)) if sharded.span(rank).count > 0]
    ranks = ranks or list(range(len(outlines)))
    lacking = [rank for rank in ranks if not isinstance(outlines[rank], dict)]
    if len(lacking) == len(ranks):
        return None
    if lacking:
        text = (
            "FSDP currently requires each rank to have at least the optimizer states needed by "
            "rank 0's optimizer but some ranks are missing some of those states"
        )
        for rank in lacking:
            text += (
                f"\nRank {rank} is missing states for the parameters: {sharded.names} "
                f"(unit {sharded.of.unit.name!r})"
            )
        raise RuntimeError(text + numbers_in(sharded.of.comm))
    first = outlines[ranks[0]]
    for rank in ranks:
        if outlines[rank].keys() != first.keys():
            raise RuntimeError(
                f"the optimizer state of {sharded.text} has {sorted(first)} on rank {ranks[0]} but "
                f"{sorted(outlines[rank])} on rank {rank}: step the same optimizer on every rank "
                f"before saving its state{numbers_in(sharded.of.comm)}"
            )
    return Plan(ranks)


def _sort(sharded: ShardedParam, name: str, outlines: dict[int, Any], plan: Plan) -> bool:
    """Add one value to the plan. ``outlines``: the value's outline on each rank in ``holders``. For
    a tensor that is not cut, return True without adding the tensor, because its elements must be
    compared between the ranks first.
    """
    values, state = list(outlines.values()), f"the optimizer state {name!r} of {sharded.text}"
    if not any(isinstance(value, Outline) for value in values):
        for rank, value in outlines.items():
            if not equal(value, values[0]):
                raise AssertionError(
                    f"Rank {rank} has different values for {name}: {value}. Other ranks: "
                    f"{values[0]} ({sharded.text})"
                )
        plan.same[name] = values[0]
        return False
    if len({value.dtype if isinstance(value, Outline) else None for value in values}) > 1:
        raise RuntimeError(f"{state} differs between ranks in type or dtype")
    given, shapes = [value.shape for value in values], [sharded.shape(rank) for rank in outlines]
    if given == shapes:
        sharded.check_cut(name)
        plan.cut[name] = values[0].dtype
        return False
    if len(set(given)) > 1:
        raise RuntimeError(
            f"{state} has shapes {given} on ranks {list(outlines)}, but their shards of the "
            f"parameter have shapes {shapes}: only state with one element per element of the "
            "parameter can be assembled from shards"
        )
    return True


def _check_complete(entry: UnitEntry, described: list[Any], plans: list[Plan | None]) -> None:
    """Raise ``RuntimeError`` if, with ``use_orig_params``, the optimizer has state but does not
    have all trainable parameters.
    """
    if not entry.unit.use_orig_params or not any(plans):
        return
    pairs = list(zip(entry.params, described, strict=True))
    held = [sharded.names[0] for sharded, state in pairs if state != ABSENT]
    managed = [names[0] for names in entry.names]
    for sharded, state in pairs:
        if state == ABSENT and sharded.param.requires_grad:
            raise RuntimeError(
                f"{sharded.names[0]} is not in the optimizer state. The FSDPParamInfo "
                f"has the param keys {sorted(managed)} while the optimizer has the param keys "
                f"{sorted(held)}. (unit {entry.unit.name!r}: give the optimizer all trainable "
                "parameters, or freeze the others with requires_grad_(False))"
            )


def equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal. Containers are compared recursively, tensors element by
    element.
    """
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
