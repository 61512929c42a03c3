"""A unit whose sharded parameters are DTensors: each rank has whole rows of every parameter.

Parameters that tensor parallelism has distributed already are cut once more: the unit shards this
rank's local tensor, the module computes with a DTensor on the tensor-parallel mesh, and the
optimizer sees a DTensor on both meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdpc._comm.channel import this_rank
from fsdpc._engine import lowbit as _lowbit
from fsdpc._engine import writeback as _writeback
from fsdpc._engine.interop import around, over
from fsdpc._engine.released import ReleasedDTensor
from fsdpc._engine.unit import ParamInfo, Unit
from fsdpc._fsdp2 import assigned as _assigned
from fsdpc._fsdp2.args import DataMesh
from fsdpc._fsdp2.quantized import codecs_of
from fsdpc._spans.rows import rows_shape
from fsdpc._torch import AsyncCollectiveTensor, DTensorSpec, StridedShard, TensorMeta


class RowUnit(Unit):
    """The parameters of one call of ``fully_shard``. Collective over the groups of ``data_mesh``.

    Parameters on the meta device stay there until ``to_empty`` or a load replaces them; the memory
    of their shards exists from the start. ``adopted``: sharded parameters of an earlier unit, which
    become this unit's parameters; the caller copies their values.

    ``dims``: the dimension along which each parameter is cut (default 0). In the engine's memory
    this dimension comes first, so that each rank has whole rows. Parameters in the modules, local
    tensors and gradients are views that have the dimensions in their original order. ``policy``: a
    ``QuantizedPolicy`` says which values are sent in codes.
    """

    dtensors = True
    released_class = ReleasedDTensor
    readable_outside = "between unshard() and reshard()"

    def __init__(
        self,
        name: str,
        infos: list[ParamInfo],
        data_mesh: DataMesh,
        *,
        dims: Sequence[int] = (),
        adopted: Sequence[nn.Parameter] = (),
        parallel: Sequence[Any] = (),
        policy: MixedPrecisionPolicy | None = None,
        **options: Any,
    ) -> None:
        dims = list(dims) or [0] * len(infos)
        self.data_mesh = data_mesh
        self.adopted = adopted
        # For each parameter, its spec on the tensor-parallel mesh, or None.
        self.parallel = list(parallel) or [_take_local(info) for info in infos]
        self.specs = [
            sharded_spec(info.param, data_mesh, spec, dim)
            for info, spec, dim in zip(infos, self.parallel, dims, strict=True)
        ]
        for info, dim in zip(infos, dims, strict=True):
            if dim > 0:
                _put_first(info, dim)
        codecs = [codecs_of(policy, info.param.shape, info.param.dtype) for info in infos]
        if self.foreign:  # a gather in Python sends no codes
            codecs = [("", *sent) for _, *sent in codecs]
        super().__init__(
            name,
            infos,
            data_mesh.groups,
            use_orig_params=True,
            by_rows=True,
            dims=dims,
            codecs=codecs,
            **options,
        )

    # --- gathered parameters ---------------------------------------------------------------------

    def _make_full(self, i: int) -> Tensor:
        full = super()._make_full(i)
        if self.dims[i] > 0:
            moved: Any = nn.Parameter(full.detach().movedim(0, self.dims[i]), full.requires_grad)
            moved.__dict__.update(full.__dict__)
            full = moved
        _writeback.set_gathered(full, self, self.infos[i].name)
        spec = self.parallel[i]
        if spec is None:
            return full
        local = full.detach()
        param: Any = nn.Parameter(around(local, spec), requires_grad=self.trainable[i])
        param._local_tensor = local
        param.__dict__.update(full.__dict__)
        if self.trainable[i]:
            param.register_hook(self.grad_of_parallel(i))
        return param

    def grad_of_parallel(self, i: int) -> Callable[[Any], Any] | None:
        """Return a function that brings gradients of parameter ``i`` to the parameter's placements
        on the tensor-parallel mesh, or None without such a mesh. Local.
        """
        spec = self.parallel[i]
        kept = (*self.data_mesh.replicate_dims, *self.data_mesh.shard_dims)
        return None if spec is None else lambda grad: _as_placed(grad, spec, kept)

    # --- sharded parameters ----------------------------------------------------------------------

    def _shard_originals(self) -> None:
        for i, info in enumerate(self.infos):
            local, shown = self._first_local(i)
            if self.adopted:
                param: Any = self.adopted[i]
                param._local_tensor = local
            else:
                param = nn.Parameter(self.distributed(shown, i), requires_grad=self.trainable[i])
                param.__dict__.update(info.param.__dict__)
                param.__dict__.update(_lowbit.attributes(info.param))
                self.specs[i] = param._spec  # torch shares this spec among parameters of one shape
            info.param = param
            _writeback.set_owner(param, self)
            self.released[i]._fsdpc_sharded = param
            self.optim_params.append(
                (param, self.grad_view(i) if self.trainable[i] else None, (i,))
            )
            self.views.append(local)

    def _first_local(self, i: int) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of parameter ``i``, and the local tensor that the parameter has
        at first, which is a meta tensor if the parameter is on the meta device.
        """
        local = self.shard_view(i)
        meta = self.infos[i].param.is_meta
        return local, torch.empty_like(local, device="meta") if meta else local

    def distributed(self, local: Tensor, i: int) -> Tensor:
        """Return a DTensor of parameter ``i`` around this rank's rows, without a copy. Local."""
        return around(local, self.specs[i])

    def _rows(self, i: int) -> torch.Size:
        shard = self.groups.shard
        return torch.Size(rows_shape(self.shapes[i], shard.world, shard.rank))

    def shard_view(self, i: int) -> Tensor:
        return self._part(self.flat.shard_part(i), i)

    def grad_view(self, i: int) -> Tensor:
        return _assigned.mark(self.distributed(self._part(self.flat.grad_part(i), i), i))

    def _part(self, memory: Any, i: int) -> Tensor:
        rows = over(memory, self.dtypes[i], self._rows(i))
        return rows.movedim(0, self.dims[i]) if self.dims[i] > 0 else rows

    def local(self, param: Any) -> Tensor:
        return param._local_tensor

    def show_shard(self, param: Any, view: Tensor) -> None:
        param._local_tensor = view

    def replacement(self, index: int, param: Tensor, what: str) -> Tensor:
        """Return the replacement as ``Unit.replacement`` does. A plain Parameter of the whole shape
        becomes a DTensor of this rank's rows.
        """
        wanted = self.specs[index]
        if not isinstance(param, DTensor):
            return self._distribute(index, param, what)
        if (param.device_mesh, tuple(param.placements)) != (wanted.mesh, wanted.placements):
            raise ValueError(
                f"{what} was replaced by a DTensor with {param.placements} on {param.device_mesh}, "
                f"but its shard has {wanted.placements} on {wanted.mesh}: redistribute() the new "
                "value first"
            )
        return param

    def _distribute(self, index: int, param: Tensor, what: str) -> Tensor:
        dim, shard, whole = self.dims[index], self.groups.shard, self.full[index].shape
        if param.shape != whole or self.parallel[index] is not None:
            raise ValueError(
                f"{what} was replaced by a plain tensor of shape {tuple(param.shape)}: assign a "
                "DTensor (torch.distributed.tensor.distribute_tensor), or copy values into the "
                "sharded parameter"
            )
        begin = shard.rank * rows_shape(self.shapes[index], shard.world, 0)[0]
        rows = self._rows(index)[0]
        part = param.detach().narrow(dim, min(begin, whole[dim]), rows).clone()
        made = nn.Parameter(around(part, self.specs[index]), requires_grad=param.requires_grad)
        made.__dict__.update(param.__dict__)
        _writeback.set_gathered(param, self, self.infos[index].name)
        return made

    def adopt_in_pass(self) -> None:
        super().adopt_in_pass()
        check_materialized(self, [f"{self.name}.{name}".lstrip(".") for name in self.meta_names()])
        for info, dtype in zip(self.infos, self.dtypes, strict=True):
            if info.param.dtype != dtype:
                raise TypeError(
                    f"parameter {info.name!r} of unit {self.name!r} was replaced by one of "
                    f"{info.param.dtype}, but the unit has {dtype}: replace parameters before the "
                    "first forward, or call to(dtype) on the sharded model first"
                )

    def meta_names(self) -> list[str]:
        """Return the names of the parameters that are on the meta device. Local."""
        return [info.name for info in self.infos if self.local(info.param).is_meta]

    def take_memory(self) -> None:
        """Replace the meta tensors of parameters by the shards, which have memory but no values
        yet. Local.
        """
        for i, info in enumerate(self.infos):
            param: Any = info.param
            if self.local(param).is_meta:
                kept = dict(param.__dict__)
                shown = nn.Parameter(self.distributed(self.views[i], i), param.requires_grad)
                torch.utils.swap_tensors(param, shown)
                param.__dict__.update(kept)
                self.point_at_shard(i)

    def holds_nothing(self, param: nn.Parameter) -> bool:
        """Return False, because every rank has a part of each gradient, even if that part is empty.
        Local.
        """
        return False

    def scatter_full(self, full: Sequence[Tensor]) -> None:
        """Write full values as ``WholeValues.scatter_full`` does, except tensors on the meta
        device. Local.
        """
        for i, tensor in enumerate(full):
            if not tensor.is_meta:
                self.flat.write(i, self._own(tensor, i))

    def announce_grads(self) -> None:
        """Do nothing, because torch's functions on DTensor gradients are collective already."""


