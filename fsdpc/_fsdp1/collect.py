"""Functions that find a unit's modules, the unit's parameters with all their registration sites,
and the modules and parameters that the unit ignores.

A unit manages every parameter below its module that is neither ignored nor below a nested unit. A
parameter with several registration sites (tied weights) appears once. A parameter tied across two
units is an error, because two units that both shard the parameter would silently untie it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdpc._comm.channel import this_rank
from fsdpc._engine.lowbit import check_memory, scales
from fsdpc._engine.modules import collect, join, walk
from fsdpc._engine.unit import ParamInfo
from fsdpc._engine.writeback import owner_of, set_owner
from fsdpc._fsdp1.names import clean_fqn
from fsdpc.api import FlatParameter


@dataclass
class Ignored:
    """The ignored modules, with all modules below them, and the ignored parameters. Both include
    what nested units ignore.
    """

    modules: set[nn.Module] = field(default_factory=set)
    params: set[nn.Parameter] = field(default_factory=set)

    def everything(self) -> list[nn.Module | nn.Parameter]:
        return [*self.modules, *self.params]

    def others(self, root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters below ``root`` that are not ignored, with their clean names."""
        return ((clean_fqn(n), p) for n, p in root.named_parameters() if p not in self.params)


def is_unit_module(module: nn.Module) -> bool:
    """Return whether ``module`` is an FSDP instance. The function reads a class attribute, because
    an import of the wrapper class would be circular.
    """
    return getattr(type(module), "_fsdpc_is_unit", False)


def unit_modules(module: nn.Module) -> list[Any]:
    """Return all FSDP instances in ``module``, including ``module`` itself, depth first."""
    return [child for child in module.modules() if is_unit_module(child)]


def owned_modules(
    root: nn.Module, ignored: set[nn.Module], *, shared_twice: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``(clean name, module)`` in registration order, without nested FSDP instances and
    ignored modules and without the modules below them.

    A module registered twice is yielded once or, with ``shared_twice``, under each name.
    """

    def left_out(module: nn.Module) -> bool:
        return module in ignored or is_unit_module(module)

    for name, module in walk(root, left_out, shared_twice=shared_twice):
        yield clean_fqn(name), module


def own_params(root: nn.Module, ignored: Ignored) -> Iterator[nn.Parameter]:
    """Yield the parameters of ``owned_modules`` that are not ignored, each as often as it is
    registered.
    """
    for _, module in owned_modules(root, ignored.modules):
        for param in module._parameters.values():
            if param is not None and param not in ignored.params:
                yield param


def collect_infos(root: nn.Module, ignored: Ignored, unit_name: str) -> list[ParamInfo]:
    """Return the parameters of the unit around ``root`` in registration order, each once with all
    its registration sites.

    Local. ``ValueError``: a parameter that another unit shards (tied across units), a torch
    FlatParameter, a DTensor, or a parameter below a DDP module. ``RuntimeError``: a parameter on
    the meta device.
    """
    modules = list(owned_modules(root, ignored.modules))
    for name, module in modules:
        if isinstance(module, DistributedDataParallel):
            _check_replicated(module, name, ignored, unit_name)
    return collect(
        modules,
        lambda param: param in ignored.params,
        lambda param, name: _check_param(param, name, unit_name),
        f"unit {unit_name!r}",
    )


def _check_replicated(module: nn.Module, name: str, ignored: Ignored, unit_name: str) -> None:
    for inner, param in module.named_parameters():
        if param not in ignored.params and owner_of(param) is None:
            raise ValueError(
                f"parameter {join(name, inner)!r} of unit {unit_name!r} is replicated by "
                "DistributedDataParallel, but only one of DDP and FSDP can average its gradient: "
                "list the DDP module in ignored_modules, or wrap the module inside DDP"
            )


def _check_param(param: nn.Parameter, name: str, unit_name: str) -> None:
    owner = owner_of(param)
    if owner is not None and owner.dtensors:
        raise ValueError(
            f"parameter {name!r} of unit {unit_name!r} is sharded by fully_shard already, in unit "
            f"{owner.name!r}: use FullyShardedDataParallel or fully_shard for a module, not both"
        )
    if owner is not None:
        raise ValueError(
            f"parameter {name!r} of unit {unit_name!r} is tied to a parameter of unit "
            f"{owner.name!r}, but only one unit can shard a parameter: wrap the tied modules in "
            "one unit (leave them out of the wrap policy), or list the parameter in "
            "ignored_states"
        )
    if isinstance(param, FlatParameter) or getattr(param, "_is_flat_param", False):
        raise ValueError(
            f"parameter {name!r} of unit {unit_name!r} belongs to torch's "
            "FullyShardedDataParallel: wrap the module with torch's class or fsdpc's, not both"
        )
    if hasattr(param, "placements") and hasattr(param, "device_mesh"):
        names = param.device_mesh.mesh_dim_names  # type: ignore[attr-defined]
        raise ValueError(
            f"parameter {name!r} of unit {unit_name!r} is a DTensor ({param.placements} over the "
            f"mesh dimensions {names or 'without names'}); fsdpc shards plain parameters: list it "
            "in ignored_states and average its gradient over the data-parallel ranks yourself, or "
            "shard this model with torch's fully_shard"
        )
    what = f"parameter {name!r} of unit {unit_name!r}"
    if hasattr(param, "fsdp_pre_all_gather"):
        check_memory(
            param,
            what,
            "shard the module by fully_shard, which calls its gather (fsdp_pre_all_gather), or "
            "build it of plain parameters (torchao: enable_fsdp_float8_all_gather=False)",
        )
    check_memory(param, what, "list it in ignored_states, and every rank keeps it")
    if param.is_meta:
        raise RuntimeError(
            f"parameter {name!r} of unit {unit_name!r} is still on the meta device: "
            "param_init_fn must materialise it"
        )


def claim(infos: list[ParamInfo], unit: Any) -> None:
    """Record ``unit`` as the owner of the parameters in ``infos``. Otherwise parameters tied across
    units would not be detected. Local.
    """
    for info in infos:
        set_owner(info.param, unit)


def find_ignored(root: nn.Module, ignored_modules: Any, ignored_states: Any) -> Ignored:
    """Return the modules and parameters to ignore: those in ``ignored_modules`` or in
    ``ignored_states``, and those that nested units ignore. Local. Raises torch's errors:
    ``ValueError`` for both arguments at once, for mixed or wrong element types and for FSDP
    instances; ``TypeError`` for a value that is not iterable.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time. Please just "
            "pass ignored_states."
        )
    params: list[nn.Parameter] = []
    if ignored_states is not None:
        modules, params = _split_states(_as_list("ignored_states", ignored_states))
    else:
        modules = _as_list("ignored_modules", ignored_modules)
        _check_all_modules(modules)
    ignored = Ignored()
    ignored.modules = _with_children(modules)
    if root in ignored.modules:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will "
            "result in all parameters being ignored and is not well-supported: "
            f"{type(root).__name__}",
            stacklevel=3,
        )
    ignored.params = set(params)
    for module in ignored.modules:
        ignored.params.update(p for p in module._parameters.values() if p is not None)
    for nested in unit_modules(root):
        ignored.modules |= nested._ignored.modules
        ignored.params |= nested._ignored.params
    return ignored


