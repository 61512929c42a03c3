"""Conversion of a sharded model's optimizer state to the state dict of the unsharded model's
optimizer.

Units are gathered one by one and, within a unit, one state of one dtype segment at a time, through
a window of bounded size. A rank that does not keep the result allocates only the window.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdpc._engine.device import CPU
from fsdpc._fsdp1.optim.book import Book, Key, UnitEntry
from fsdpc._fsdp1.optim.describe import ABSENT, Plan, State, plan_states
from fsdpc._fsdp1.state.sharded import mesh_of
from fsdpc._spans import rows as _sharded
from fsdpc._spans.span import Span
from fsdpc._spans.window import Wanted, gather


@dataclass
class Form:
    """The form of a state dict. The form also decides which elements of each state a rank keeps.
    With ``full`` the values are in the original shapes, on rank 0 only if ``rank0_only`` is set.
    Otherwise a rank keeps its rows as a ``ShardedTensor``, or as a ``DTensor`` on the unit's mesh.
    ``offload``: values are put on the CPU.
    """

    full: bool = True
    rank0_only: bool = False
    offload: bool = True
    use_dtensor: bool = False

    def span(self, entry: UnitEntry, i: int) -> Span:
        """Return the span of the elements to keep of the unit's ``i``-th parameter."""
        pg, shape = entry.unit.groups.shard_pg, entry.unit.shapes[i]
        if not self._cuts(entry, i):
            return Span(0, 0, shape.numel())
        return _sharded.block(shape, pg.size(), pg.rank())

    def made(self, entry: UnitEntry, i: int, values: torch.Tensor) -> Any:
        """Return the state dict's value for the kept elements ``values``, a 1-D tensor."""
        pg, shape = entry.unit.groups.shard_pg, entry.unit.shapes[i]
        made: Any = values
        if self._cuts(entry, i):
            rows = values.view(_sharded.rows_shape(shape, pg.size(), pg.rank()))
            made = _sharded.wrap_rows(rows, shape, pg, self._mesh(entry))
        else:
            made = values.view(shape)
        return made.cpu() if self.offload else made

    def device(self, entry: UnitEntry) -> torch.device:
        """Return the device on which the kept elements are assembled."""
        # A DTensor is made on the device of its mesh and offloaded afterwards.
        on_cpu = self.offload and (self.full or self._mesh(entry) is None)
        return CPU if on_cpu else entry.unit.device

    def _cuts(self, entry: UnitEntry, i: int) -> bool:
        return not self.full and entry.unit.is_sharded and _sharded.is_cut(entry.unit.shapes[i])

    def _mesh(self, entry: UnitEntry) -> Any:
        mesh = entry.member._device_mesh
        if self.use_dtensor and mesh is None:
            raise AssertionError(
                "Expected _device_mesh to be not None, got None: "
                "ShardedOptimStateDictConfig(_use_dtensor=True) needs a model built with a "
                f"device_mesh; unit {entry.unit.name!r} has none"
            )
        return None if mesh is None else mesh_of(entry.member)


def gather_states(
    book: Book,
    held: list[tuple[Key, nn.Parameter]],
    state: dict[Key, Any],
    keep: Form | None,
) -> dict[str, State]:
    """Return the state of every parameter of the model, by name. Collective over the units' groups.

    ``keep``: the form in which this rank keeps the state; ``None``: this rank keeps nothing.
    """
    keys = {id(param): key for key, param in held}
    kept: dict[str, State] = {}
    for entry in book.units:
        _gather_unit(entry, keys, state, keep, kept)
    if keep is not None:
        for name, param in book.plain.items():
            key = keys.get(id(param))
            if key is not None and key in state:
                kept[name] = {n: _copied(value, keep.offload) for n, value in state[key].items()}
    return kept


def _copied(value: Any, offload: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return value.detach().to("cpu", copy=True) if offload else value.detach().clone()


def _gather_unit(
    entry: UnitEntry,
    keys: dict[int, Key],
    state: dict[Key, Any],
    keep: Form | None,
    kept: dict[str, State],
) -> None:
    states: list[Any] = [
        state.get(keys[id(sharded.param)]) if id(sharded.param) in keys else ABSENT
        for sharded in entry.params
    ]
    plans = plan_states(entry, states)
    _keep_same(entry, plans, keep, kept)
    for (_, _, name, _), (dtype, members) in sorted(_cut_runs(entry, plans).items()):
        wanted = _gather_run(entry, name, dtype, members, states, keep)
        for i, want in wanted.items():
            kept[entry.names[i][0]][name] = keep.made(entry, i, want.values)  # type: ignore[union-attr]


def _keep_same(
    entry: UnitEntry, plans: list[Plan | None], keep: Form | None, kept: dict[str, State]
) -> None:
    if keep is None:
        return
    device = CPU if keep.offload else entry.unit.device
    for sharded, plan in zip(entry.params, plans, strict=True):
        if plan is not None:
            for name in sharded.names:
                kept[name] = {n: _on(device, value) for n, value in plan.same.items()}


def _on(device: torch.device, value: Any) -> Any:
    """Return a copy of a ``same`` value. Numbers and 0-dim tensors stay on the CPU, as in torch."""
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return value.to(device, copy=True)
    return _copied(value, True)


def _cut_runs(
    entry: UnitEntry, plans: list[Plan | None]
) -> dict[tuple[int, int, str, str], tuple[torch.dtype, list[int]]]:
    """Group the parameters whose states are gathered together. The parameters of a group lie in the
    same segment and have the same element size, and the states have the same name and dtype.
    """
    runs: dict[tuple[int, int, str, str], tuple[torch.dtype, list[int]]] = {}
    for j, plan in enumerate(plans):
        for name, dtype in plan.cut.items() if plan is not None else ():
            sharded = entry.params[j]
            item = entry.unit.items[sharded.covers[0]]
            run = (sharded.segment_index, item, name, str(dtype))
            runs.setdefault(run, (dtype, []))[1].append(j)
    return runs


def _gather_run(
    entry: UnitEntry,
    name: str,
    dtype: torch.dtype,
    members: list[int],
    states: list[Any],
    keep: Form | None,
) -> dict[int, Wanted]:
    """Gather the state ``name`` of the parameters ``members``. Return the elements that this rank
    keeps, by the index of the original parameter. Collective.
    """
    wanted: dict[int, Wanted] = {}
    for i in (i for j in members for i in entry.params[j].covers) if keep is not None else ():
        span, where = keep.span(entry, i), keep.device(entry)
        wanted[i] = Wanted(span.begin, torch.empty(span.count, dtype=dtype, device=where))
    here = [(entry.params[j].span(entry.comm.rank), states[j]) for j in members]
    parts = [(span.at, state[name].reshape(-1)) for span, state in here if span.count]
    what = f"optimizer state {name} of unit {entry.unit.name}"
    piece, spans = entry.params[members[0]].piece_numel, dict(enumerate(entry.spans))
    gather(entry.comm, piece, dtype, parts, spans, wanted, what, entry.unit.device)
    return wanted


def copy_unknown(state: dict[Key, Any], known: set[Key], kept: dict[Any, Any]) -> None:
    """Copy the entries of ``state`` that belong to no parameter into ``kept``, with a warning each.

    Local.
    """
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
