"""The arguments of the ``FullyShardedDataParallel`` constructor: checks, the sharding strategy in
force and process groups.

Exceptions have the type that torch's FSDP raises for the same mistake. Messages state what was
passed and what to pass instead. Groups are made once per root and passed to nested units, so that
the units of a tree share these groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fsdpc import _C
from fsdpc._comm.bootstrap import read_timeout, this_host
from fsdpc._comm.channel import Channel, store_of
from fsdpc._torch import _Policy, default_group
from fsdpc.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

HYBRID = frozenset({ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2})
RESHARD_AFTER_FORWARD = frozenset({ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD})


@dataclass(frozen=True)
class GroupChoice:
    """The process groups of a unit. Values are sharded over ``shard`` and, with a HYBRID strategy,
    replicated over ``replicate``.
    """

    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup | None


@dataclass(frozen=True)
class Options:
    """The arguments that a constructor got for its unit, unchanged. Nested units inherit these
    arguments.
    """

    process_group: Any
    sharding_strategy: ShardingStrategy | None
    cpu_offload: CPUOffload | None
    backward_prefetch: BackwardPrefetch | None
    mixed_precision: MixedPrecision | None
    param_init_fn: Callable[[nn.Module], None] | None
    device_id: int | torch.device | None
    sync_module_states: bool
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    device_mesh: DeviceMesh | None

    def check(self) -> None:
        """Check the types of the options (``TypeError``, ``ValueError``); torch accepts most wrong
        types here and fails later. Local.
        """
        _check_type("sharding_strategy", self.sharding_strategy, ShardingStrategy)
        _check_type("cpu_offload", self.cpu_offload, CPUOffload)
        _check_type("backward_prefetch", self.backward_prefetch, BackwardPrefetch)
        _check_type("mixed_precision", self.mixed_precision, MixedPrecision)
        if self.param_init_fn is not None and not callable(self.param_init_fn):
            raise ValueError(
                f"Expected {self.param_init_fn} to be callable but got {type(self.param_init_fn)} "
                "(param_init_fn)"
            )

    def for_children(
        self, groups: GroupChoice, ignored_params: set[nn.Parameter]
    ) -> dict[str, Any]:
        """Return the constructor's arguments for nested units, which use the same groups. Local."""
        given = {option.name: getattr(self, option.name) for option in fields(self)}
        if self.sharding_strategy in HYBRID and self.device_mesh is None:
            given["process_group"] = (groups.shard, groups.replicate)
        return {**given, "ignored_states": ignored_params}

    def for_unit(self, strategy: ShardingStrategy) -> dict[str, Any]:
        """Return the keyword arguments of the engine's ``Unit``. ``strategy``: the strategy in
        force (see ``resolve_strategy``). Local.
        """
        mixed = self.mixed_precision or MixedPrecision()
        if mixed.param_dtype is not None:
            # A single rank shards nothing, but it can still free low-precision copies after
            # forward. The strategy is therefore the one that the user passed, not NO_SHARD.
            strategy = self.sharding_strategy or ShardingStrategy.FULL_SHARD
        return {
            "param_dtype": mixed.param_dtype,
            "reduce_dtype": mixed.reduce_dtype,
            "reshard_after_forward": strategy in RESHARD_AFTER_FORWARD,
            "use_orig_params": self.use_orig_params,
            "keep_low_precision_grads": mixed.keep_low_precision_grads,
            "offload": self.cpu_offload is not None and self.cpu_offload.offload_params,
        }


def check_module(module: Any) -> None:
    """Check the first argument: raise ``TypeError`` unless it is an ``nn.Module``, and warn of
    containers without a forward. Local.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"FullyShardedDataParallel wraps an nn.Module but got {type(module).__name__}"
        )
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        warnings.warn(
            "FSDP will not all-gather parameters for containers that do not implement forward: "
            f"{type(module).__name__}. Wrap its elements, or the module that calls them.",
            stacklevel=3,
        )


def check_model(call: str, model: Any) -> None:
    """Raise ``TypeError`` unless ``model`` is an ``nn.Module``. The most frequent cause is a wrong
    order of the arguments.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{call}: the model must be an nn.Module but got {type(model).__name__}; check the "
            "order of the arguments"
        )


def check_optimizer(call: str, optim: Any) -> None:
    """Raise ``TypeError`` unless ``optim`` has ``param_groups``, as every optimizer has."""
    if not hasattr(optim, "param_groups"):
        raise TypeError(
            f"{call}: optim must be an optimizer but got {type(optim).__name__}; check the order "
            "of the arguments"
        )


def check_policy(policy: Any) -> None:
    """Raise ``ValueError`` unless ``policy`` is an auto-wrap policy or None. Local."""
    if not (policy is None or callable(policy) or isinstance(policy, _Policy)):
        raise ValueError(
            "auto_wrap_policy must be a callable (module, recurse, nonwrapped_numel) -> bool, a "
            f"ModuleWrapPolicy or a CustomPolicy, but got {type(policy).__name__}"
        )