def _as_list(name: str, value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, Iterable):
        raise TypeError(
            f"`{name}` should be an iterable of `torch.nn.Module`s but got {type(value)}"
        )
    return list(value)


def _split_states(states: list[Any]) -> tuple[list[nn.Module], list[nn.Parameter]]:
    if all(isinstance(state, nn.Parameter) for state in states):
        return [], states
    if all(isinstance(state, nn.Module) for state in states):
        return states, []
    types = sorted({type(state) for state in states}, key=repr)
    raise ValueError(
        "ignored_states expects all nn.Parameter or all nn.Module list elements but got types "
        f"{types}"
    )


def _check_all_modules(modules: list[Any]) -> None:
    if not all(isinstance(module, nn.Module) for module in modules):
        types = sorted({type(module) for module in modules}, key=repr)
        raise ValueError(f"ignored_modules expects nn.Module list elements but got types {types}")


def _with_children(modules: list[nn.Module]) -> set[nn.Module]:
    """Return the modules and all modules below them, except nested FSDP instances and the modules
    that these instances manage.
    """
    found: set[nn.Module] = set()
    for module in modules:
        if is_unit_module(module):
            raise ValueError("`ignored_modules` should not include FSDP modules")
        found.update(child for _, child in owned_modules(module, set()))
    return found


def sync_states(root: nn.Module, infos: list[ParamInfo], groups: Any, device: torch.device) -> None:
    """Broadcast parameters and buffers from rank 0. Collective over the unit's groups: the
    broadcast runs over the replication group first and over the sharding group second, so that
    every rank of every sharding group gets rank 0's values. The broadcast runs on ``device``;
    buffers of ignored modules may be on another device.
    """
    tensors: list[tuple[str, torch.Tensor]] = [(info.name, info.param) for info in infos]
    for info in infos:
        tensors += [(f"{info.name}.{key}", value) for key, value in scales(info.param)]
    tensors += list(_unsynced_buffers(root))
    for comm in reversed(groups.comms):
        for name, tensor in tensors if comm.world > 1 else ():
            _broadcast(comm, name, tensor.detach(), device)


def _unsynced_buffers(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers below ``root``, including those of ignored modules, except the buffers that
    nested units have already broadcast.
    """
    done: set[int] = set()
    for nested in unit_modules(root):
        if nested._options.sync_module_states:
            done.update(id(buffer) for buffer in nested.buffers())
    for name, buffer in root.named_buffers():
        if id(buffer) not in done:
            yield clean_fqn(name), buffer


def _broadcast(comm: Any, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.is_meta:
        raise RuntimeError(
            f"sync_module_states: {name!r} is on the meta device on rank {this_rank(comm)}; "
            "ignored modules are not materialised: call to_empty() on them before wrapping"
        )
    if tensor.numel() == 0:
        return
    dense = tensor.to(device).contiguous()
    comm.broadcast(dense, root=0, what=f"sync_module_states {name}")
    if dense is not tensor:
        tensor.copy_(dense)
