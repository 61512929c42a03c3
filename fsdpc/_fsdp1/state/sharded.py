"""SHARDED_STATE_DICT of one unit: this rank's block of rows of each parameter as a
``ShardedTensor``, or as a ``DTensor`` if the model was built with a ``device_mesh``.

No full value is gathered. While the unit's modules save or load, their parameters are this rank's
rows, which the engine transfers from and to the ranks that own the elements (see
``csrc/unit/unit_values.c``). A parameter without rows (0-dim, empty) is saved whole, as a plain
tensor.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdpc._fsdp1.args import HYBRID
from fsdpc._fsdp1.names import FSDP_PREFIX
from fsdpc._fsdp1.state.full import check_shown
from fsdpc._fsdp1.state.keys import managed_names
from fsdpc._fsdp1.summon import conceal, expose, site_params
from fsdpc._spans import rows as _sharded


def mesh_of(member: Any) -> DeviceMesh | None:
    """Return the mesh over whose last dimension the unit is sharded, or ``None`` if the model has
    no mesh. The result is the model's mesh, with one exception: if the mesh has several dimensions
    and the strategy is not hybrid, the result is the 1-D submesh of the sharding dimension.

    Local. ``RuntimeError``: the unit is sharded over another group than the mesh's, or the config
    requests DTensors without a mesh.
    """
    mesh, group = member._device_mesh, member._unit.groups.shard_pg
    if mesh is None:
        if getattr(member._state_dict_config, "_use_dtensor", False):
            raise RuntimeError(
                "ShardedStateDictConfig(_use_dtensor=True) needs a model built with a device_mesh"
            )
        return None
    member._state_dict_config._use_dtensor = True  # torch's FSDP also sets this
    if mesh.ndim > 1 and member.sharding_strategy not in HYBRID:
        mesh = member.__dict__.get("_rows_mesh")
        if mesh is None:
            mesh = member.__dict__["_rows_mesh"] = _first_dimension(member._device_mesh, group)
    last = mesh.get_group(mesh.ndim - 1)
    if dist.get_process_group_ranks(last) != dist.get_process_group_ranks(group):
        raise RuntimeError(
            f"unit {member._unit.name!r} is not sharded over the last dimension of its mesh "
            f"{mesh}: no DTensor placement describes its shards. Pass a 1-D mesh, or a 2-D mesh "
            "with HYBRID_SHARD"
        )
    return mesh


def _first_dimension(mesh: DeviceMesh, group: dist.ProcessGroup) -> DeviceMesh:
    """Return the 1-D mesh of this rank's sharding group. Gradients are not averaged over the other
    dimensions of the model's mesh, so values may differ along these dimensions and must not be
    marked as replicated. Local.
    """
    names = mesh.mesh_dim_names
    if names:
        return mesh[names[0]]
    return DeviceMesh.from_group(group, mesh.device_type)


def before_save(member: Any) -> None:
    """Register this rank's rows. Collective over the sharding group."""
    unit = member._unit
    mesh_of(member)
    check_shown(member)
    if not member._summoned:
        expose(member, unit.read_rows())


def after_save(member: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Register the sharded parameters again, and make distributed values of the rows in
    ``state_dict``. Local.
    """
    conceal(member)
    for name, i in managed_names(member).items():
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor):
            state_dict[prefix + name] = _saved(member, i, value.detach())


def _saved(member: Any, i: int, value: torch.Tensor) -> Any:
    """Return the dict's value for parameter ``i``. A module may have converted the rows, for
    example to another dtype. If the module has saved a tensor of another shape, this tensor is
    returned unchanged.
    """
    unit = member._unit
    shape, pg = unit.shapes[i], unit.groups.shard_pg
    if not _sharded.is_cut(shape):
        return value.clone() if member._summoned else value
    if member._summoned and value.shape == shape:
        start, stop = _sharded.rows(shape, pg.size(), pg.rank())
        value = value[start:stop].clone()
    if tuple(value.shape) != _sharded.rows_shape(shape, pg.size(), pg.rank()):
        return value
    return _sharded.wrap_rows(value, shape, pg, mesh_of(member))


def before_load(
    member: Any, state_dict: dict[str, Any], prefix: str, error_msgs: list[str]
) -> None:
    """Register this rank's rows, and put this rank's rows of the loaded values into ``state_dict``.
    Collective over the sharding group. If a loaded value is a DTensor with other placements than
    the saved ones, the call is also collective over the mesh of this DTensor.

    A value of another type or shape is skipped and reported in ``error_msgs``.
    """
    unit = member._unit
    if member._summoned:
        raise RuntimeError(
            f"a SHARDED_STATE_DICT cannot be loaded into unit {unit.name!r} inside "
            "summon_full_params: leave the context first"
        )
    mesh_of(member)
    current = unit.read_rows()
    expose(member, current)
    for name, i in managed_names(member).items():
        key = prefix + FSDP_PREFIX + name
        if key not in state_dict:
            continue
        try:
            pg = unit.groups.shard_pg
            rows = _sharded.unwrap(state_dict[key], unit.shapes[i], pg.size(), pg.rank(), group=pg)
        except (TypeError, ValueError) as error:
            error_msgs.append(f"While loading {prefix + name} of unit {unit.name!r}: {error}")
            rows = current[i]
        state_dict[key] = rows


def after_load(member: Any) -> None:
    """Send the loaded rows to the ranks that own them. Collective over the sharding group."""
    if member._exposed:
        try:
            member._unit.write_rows(site_params(member._unit))
        finally:
            conceal(member)
