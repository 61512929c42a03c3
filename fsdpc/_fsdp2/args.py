"""The arguments of ``fully_shard``: checks, which raise torch's exceptions, and the meshes and
devices that the arguments stand for.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdpc._comm.bootstrap import Groups, make_groups
from fsdpc._engine.device import engine_device
from fsdpc._torch import default_group, flatten_mesh
from fsdpc.api import ShardingStrategy


@dataclass(frozen=True)
class DataMesh:
    """The ranks over which a unit is sharded and replicated. ``mesh``: the data-parallel mesh of
    the unit's DTensors; the last dimension shards and, if there are two dimensions, the first one
    replicates. ``groups``: the communicators of these dimensions.

    With ``dp_mesh_dims``: ``spmd`` is the mesh on which all parameters are DTensors, and
    ``shard_dims`` and ``replicate_dims`` are the indices of the dimensions of ``spmd`` that shard
    and that replicate. ``mesh`` has one dimension for all sharding dimensions of ``spmd``, and one
    for all replicating dimensions.
    """

    mesh: DeviceMesh
    groups: Groups
    device: torch.device
    replicates: bool
    spmd: DeviceMesh | None = None
    shard_dims: tuple[int, ...] = ()
    replicate_dims: tuple[int, ...] = ()

    def placements(self, dim: int) -> tuple[Any, ...]:
        """Return the placements of a parameter that is a plain tensor before sharding and is cut
        along ``dim``.
        """
        return (Replicate(), Shard(dim)) if self.replicates else (Shard(dim),)

    @property
    def shard_world(self) -> int:
        return self.groups.shard.world


def check_module(module: nn.Module, alone: bool) -> None:
    """Raise ``TypeError`` if ``module`` is not a module, and ``ValueError`` if it is a container
    without a forward of its own. ``alone``: False if the call got a list of modules; the modules of
    a list may be such containers.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard expects an nn.Module but got {type(module).__name__}")
    container = alone and isinstance(module, nn.ModuleList | nn.ModuleDict)
    if container and type(module).forward is nn.Module.forward:
        raise ValueError(
            f"fully_shard does not support containers that do not implement forward: {module}"
        )


# For the group of all ranks, a dict from each device type to a function. The function returns the
# default mesh for this device type, or None if the mesh was freed.
_meshes: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[str, Callable[[], DeviceMesh | None]]
] = weakref.WeakKeyDictionary()


def default_mesh() -> DeviceMesh:
    """Return a 1-D mesh of all ranks, on the accelerator if there is one. As long as a unit uses
    this mesh, later calls return the same mesh. Collective.
    """
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if accelerator is None else accelerator.type
    everyone = default_group()
    meshes = _meshes.setdefault(everyone, {})
    mesh = meshes[kind]() if kind in meshes else None
    if mesh is None:
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
        # A mesh keeps its group alive. If gloo is the default backend beside GPUs, the mesh has a
        # new group, which all ranks must make together. Such a mesh is never freed. If it were, a
        # rank that has freed its last model would make a new mesh, while a rank whose model still
        # exists would use the old mesh.
        of_everyone = mesh.get_group() is everyone
        meshes[kind] = weakref.ref(mesh) if of_everyone else lambda mesh=mesh: mesh
    return mesh


def check_policies(mp_policy: Any, offload_policy: Any) -> None:
    """Raise ``TypeError`` if a policy is not an instance of torch's class for FSDP2. The classes
    for FSDP1 have other fields, which would have no effect. As in torch, ``offload_policy`` may be
    None.
    """
    for name, value, kind in (
        ("mp_policy", mp_policy, MixedPrecisionPolicy),
        ("offload_policy", offload_policy, OffloadPolicy),
    ):
        none = value is None and kind is OffloadPolicy
        if not none and not isinstance(value, kind):
            raise TypeError(
                f"fully_shard: {name} must be a {kind.__name__} of torch or a "
                f"subclass, but got {type(value).__name__}: {value!r}"
            )


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise ``ValueError`` if the mesh is not 1-D or 2-D, and ``AssertionError`` if it is 2-D
    without names.
    """
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")


def named_dims(mesh: DeviceMesh, dims: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the dimensions that replicate and of the dimensions that shard. The mesh
    may have other dimensions. Raises torch's ``ValueError`` if the mesh lacks a name, or if no
    dimension shards.
    """
    if dims.shard is None and dims.replicate is None:
        raise ValueError("At least one of shard or replicate must be set in dp_mesh_dims")
    if mesh.mesh_dim_names is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    replicate, shard = (
        (one,) if isinstance(one, str) else tuple(one or ()) for one in (dims.replicate, dims.shard)
    )
    for name in (*replicate, *shard):
        if name not in mesh.mesh_dim_names:
            raise ValueError(
                f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {mesh.mesh_dim_names}"
            )
    if not shard:
        raise ValueError(
            f"dp_mesh_dims of fully_shard needs a dimension that shards, but got {dims}: replicate "
            "with torch.distributed._composable.replicate_with_fsdp"
        )
    return replicate, shard