def check_materialized(unit: RowUnit, names: list[str]) -> None:
    """Raise torch's ``RuntimeError`` if parameters (``names``) are on the meta device when a
    forward begins.
    """
    if names:
        raise RuntimeError(
            "FSDP parameters should be materialized from meta device before training, but the "
            f"following were still on meta device: {names}\n"
            "For example, call module.to_empty(device) to materialize to device and call "
            "module.reset_parameters() on each module to initialize values. (unit "
            f"{unit.name!r}, rank {this_rank(unit.groups.shard)})"
        )


def _take_local(info: ParamInfo) -> Any:
    """Replace a tensor-parallel parameter by its local tensor and return its spec; return None for
    other parameters.
    """
    param: Any = info.param
    if not isinstance(param, DTensor):
        return None
    local = nn.Parameter(param._local_tensor.detach(), requires_grad=param.requires_grad)
    local.__dict__.update(param.__dict__)
    info.param = local
    return param._spec


def _put_first(info: ParamInfo, dim: int) -> None:
    """Replace a parameter by a view of it with ``dim`` as the first dimension."""
    param: Any = info.param
    view: Any = nn.Parameter(param.detach().movedim(dim, 0), requires_grad=param.requires_grad)
    view.__dict__.update(param.__dict__)
    info.param = view