def _check_type(name: str, value: Any, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        of_other = isinstance(value, MixedPrecisionPolicy | OffloadPolicy)
        raise TypeError(
            f"{name} must be a torch.distributed.fsdp.{kind.__name__} or None, "
            f"but got {type(value).__name__}: {value!r}"
            + (": policies, and what they add, are for fully_shard" if of_other else "")
        )


def resolve_strategy(strategy: ShardingStrategy | None, groups: GroupChoice) -> ShardingStrategy:
    """Return the strategy in force: NO_SHARD if the sharding group has one rank, otherwise the
    given strategy, which is FULL_SHARD by default.

    Warns as torch does: ``UserWarning`` on the switch to NO_SHARD, ``FutureWarning`` on an explicit
    NO_SHARD.
    """
    if groups.shard.size() == 1:
        if strategy is not ShardingStrategy.NO_SHARD:
            warnings.warn(
                "FSDP is switching to use `NO_SHARD` instead of "
                f"{strategy or ShardingStrategy.FULL_SHARD} since the world size is 1.",
                stacklevel=3,
            )
        return ShardingStrategy.NO_SHARD
    if strategy is ShardingStrategy.NO_SHARD:
        warnings.warn(
            "The `NO_SHARD` sharding strategy is deprecated. If having issues, please use "
            "`DistributedDataParallel` instead.",
            FutureWarning,
            stacklevel=3,
        )
    return strategy or ShardingStrategy.FULL_SHARD


def resolve_groups(
    process_group: Any,
    strategy: ShardingStrategy | None,
    auto_wrap_policy: Any,
    device_mesh: DeviceMesh | None,
) -> GroupChoice:
    """Return the unit's process groups. Collective over the default group if a HYBRID strategy
    makes groups by host. ``ValueError``, ``TypeError``: arguments contradict each other or the
    strategy.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError(
            "Cannot pass both process_group and device_mesh at the same time. Please just pass "
            "only one of them."
        )
    if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"device_mesh must be a DeviceMesh but got {type(device_mesh).__name__}")
    if strategy in HYBRID:
        return _hybrid_groups(process_group, strategy, auto_wrap_policy, device_mesh)
    if device_mesh is not None:
        return GroupChoice(device_mesh.get_group(mesh_dim=0), None)
    if process_group is None:
        return GroupChoice(_default_group(), None)
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(
            "Expected process_group to be a dist.ProcessGroup or None with "
            f"{strategy or ShardingStrategy.FULL_SHARD} but got {type(process_group)}; a pair of "
            "groups needs HYBRID_SHARD or _HYBRID_SHARD_ZERO2"
        )
    return GroupChoice(process_group, None)


def _hybrid_groups(
    process_group: Any,
    strategy: ShardingStrategy | None,
    auto_wrap_policy: Any,
    device_mesh: DeviceMesh | None,
) -> GroupChoice:
    if device_mesh is not None:
        if device_mesh.ndim != 2:
            raise ValueError(
                f"Expected device_mesh to have ndim=2 but got {device_mesh.ndim}: dimension 0 "
                "replicates, dimension 1 shards"
            )
        return GroupChoice(
            shard=device_mesh.get_group(mesh_dim=1), replicate=device_mesh.get_group(mesh_dim=0)
        )
    if process_group is None:
        if auto_wrap_policy is None:
            raise ValueError(
                f"Manual wrapping with {strategy} requires explicit specification of process "
                "group or device_mesh. Pass process_group=(shard_group, replicate_group) so that "
                "all units share the same groups."
            )
        return groups_by_host()
    if _is_group_pair(process_group):
        return GroupChoice(shard=process_group[0], replicate=process_group[1])
    raise ValueError(
        "Expected process_group to be passed in as either None or Tuple[dist.ProcessGroup, "
        f"dist.ProcessGroup] but got {type(process_group)}"
    )


def _is_group_pair(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(group, dist.ProcessGroup) for group in value)
    )


def _default_group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise ValueError(
            "Default process group has not been initialized, please make sure to call "
            "init_process_group. (before FullyShardedDataParallel, or pass process_group)"
        )
    return default_group()


def groups_by_host() -> GroupChoice:
    """Make sharding groups of the ranks of each host and replication groups across hosts, and
    return this rank's groups. Collective over all ranks.

    Ranks are on one host if they can share memory and have the same ``FSDPC_HOST``. ``ValueError``,
    on every rank: hosts have different numbers of ranks.
    """
    by_name = _ranks_by_host()
    hosts = list(by_name.values())
    sizes = {len(ranks) for ranks in hosts}
    if len(sizes) != 1:
        found = ", ".join(f"{name.split()[0]} {len(ranks)}" for name, ranks in by_name.items())
        raise ValueError(
            "HYBRID sharding needs the same number of ranks on every host but the hosts have "
            f"{sorted(len(ranks) for ranks in hosts)} ranks ({found}); pass process_group=(shard, "
            "replicate) or a 2-D device_mesh"
        )
    shard, _ = dist.new_subgroups_by_enumeration(hosts)
    replicate, _ = dist.new_subgroups_by_enumeration(
        [list(column) for column in zip(*hosts, strict=True)]
    )
    return GroupChoice(shard=shard, replicate=replicate)


def _ranks_by_host() -> dict[str, list[int]]:
    """Return the ranks grouped by host, with the hosts in the order of their first rank."""
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(_names_of_hosts()):
        hosts.setdefault(name, []).append(rank)
    return hosts


_askings = count()


def _names_of_hosts() -> list[str]:
    """Return each rank's host name. The names are exchanged through the store, because an exchange
    with NCCL would need every rank to have set its GPU.
    """
    group, mine = _default_group(), this_host()
    store, seconds = store_of(group), read_timeout()
    if store is None:
        return [mine] * group.size()
    prefix = f"fsdpc/hosts/{next(_askings)}"
    channel = Channel(store, prefix, group.rank(), group.size(), seconds, "of all ranks")
    names = channel.gather(mine.encode(), "finding the ranks of each host")
    # The store may be in rank 0's process, and is lost if that process ends. Rank 0 may soon fail
    # with an error, so rank 0 waits here until every rank has the names.
    with suppress(_C.CommError):
        channel.gather(b"", "finding the ranks of each host")
    return [name.decode() for name in names]
