"""``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` on sharded parameters.

torch's functions would return the norm of one rank's shard, silently wrong and different on each
rank. When the first unit is made, the function that both call is replaced by one that detects
shards among its tensors and then returns the global norm. Calls without shards are unchanged. The
scaling that follows, like ``clip_grad_value_``, is elementwise and correct on shards.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from types import CellType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from fsdpc._clip.largest import has_empty_parts, largest
from fsdpc._clip.norm import (
    by_mesh,
    combine_of,
    of_meshes,
    reduce_over_ranks,
    root_of,
    tensor_sum,
)
from fsdpc._engine.writeback import owner_of
from fsdpc._torch import CLIP_BY_NORM, TOTAL_NORM

_SCALING = ((CLIP_BY_NORM, "clip_grads_with_norm_"), ("clip_grad_value_",) * 2)
# Per unit: id of each gradient -> its address at construction.
_units: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
# By the name of what was replaced, and what stands in its place.
_undo: dict[tuple[str, Any], Callable[[], Any]] = {}


def watch(unit: Any) -> None:
    """Detect tensors of ``unit`` in torch's norm until the unit is deleted. Local."""
    grads = [grad for _, grad, _ in unit.optim_params if grad is not None]
    _units[unit] = {id(grad): grad.data_ptr() for grad in grads}
    install()


def install() -> None:
    """Replace torch's norm, and scale gradients mesh by mesh. Local; a second call is a no-op."""
    _replace(TOTAL_NORM, "get_total_norm", _over_shards)
    for name, public in _SCALING:
        _replace(name, public, _mesh_by_mesh)


def refuse_stepped() -> None:
    """Let torch's clipping functions raise for parameters that step in backward. Local; a second
    call is a no-op.
    """
    for name, public in _SCALING:
        _replace(name, public, _not_stepped)


def _replace(name: str, public: str, made: Callable[[Callable[..., Any]], Any]) -> None:
    """Put ``made(function)`` in place of ``clip_grad.name``, which torch exports as ``public``,
    unless it is there.
    """
    if (name, made) in _undo:
        return
    found = getattr(clip_grad, name)
    cell = _function_cell(found)
    if cell is not None:  # also changes references imported before
        theirs = cell.cell_contents
        cell.cell_contents = made(theirs)
        _undo[name, made] = lambda: setattr(cell, "cell_contents", theirs)
        return
    places = ((clip_grad, name), (torch.nn.utils, public))
    for module, place in places:
        setattr(module, place, torch.no_grad()(made(found)))
    _undo[name, made] = lambda: [setattr(module, place, found) for module, place in places]


def uninstall() -> None:
    """Restore torch's functions. Local. Constructing another unit replaces its norm again."""
    while _undo:
        _undo.popitem()[1]()


def _function_cell(wrapper: Any) -> CellType | None:
    """The closure cell in which torch's no_grad wrapper holds its function."""
    names, cells = wrapper.__code__.co_freevars, wrapper.__closure__
    return cells[0] if names == ("func",) and cells else None