def _as_placed(grad: Any, spec: Any, kept: Sequence[int]) -> Any:
    """Return a gradient with the placements of its parameter, after waiting for a collective in
    flight. Over the mesh dimensions ``kept`` the gradient's placements stay, because the engine
    sums over these dimensions.
    """
    wanted = list(spec.placements)
    for dim in kept:
        wanted[dim] = grad.placements[dim]
    if list(grad.placements) != wanted:
        grad = grad.redistribute(placements=wanted)
    local = grad._local_tensor
    if isinstance(local, AsyncCollectiveTensor):
        grad = around(local.wait(), grad._spec)
    return grad


def sharded_spec(param: Tensor, data_mesh: DataMesh, parallel: Any, cut: int) -> Any:
    """Return the spec (mesh and placements) of the sharded parameter. The parameter is cut along
    its dimension ``cut`` over the data-parallel dimensions of the mesh. These dimensions come
    before those of tensor parallelism. ``parallel``: the tensor-parallel spec, or None. With tensor
    parallelism ``param`` is this rank's local tensor.
    """
    if parallel is None:
        shape = param.shape
        meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), param.dtype)
        return DTensorSpec(data_mesh.mesh, data_mesh.placements(cut), tensor_meta=meta)
    if data_mesh.spmd is not None:
        return _spmd_spec(data_mesh, parallel, cut)
    mesh = joined_mesh(data_mesh.mesh, parallel.mesh)
    rows = [p for p in parallel.placements if isinstance(p, Shard) and p.dim == cut]
    split = 1
    for dim, placement in enumerate(parallel.placements):
        split *= parallel.mesh.size(dim) if placement in rows else 1
    own = list(data_mesh.placements(cut))
    if split > 1:
        own[-1] = StridedShard(cut, split_factor=split)
    return DTensorSpec(mesh, (*own, *parallel.placements), tensor_meta=parallel.tensor_meta)


def _spmd_spec(data_mesh: DataMesh, spec: Any, cut: int) -> Any:
    """Return the spec as ``sharded_spec`` does, on the mesh on which the parameter is distributed
    already. If several mesh dimensions shard, one dimension replaces them, in the place of the
    first. The dimension of replicas comes right before this dimension.
    """
    dims, placements = data_mesh.shard_dims, list(spec.placements)
    split = 1
    for later in range(dims[0] + 1, spec.mesh.ndim):
        split *= spec.mesh.size(later) if spec.placements[later] == Shard(cut) else 1
    own = StridedShard(cut, split_factor=split) if split > 1 else Shard(cut)
    if len(dims) == 1:
        placements[dims[0]] = own
        return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)
    meshes: list[Any] = []
    shown: list[Any] = []
    for dim, name in enumerate(spec.mesh.mesh_dim_names):
        if dim == dims[0]:
            meshes.append(data_mesh.mesh)
            shown += [Replicate(), own] if data_mesh.replicates else [own]
        elif dim not in (*dims, *data_mesh.replicate_dims):
            meshes.append(spec.mesh[name])
            shown.append(placements[dim])
    mesh = DeviceMesh._concatenate(meshes)
    return DTensorSpec(mesh, tuple(shown), tensor_meta=spec.tensor_meta)


def joined_mesh(data: Any, parallel: Any) -> Any:
    """Return the mesh with the dimensions of ``data`` and ``parallel``, which are named parts of
    one mesh or of equal meshes, such as a mesh and its unpickled copy. ``ValueError``: there is no
    such mesh.
    """
    try:
        return DeviceMesh._concatenate([data, parallel])
    except (AssertionError, TypeError, RuntimeError) as error:
        # The meshes have no names, have different ranks, or are the same.
        raise ValueError(
            "FSDP requires the data-parallel and the tensor-parallel mesh to be parts of one mesh "
            f"with mesh_dim_names, but got {data} and {parallel}: use "
            "init_device_mesh(..., mesh_dim_names=('dp', 'tp')), mesh['dp'] and mesh['tp']"
        ) from error
