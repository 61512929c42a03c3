"""Selection of the modules and parameters that one call of ``fully_shard`` manages.

A call manages every parameter below its modules that no earlier call manages and that is not
ignored. A parameter with several registration sites (tied weights) appears once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdpc._engine.lowbit import check_memory
from fsdpc._engine.modules import collect, has_replicate, walk
from fsdpc._engine.unit import ParamInfo
from fsdpc._engine.writeback import owner_of
from fsdpc._fsdp2.args import DataMesh
from fsdpc._fsdp2.extension import extends


def state_of(module: nn.Module) -> Any:
    """Return the state of the call of ``fully_shard`` that got ``module``, or None."""
    return module.__dict__.get("_fsdpc_state")


def _is_apart(module: nn.Module) -> bool:
    """Return whether an earlier ``fully_shard``, or torch's ``replicate``, manages the module."""
    return state_of(module) is not None or has_replicate(module)


def roots_of(modules: list[nn.Module]) -> list[nn.Module]:
    """Return the modules of a list that are not below another module of the list."""
    below = {child for module in modules for child in module.modules() if child is not module}
    return [module for module in dict.fromkeys(modules) if module not in below]


def managed_modules(roots: list[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return ``(name, module)`` in registration order, each module once, without the modules that
    an earlier call or ``replicate`` manages. Names are relative to the root. If there are several
    roots, a name begins with the root's number.
    """
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()
    for number, root in enumerate(roots):
        prefix = f"{number}" if len(roots) > 1 else ""
        for name, module in walk(root, _is_apart, prefix):
            if module not in seen:
                seen.add(module)
                found.append((name, module))
    return found


def collect_infos(
    managed: list[tuple[str, nn.Module]], ignored: set[int], what: str, data_mesh: DataMesh | None
) -> list[ParamInfo]:
    """Return the call's parameters with all their registration sites. ``data_mesh``: None if there
    are no process groups.

    Raises torch's exceptions: ``ValueError`` for a 0-dim parameter, and ``NotImplementedError`` for
    a parameter that is not contiguous. Raises ``ValueError`` for a parameter that another call or
    an FSDP1 unit shards.
    """

    def check(param: nn.Parameter, name: str) -> None:
        _check(param, name, what)
        if data_mesh is not None:
            _check_mesh(param, name, data_mesh)

    return collect(managed, lambda param: id(param) in ignored, check, what)


def _check(param: nn.Parameter, name: str, what: str) -> None:
    owner = owner_of(param)
    if owner is not None and not owner.dtensors:
        raise ValueError(
            f"parameter {name!r} of {what} is sharded by FullyShardedDataParallel already, in unit "
            f"{owner.name!r}: use FullyShardedDataParallel or fully_shard for a module, not both"
        )
    if owner is not None:
        raise ValueError(
            f"Parameter {name!r} of {what} is shared with a parameter already managed by another "
            f"FSDP group, unit {owner.name!r}: pass the modules that share the parameter to one "
            "call of fully_shard, as a list"
        )
    placements = param.placements if isinstance(param, DTensor) else ()
    if any(not isinstance(p, Shard | Replicate) for p in placements):
        raise NotImplementedError(
            f"FSDP only supports 1D TP/EP or 2D EP+TP: parameter {name!r} of {what} is a DTensor "
            f"with placements {placements}"
        )
    if getattr(param, "_is_flat_param", False):
        raise ValueError(
            f"parameter {name!r} of {what} is a flat parameter of FullyShardedDataParallel: use "
            "FullyShardedDataParallel or fully_shard for a module, not both"
        )
    if extends(param) and not isinstance(param, DTensor) and not extends(type(param)):
        raise NotImplementedError(
            f"fsdp_pre_all_gather was set on the parameter {name!r} of {what}, whose shard is "
            "another tensor: set it on param._local_tensor after fully_shard, or in a class"
        )
    if not isinstance(param, DTensor) and not extends(param):
        check_memory(
            param,
            f"parameter {name!r} of {what}",
            "it has no fsdp_pre_all_gather; list it in ignored_params, and every rank keeps it",
        )
    if param.dim() == 0:
        raise ValueError(
            f"fully_shard doesn't support scalar parameters. Change {name} to a 1D tensor with "
            "numel equal to 1."
        )
    if not param.is_contiguous():
        raise NotImplementedError(
            f"FSDP does not support non-contiguous parameters yet: parameter {name!r} of {what} "
            f"has shape {tuple(param.shape)} and strides {param.stride()}"
        )


def _check_mesh(param: nn.Parameter, name: str, data_mesh: DataMesh) -> None:
    """Raise torch's exceptions for an unsupported mesh or placement of a DTensor."""
    if data_mesh.spmd is None:
        if isinstance(param, DTensor) and param.device_mesh.ndim > 2:
            raise NotImplementedError(
                f"FSDP only supports 1D TP/EP or 2D EP+TP: parameter {name!r} is a DTensor with "
                f"placements {param.placements}"
            )
        return
    if not isinstance(param, DTensor):
        raise ValueError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh "
            f"(e.g. via distribute_module). Got plain tensor for parameter {name!r}."
        )
    if param.device_mesh != data_mesh.spmd:
        raise ValueError(
            "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got "
            f"{param.device_mesh} and {data_mesh.spmd} for parameter {name!r}"
        )
    for dim in (*data_mesh.replicate_dims, *data_mesh.shard_dims):
        if not isinstance(param.placements[dim], Replicate):
            raise ValueError(
                f"Expected Replicate() on DP dim {data_mesh.spmd.mesh_dim_names[dim]!r} "
                f"(index {dim}) but got {param.placements[dim]} for parameter {name!r}"
            )


def move_to(device: torch.device, managed: list[tuple[str, nn.Module]], skip: set[int]) -> None:
    """Move parameters and buffers of the managed modules to ``device``, except meta tensors and the
    tensors whose ids are in ``skip``.
    """
    for _, module in managed:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None or id(tensor) in skip or tensor.is_meta or tensor.device == device:
                continue
            if isinstance(tensor, DTensor):
                raise AssertionError(
                    f"Expects DTensor to be moved to {device}, got {tensor.device}"
                )
            tensor.data = tensor.data.to(device)