def _mesh_by_mesh(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """torch's loops over many tensors take DTensors of one mesh alone."""

    def scale(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        meshes = by_mesh(parameters, lambda param: param.grad)
        if len(meshes) < 2:
            return theirs(parameters, *args, **kwargs)
        seen = {id(param) for members in meshes.values() for param in members}
        rest = [param for param in parameters if id(param) not in seen and param.grad is not None]
        for members in filter(None, (*meshes.values(), rest)):
            theirs(members, *args, **kwargs)

    return scale


def _not_stepped(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        check_not_stepped(map(owner_of, parameters))
        return theirs(parameters, *args, **kwargs)

    return clip


def check_not_stepped(units: Iterable[Any]) -> None:
    """``RuntimeError`` if a unit (or None) has stepped in backward, so that it has no gradients to
    clip. Local.
    """
    for unit in units:
        if unit is not None and unit.stepper is not None:
            raise RuntimeError(
                f"clipping of unit {unit.name or '(root)'}, whose optimizer steps in backward and "
                "leaves no gradient (fsdpc.optim.in_backward): step after backward instead"
            )


def _over_shards(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        owners = _owners(tensors) if _units else None
        empties = has_empty_parts(tensors, norm_type)
        meshes = by_mesh(tensors)
        plain = not owners and not empties and len(meshes) < 2
        if plain and (tensors or not _absent_units()):
            return theirs(tensors, norm_type, error_if_nonfinite, foreach)
        wide = [t for i, t in enumerate(tensors) if not owners or i not in owners]
        wide = [t for t in wide if hasattr(t, "full_tensor")]
        rest = largest(wide) if empties else None
        if wide and not empties:
            parts = [theirs(same, norm_type, False, foreach) for same in meshes.values()]
            rest = parts[0] if len(parts) == 1 else of_meshes(parts, norm_type)
        if wide and not owners and len(wide) == len(tensors):
            total = rest
        else:
            total = _global_norm(tensors, owners or {}, rest, float(norm_type))
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"The total norm of order {float(norm_type)} for gradients from `parameters` is "
                "non-finite, so it cannot be clipped. To disable this error and scale the "
                "gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        return total

    return total_norm


def _global_norm(
    tensors: Sequence[Tensor], owners: dict[int, Any], rest: Any, norm_type: float
) -> Tensor:
    """The global norm, 0-dim: ``tensors[i]`` lies in the shard of unit ``owners[i]``, ``rest`` is
    the norm of the DTensors, and every rank holds the others whole. Collective over the units'
    groups. ``ValueError``: ``norm_type < 0``.
    """
    if norm_type < 0:
        raise ValueError(f"norm_type of sharded tensors must be >= 0, got {norm_type}")
    combine = combine_of(norm_type)
    units = _concerned(owners)
    dtypes = [tensor.dtype for tensor in tensors] or [units[0].shard_params[0].dtype]
    sums = []
    for i, tensor in enumerate(tensors):
        if i not in owners and not hasattr(tensor, "full_tensor"):
            sums.append(tensor_sum(tensor, norm_type))
    if rest is not None:
        whole = rest.full_tensor() if hasattr(rest, "full_tensor") else rest
        sums.append(tensor_sum(whole, norm_type))
    for comm, members in _by_comm(units):
        part = combine(_unit_sum(unit, tensors, owners, norm_type) for unit in members)
        if comm.world > 1:
            op = "max" if math.isinf(norm_type) else "sum"
            part = reduce_over_ranks(comm, part, op, "norm of sharded tensors")
        sums.append(part)
    total = root_of(combine(sums), norm_type)
    dtype = reduce(torch.promote_types, dtypes)
    return torch.tensor(total, dtype=dtype, device=(tensors or units[0].shard_params)[0].device)


def _concerned(owners: dict[int, Any]) -> list[Any]:
    """The units of the call, in the same order on all ranks: all units of each model, because
    other ranks may pass tensors of which this rank holds no element and no gradient.
    """
    found: dict[Any, None] = {}
    for unit in list(owners.values()) or _absent_units():
        members = unit.tree.units if unit.tree is not None else [unit]
        found.update(dict.fromkeys(each for each in members if each.infos))
    return list(found)


def _absent_units() -> list[Any]:
    """For a call without tensors: the units of the only sharded model, if some of its parameters
    have no elements on this rank, so that only other ranks have gradients.
    """
    trees = {id(unit.tree): unit.tree for unit in list(_units) if unit.tree is not None}
    if len(trees) != 1:
        return []
    units = [unit for unit in next(iter(trees.values())).units if unit.infos]
    nothing = any(unit.holds_nothing(p) for unit in units for p in unit.shard_params)
    return units if nothing else []


def _by_comm(units: Iterable[Any]) -> list[tuple[Any, list[Any]]]:
    """The units by sharding communicator."""
    groups: dict[int, tuple[Any, list[Any]]] = {}
    for unit in units:
        comm = unit.groups.shard
        groups.setdefault(id(comm), (comm, []))[1].append(unit)
    return list(groups.values())


def _unit_sum(
    unit: Any, tensors: Sequence[Tensor], owners: dict[int, Any], norm_type: float
) -> float:
    """This rank's sum for one unit: by the engine for its gradients, by torch for other tensors."""
    places = _units[unit]
    covers = {id(grad): covers for _, grad, covers in unit.optim_params if grad is not None}
    mask = bytearray(len(unit.infos))
    sums = []
    for i, owner in owners.items():
        if owner is not unit:
            continue
        tensor = tensors[i]
        if id(tensor) in covers and tensor.data_ptr() == places[id(tensor)] and norm_type > 0:
            for member in covers[id(tensor)]:
                mask[member] = 1
        else:
            sums.append(tensor_sum(tensor, norm_type))
    if any(mask):
        whole, largest, _ = unit.flat.grad_norm(
            bytes(mask), 2.0 if math.isinf(norm_type) else norm_type
        )
        sums.append(largest if math.isinf(norm_type) else whole)
    return float(combine_of(norm_type)(sums))


# --- which unit owns a tensor --------------------------------------------------------------------


def _owners(tensors: Sequence[Tensor]) -> dict[int, Any]:
    """``{i: unit}`` for every ``tensors[i]`` that is a unit's sharded parameter, its ``.grad`` or a
    view of either.
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
    """True for tensors with memory of their own, unlike DTensors."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return plain and tensor.layout is torch.strided and tensor.numel() > 0 and not tensor.is_meta