def _as_one(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return a 1-D mesh that joins the dimensions ``names`` of ``mesh``. Collective if there are
    several names.
    """
    return mesh[names[0]] if len(names) == 1 else flatten_mesh(mesh[names], "_".join(names))


def data_mesh_of(mesh: DeviceMesh, dims: Any = None) -> DataMesh:
    """Return the ``DataMesh`` of a mesh. A 1-D mesh shards; a 2-D mesh replicates over its first
    dimension and shards over its second. With ``dims`` (``dp_mesh_dims``), only the named
    dimensions count. Collective.
    """
    if dims is None:
        return _data_mesh(mesh)
    replicate, shard = named_dims(mesh, dims)
    parts = [_as_one(mesh, names) for names in (replicate, shard) if names]
    data = _data_mesh(parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts))
    assert mesh.mesh_dim_names is not None
    shard_dims, replicate_dims = (
        tuple(map(mesh.mesh_dim_names.index, names)) for names in (shard, replicate)
    )
    return replace(data, spmd=mesh, shard_dims=shard_dims, replicate_dims=replicate_dims)


def _data_mesh(mesh: DeviceMesh) -> DataMesh:
    kind = mesh.device_type
    if kind not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"fsdpc shards on CPUs and NVIDIA GPUs, not on a mesh of type {kind!r}"
        )
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    replicates = mesh.ndim == 2
    shard = mesh.get_group(mesh.ndim - 1)
    replicate = mesh.get_group(0) if replicates else None
    strategy = ShardingStrategy.HYBRID_SHARD if replicates else ShardingStrategy.FULL_SHARD
    groups = make_groups(strategy, shard, replicate, device=engine_device(device))
    return DataMesh(mesh, groups, device, replicates)


def reshards(value: Any, world: int) -> bool:
    """Return whether a unit is released after forward. An int is the number of ranks that together
    keep one copy of the unit: the result is False for 1 and True for every other divisor of
    ``world`` (see ``keeps``). Raises torch's ``ValueError`` for other values.
    """
    if value is None or isinstance(value, bool):
        return value is not False
    if not isinstance(value, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, not {value}"
        )
    if value < 1 or value > world or world % value != 0:
        raise ValueError(
            "If passing reshard_after_forward as an int, it should be a factor of "
            f"{world}, not {value}"
        )
    if value == 1:
        warnings.warn(
            "reshard_after_forward=1 (int) means resharding parameters to world size 1, instead of "
            "reshard_after_forward=True (bool)",
            stacklevel=4,
        )
    return value != 1


def keeps(value: Any, comm: Any) -> bool:
    """Return whether the ranks of each host keep one copy of a unit that is released after forward.
    The copy is in memory that these ranks share, and backward reads the copy. The result is True if
    ``value`` is an int greater than 1 and equal to the number of ranks per host. Any other int
    would save no traffic between hosts, so nothing is kept.
    """
    return type(value) is int and value > 1 and value == comm.ranks_per_host


def placed(
    choose: Any, infos: list[Any], default: DataMesh
) -> list[tuple[DataMesh, list[Any], list[int]]]:
    """Return for each mesh, ``default`` first, the parameters that ``shard_placement_fn`` puts on
    the mesh, and the dimensions along which these parameters are cut. Collective over the meshes.
    """
    found: dict[DeviceMesh, tuple[DataMesh, list[Any], list[int]]] = {}
    found[default.mesh] = default, [], []
    for info in infos:
        chosen = None if choose is None else choose(info.param)
        if hasattr(chosen, "placement") and hasattr(chosen, "mesh_info"):
            mesh, chosen = _own_mesh(chosen.mesh_info, default, info.name), chosen.placement
        else:
            mesh = default.mesh
        if mesh not in found:
            found[mesh] = data_mesh_of(mesh), [], []
        data_mesh, members, dims = found[mesh]
        members.append(info)
        dims.append(_dim(chosen, info, data_mesh.shard_world))
    return list(found.values())


def _own_mesh(mesh_info: Any, default: DataMesh, name: str) -> DeviceMesh:
    mesh: DeviceMesh = mesh_info.mesh
    replicates = getattr(mesh_info, "replicate_mesh_dim", None) is not None
    if getattr(mesh_info, "shard_mesh_dim", None) is None or mesh.ndim != 1 + replicates:
        raise ValueError(
            f"shard_placement_fn: parameter {name!r} needs a mesh whose last dimension shards, "
            f"after one that replicates if it has two, not {mesh_info}"
        )
    if default.spmd is not None and mesh != default.mesh:
        raise NotImplementedError(
            f"shard_placement_fn: a mesh of its own for parameter {name!r} beside dp_mesh_dims: "
            "call fully_shard on the module that has the parameter"
        )
    if mesh.device_type != default.mesh.device_type:
        raise ValueError(f"shard_placement_fn: {mesh} for parameter {name!r}, but {default.mesh}")
    return mesh


def _dim(chosen: Any, info: Any, world: int) -> int:
    """Return the dimension that a placement names (0 for None) as a non-negative number. Raises
    ``NotImplementedError``, as torch does, if the dimension is not 0 and its size is not a multiple
    of ``world``. Raises torch's exceptions for values that are not valid placements.
    """
    if chosen is None:
        return 0
    if not isinstance(chosen, Shard):
        raise AssertionError(f"Expected Shard but got {chosen} for parameter {info.name!r}")
    dim = chosen.dim + info.param.dim() if chosen.dim < 0 else chosen.dim
    if not 0 <= dim < info.param.dim():
        raise AssertionError(
            f"Shard dim {chosen.dim} is invalid for {info.param.dim()}D tensor: {info.param.shape}"
        )
    local = info.param._local_tensor if isinstance(info.param, DTensor) else info.param
    if dim > 0 and local.shape[dim] % world != 0:
        raise NotImplementedError(
            f"FSDP does not support uneven sharding on dim {dim}: {tuple(local.shape)} (world "
            f"size: {world}) of parameter {info.name!r}"
        )
    return dim
