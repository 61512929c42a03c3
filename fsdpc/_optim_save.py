"""From the optimizer of a sharded model to the state dict of the unsharded model's.

Units are treated one after another and, within a unit, one state of one dtype segment at a time, so
that a rank that keeps nothing holds no more than that.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fsdpc import _sharded
from fsdpc._optim_book import Book, Key, Part, UnitEntry
from fsdpc._optim_describe import ABSENT, Plan, State, plan_states
from fsdpc._state_sharded import mesh_of

Finish = Callable[[UnitEntry, int, torch.Tensor], Any]


def gather_states(
    book: Book,
    held: list[tuple[Key, nn.Parameter]],
    state: dict[Key, Any],
    finish: Finish | None,
) -> dict[str, State]:
    """The state of every parameter of the model, by name. Collective over the units' groups.

    ``finish`` gets a unit's entry, a parameter's position and its whole value, a view that lives
    until it returns, and gives what the dict keeps; ``None``: this rank keeps nothing.
    """
    keys = {id(param): key for key, param in held}
    kept: dict[str, State] = {}
    for entry in book.units:
        _gather_unit(entry, keys, state, finish, kept)
    if finish is not None:
        for name, param in book.plain.items():
            key = keys.get(id(param))
            if key is not None and key in state:
                kept[name] = {n: _copied(value) for n, value in state[key].items()}
    return kept


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _gather_unit(
    entry: UnitEntry,
    keys: dict[int, Key],
    state: dict[Key, Any],
    finish: Finish | None,
    kept: dict[str, State],
) -> None:
    states: list[Any] = [
        state.get(keys[id(part.param)]) if id(part.param) in keys else ABSENT
        for part in entry.parts
    ]
    plans = plan_states(entry, states)
    _keep_same(entry, plans, finish, kept)
    for name, dtype, members in _cut_runs(entry, plans):
        whole = _gather_run(entry, name, dtype, members, states)
        if finish is None:
            continue
        for j in members:
            for i in entry.parts[j].covers:
                place = entry.layout["params"][i]
                flat = whole[place["offset"] : place["offset"] + place["numel"]]
                value = finish(entry, i, flat.view(entry.unit.shapes[i]))
                kept[entry.names[i][0]][name] = value


def _keep_same(
    entry: UnitEntry, plans: list[Plan | None], finish: Finish | None, kept: dict[str, State]
) -> None:
    if finish is None:
        return
    for part, plan in zip(entry.parts, plans, strict=True):
        if plan is not None:
            for name in entry.first_names(part):
                kept[name] = {n: _copied(value) for n, value in plan.same.items()}


def _cut_runs(
    entry: UnitEntry, plans: list[Plan | None]
) -> Iterator[tuple[str, torch.dtype, list[int]]]:
    """Parts whose state of one name and dtype lies in one segment: they travel together."""
    runs: dict[tuple[int, str, str], list[int]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for j, plan in enumerate(plans):
        for name, dtype in plan.cut.items() if plan is not None else ():
            dtypes[str(dtype)] = dtype
            run = (entry.segment_index(entry.parts[j]), name, str(dtype))
            runs.setdefault(run, []).append(j)
    for run in sorted(runs):
        yield run[1], dtypes[run[2]], runs[run]


def _gather_run(
    entry: UnitEntry, name: str, dtype: torch.dtype, members: list[int], states: list[Any]
) -> torch.Tensor:
    """The segment's whole state. Collective."""
    first = entry.parts[members[0]]
    piece = entry.segment(first)["piece_numel"]
    comm = entry.comm
    whole = torch.empty(comm.world * piece, dtype=dtype)
    own = whole[comm.rank * piece : (comm.rank + 1) * piece]
    for j in members:
        begin, length = _place(entry, entry.parts[j])
        if length:
            own[begin : begin + length].copy_(states[j][name].reshape(-1))
    if comm.world > 1:
        what = f"optimizer state {name} of unit {entry.unit.name}"
        comm.all_gather(whole.view(torch.uint8), what=what)
    return whole


def _place(entry: UnitEntry, part: Part) -> tuple[int, int]:
    """Where this rank's elements of a part lie in its piece of the segment, and how many."""
    rank = entry.comm.rank
    if not entry.unit.use_orig_params:
        return 0, entry.length(part, rank)
    return entry.layout["spans"][part.covers[0]][rank][1:]


# --- what is kept ---


def finish_full(offload: bool) -> Finish:
    """Whole values, in memory of their own."""

    def finish(entry: UnitEntry, i: int, value: torch.Tensor) -> torch.Tensor:
        return value.clone() if offload else value.clone().to(entry.member.compute_device)

    return finish


def finish_sharded(use_dtensor: bool, offload: bool) -> Finish:
    """This rank's rows as a ``ShardedTensor``, or as a ``DTensor`` of the unit's mesh."""

    def finish(entry: UnitEntry, i: int, value: torch.Tensor) -> Any:
        unit, shape = entry.unit, tuple(value.shape)
        device = torch.device("cpu") if offload else entry.member.compute_device
        if not unit.is_sharded or not _sharded.is_cut(shape):
            return value.clone().to(device)
        pg = unit.groups.shard_pg
        start, stop = _sharded.rows(shape, pg.size(), pg.rank())
        mesh = _mesh(entry, use_dtensor)
        return _sharded.wrap_rows(value[start:stop].clone().to(device), shape, pg, mesh)

    return finish


def _mesh(entry: UnitEntry, use_dtensor: bool) -> Any:
    mesh = entry.member._device_mesh
    if use_dtensor and mesh is None:
        raise AssertionError(
            "ShardedOptimStateDictConfig(_use_dtensor=True) needs a model that was made with a "
            f"device_mesh; unit {entry.unit.name!r} has none"
        )
    return None if mesh is None else mesh_of(entry.member)


def copy_unknown(state: dict[Key, Any], known: set[Key], kept: dict[Any, Any]) -> None:
    """Entries that are no parameter's go along as they are, with a warning. Local."""
    for key, value in state.items():
        if key in known or key in kept:
            continue
        warnings.warn(
            f"Found a optim state, {key}, that FSDP cannot process. FSDP will directly copy "
            "everything to the returned state_dict. In most cases, this is a user-defined state "
            "that is not associated with any particular parameter.",
            stacklevel=4,
        )
        kept[key] = value
