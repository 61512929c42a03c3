"""``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` on sharded parameters.

torch's functions would silently return the norm of one rank's shard, a different value on each
rank. When the first unit is made, both functions are replaced by functions that detect shards and
then return the global norm. ``clip_grad_norm_`` finds shards by its parameters, which are the same
on all ranks. ``get_total_norm`` finds shards by the passed gradients; a rank may pass none.
Calls without shards work as before. ``clip_grads_with_norm_``, which scales gradients, and
``clip_grad_value_`` are elementwise, so torch's versions are correct on shards. They are wrapped
so that one call may pass parameters of both interfaces (FSDP1 and ``fully_shard``).
"""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from types import CellType, GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from fsdpc._clip.largest import has_empty_parts, largest
from fsdpc._clip.norm import (
    by_comm,
    by_mesh,
    combine_of,
    of_meshes,
    root_of,
    sums_of_units,
    tensor_sum,
)
from fsdpc._comm.bootstrap import is_destroyed
from fsdpc._comm.channel import numbers_in
from fsdpc._engine.writeback import owner_of
from fsdpc._torch import CLIP_BY_NORM, TOTAL_NORM

# For each unit: {id of a gradient tensor: the tensor's address when ``watch`` was called}.
_units: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()


def watch(unit: Any) -> None:
    """Let torch's norm functions detect the tensors of ``unit`` as long as it exists. Local."""
    grads = [grad for _, grad, _ in unit.optim_params if grad is not None]
    _units[unit] = {id(grad): grad.data_ptr() for grad in grads}
    install()


@functools.cache
def install() -> None:
    """Replace torch's functions for norms and clipping; later calls do nothing. Local."""
    _replace(TOTAL_NORM, "get_total_norm", _over_gradients)
    _replace("clip_grad_norm_", "clip_grad_norm_", _over_parameters)
    _replace(CLIP_BY_NORM, "clip_grads_with_norm_", _mesh_by_mesh)
    _replace("clip_grad_value_", "clip_grad_value_", _mesh_by_mesh)


def _replace(name: str, public: str, made: Callable[[Callable[..., Any]], Any]) -> None:
    """Put ``made(function)`` in place of ``clip_grad.name``, which torch exports as ``public``."""
    found = getattr(clip_grad, name)
    cell = _function_cell(found)
    if cell is not None:  # this also reaches references that programs imported earlier
        cell.cell_contents = made(cell.cell_contents)
        return
    for module, place in ((clip_grad, name), (torch.nn.utils, public)):
        setattr(module, place, torch.no_grad()(made(found)))


def _function_cell(wrapper: Any) -> CellType | None:
    """Return the closure cell in which torch's no_grad wrapper holds its function, or None."""
    names, cells = wrapper.__code__.co_freevars, wrapper.__closure__
    return cells[0] if names == ("func",) and cells else None


def _mesh_by_mesh(theirs: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls the elementwise function ``theirs`` separately for plain tensors
    and for each mesh's DTensors. If no parameter has a gradient, ``theirs`` is not called, because
    torch's ``clip_grad_value_`` would raise.
    """

    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        check_not_stepped(owner_of(p) for p in given if p.grad is None)
        meshes = by_mesh(given, lambda p: p.grad)
        plain = [p for p in given if p.grad is not None and not isinstance(p.grad, DTensor)]
        for members in filter(None, (*meshes.values(), plain)):
            theirs(members, *args, **kwargs)

    return clip


def check_not_stepped(units: Iterable[Any]) -> None:
    """Raise ``RuntimeError`` if a unit's optimizer steps in backward, because such a unit has no
    gradients left to clip. Entries of ``units`` may be None. Local.
    """
    for unit in units:
        if unit is not None and unit.stepper is not None:
            raise RuntimeError(
                f"clipping of unit {unit.name or '(root)'}, whose optimizer steps in backward and "
                "leaves no gradient (fsdpc.optim.in_backward): step after backward instead"
            )


def _over_parameters(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def clip(
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        owned = [owner_of(p) for p in given] if _units else []
        known = {unit for unit in set(owned) if unit in _units}
        if not known:
            again = (p for p in given) if isinstance(parameters, GeneratorType) else given
            return theirs(again, max_norm, norm_type, error_if_nonfinite, foreach)
        units = [unit for unit in dict.fromkeys(owned) if unit in known]
        having = [(p.grad, unit) for p, unit in zip(given, owned, strict=True)]
        having = [(grad, unit) for grad, unit in having if grad is not None]
        owners = {i: unit for i, (_, unit) in enumerate(having) if unit in known}
        grads = [grad for grad, _ in having]
        total = _sharded_norm(grads, owners, units, float(norm_type), foreach)
        _check_finite(total, norm_type, error_if_nonfinite)
        getattr(clip_grad, CLIP_BY_NORM)(given, max_norm, total, foreach)
        return total

    return clip


def _over_gradients(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        owners = _owners(tensors) if _units else {}
        units = owners.values() if tensors else _absent_units()
        if owners and len(owners) < len(tensors):
            _check_seen(tensors, owners)
        meshes = by_mesh(tensors)
        beside = bool(meshes) and sum(map(len, meshes.values())) < len(tensors)
        if units or beside:
            total = _sharded_norm(tensors, owners, units, float(norm_type), foreach)
        elif has_empty_parts(tensors, norm_type):
            total = largest(tensors)
        elif len(meshes) > 1:
            parts = [theirs(same, norm_type, False, foreach) for same in meshes.values()]
            total = of_meshes(parts, norm_type)
        else:
            return theirs(tensors, norm_type, error_if_nonfinite, foreach)
        _check_finite(total, norm_type, error_if_nonfinite)
        return total

    return total_norm


def _check_finite(total: Tensor, norm_type: float, wanted: bool) -> None:
    if wanted and not bool(total.isfinite()):
        raise RuntimeError(
            f"The total norm of order {float(norm_type)} for gradients from `parameters` is "
            "non-finite, so it cannot be clipped. To disable this error and scale the "
            "gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )


def _sharded_norm(
    tensors: Sequence[Tensor],
    owners: dict[int, Any],
    units: Iterable[Any],
    norm_type: float,
    foreach: bool | None,
) -> Tensor:
    """Return the global norm as a 0-dim tensor. Collective over the units' groups.

    ``tensors[i]`` lies in the shard of unit ``owners[i]``. A tensor without an owner is a DTensor,
    or is whole and equal on every rank. All ranks must pass the same ``units``, or units of the
    same groups. ``ValueError``: ``norm_type < 0``.
    """
    if norm_type < 0:
        raise ValueError(f"norm_type of sharded tensors must be >= 0, got {norm_type}")
    units = _with_others(units)
    free = [t for i, t in enumerate(tensors) if i not in owners]
    sums = [tensor_sum(t, norm_type) for t in free if not isinstance(t, DTensor)]
    for same in by_mesh(free).values():
        norm = getattr(clip_grad, TOTAL_NORM)(same, norm_type, False, foreach)
        sums.append(tensor_sum(norm.full_tensor(), norm_type))
    own: dict[Any, list[Tensor]] = {unit: [] for unit in units}
    for i, unit in owners.items():
        own[unit].append(tensors[i])
    what = "norm of sharded tensors"
    sums += sums_of_units(units, lambda u: _unit_sum(u, own[u], norm_type), norm_type, what)
    total = root_of(combine_of(norm_type)(sums), norm_type)
    like = tensors or units[0].shard_params[:1]
    dtype = reduce(torch.promote_types, [t.dtype for t in like])
    return torch.tensor(total, dtype=dtype, device=like[0].device)


def _with_others(units: Iterable[Any]) -> list[Any]:
    """Return all units of the models to which ``units`` belong, in the same order on all ranks.

    Other ranks may pass tensors of units of which this rank holds no element and no gradient.
    """
    found: dict[Any, None] = {}
    for unit in units:
        members = unit.tree.units if unit.tree is not None else [unit]
        found.update(dict.fromkeys(each for each in members if each.infos))
    return list(found)


def _absent_units() -> list[Any]:
    """Return the units over whose groups this rank must take part in a collective norm, although it
    called ``get_total_norm`` without tensors. They are the units of a model of which this rank
    lacks some parameters: other ranks may have passed gradients of these parameters. Of models with
    the same groups, the first one is chosen.

    ``RuntimeError`` on all ranks of all groups if several such models are in different groups.
    """
    trees = {id(unit.tree): unit.tree for unit in list(_units) if unit.tree is not None}
    groups: dict[tuple[int, ...], list[Any]] = {}
    for tree in trees.values():
        units = [unit for unit in tree.units if unit.infos and not _is_left(unit)]
        if any(unit.holds_nothing(p) for unit in units for p in unit.shard_params):
            comms = [id(comm) for comm, _ in by_comm(units) if comm.world > 1]
            groups.setdefault(tuple(comms), units)
    if len(groups) > 1:
        units = [unit for units in groups.values() for unit in units]
        _refuse_unknown(units, units[0].groups.shard.rank, "these are models of several groups")
    return next(iter(groups.values()), [])


def _is_left(unit: Any) -> bool:
    """Whether the unit's process group was destroyed, so that the model cannot train any more."""
    return unit.groups.shard_pg is not None and is_destroyed(unit.groups.shard_pg)


def _check_seen(tensors: Sequence[Tensor], owners: dict[int, Any]) -> None:
    """Raise ``RuntimeError`` on all ranks if some rank may have passed no tensor of the units.

    Such a rank would not take part in the collective norm.
    """
    units = _with_others(owners.values())
    given = {id(tensors[i]) for i in owners}
    for comm, members in by_comm(units):
        own = [(unit, p, covers) for unit in members for p, _, covers in unit.optim_params]
        known = [each for each in own if id(each[1].grad) in given]
        # If this rank passed all gradients that it has, assume that every rank passes all of them.
        if all(p.grad is None or id(p.grad) in given for _, p, _ in own):
            known = own
        seen: set[int] = set()
        for unit, p, covers in known:
            if p.requires_grad and len(seen) < comm.world:
                seen |= _holders(unit, covers)
        if len(seen) < comm.world:
            absent = next(rank for rank in range(comm.world) if rank not in seen)
            _refuse_unknown(units, absent, "other tensors were passed beside them")


def _holders(unit: Any, covers: Sequence[int]) -> set[int]:
    """Return the ranks that hold elements of the parameters with the indices ``covers``."""
    spans = unit.flat.layout()["spans"] if unit.use_orig_params else []
    if not spans:
        return set(range(unit.groups.shard.world))
    return {rank for i in covers for rank, (_, _, length) in enumerate(spans[i]) if length}


def _refuse_unknown(units: list[Any], rank: int, why: str) -> None:
    names = ", ".join(dict.fromkeys(unit.name or "(root)" for unit in units))
    text = (
        f"the norm of gradients of units {names}, of which rank {rank} may hold none: {why}, so "
        "that it cannot know that its part is asked for; call torch.nn.utils.clip_grad_norm_ with "
        "all parameters, not only with those that have a gradient, or the model's clip_grad_norm_"
    )
    comms = [comm for comm, _ in by_comm(units)]
    for comm in comms:
        comm.abort(text)
    raise RuntimeError(f"{text}{numbers_in(comms[0])}")


def _unit_sum(unit: Any, tensors: Sequence[Tensor], norm_type: float) -> float:
    """Return this rank's sum of powers over one unit's tensors.

    The engine sums the tensors that are the unit's own gradients; torch sums all other tensors.
    """
    places = _units[unit]
    covers = {id(grad): covers for _, grad, covers in unit.optim_params if grad is not None}
    mask = bytearray(len(unit.infos))
    sums = []
    for tensor in tensors:
        if id(tensor) in covers and tensor.data_ptr() == places[id(tensor)] and norm_type > 0:
            for member in covers[id(tensor)]:
                mask[member] = 1
        else:
            sums.append(tensor_sum(tensor, norm_type))
    if any(mask):
        sums.append(unit.grad_norm_sums(bytes(mask), norm_type))
    return combine_of(norm_type)(sums)


# --- which unit owns a tensor --------------------------------------------------------------------


def _owners(tensors: Sequence[Tensor]) -> dict[int, Any]:
    """Return ``{i: unit}`` for every ``tensors[i]`` that is a sharded parameter of a unit, the
    parameter's ``.grad``, or a view of one of these.
    """
    known: dict[int, Any] = {}
    ranges: list[tuple[int, int, Any]] = []
    for unit in list(_units):
        for param, grad, _ in unit.optim_params:
            known[id(param)] = unit
            if param.grad is not None:
                known[id(param.grad)] = unit
            ranges += [_range(tensor, unit) for tensor in (param, grad) if tensor is not None]
    owners = {i: known[id(t)] for i, t in enumerate(tensors) if id(t) in known}
    strangers = [i for i, t in enumerate(tensors) if i not in owners and _has_address(t)]
    if strangers:
        ranges.sort(key=lambda each: each[0])
        starts = [begin for begin, _, _ in ranges]
        for i in strangers:
            address = tensors[i].data_ptr()
            at = bisect_right(starts, address) - 1
            if at >= 0 and address < ranges[at][1]:
                owners[i] = ranges[at][2]
    return dict(sorted(owners.items()))


def _range(tensor: Tensor, unit: Any) -> tuple[int, int, Any]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size(), unit


def _has_address(tensor: Tensor) -> bool:
    """Whether the tensor has a memory address that can be compared. A DTensor has none."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return plain and tensor.layout is torch.strided and tensor.numel() > 0 and not tensor.is_meta
