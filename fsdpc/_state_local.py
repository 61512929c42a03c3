"""LOCAL_STATE_DICT of one unit: its flat parameters as they lie, one ``ShardedTensor`` each under
``_flat_param``, without copies. It fits the same wrapping only, and another number of ranks only
where ``torch.distributed.checkpoint`` reshards it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharding_spec import ShardMetadata

from fsdpc._device import CPU
from fsdpc._names import FSDP_PREFIX, flat_param_name
from fsdpc._sharded import device_of


def check(member: Any) -> None:
    """``RuntimeError`` where the unit has no flat parameters to show, as in torch."""
    if member._device_mesh is not None:
        raise RuntimeError(
            "LOCAL_STATE_DICT does not exist for a model built with device_mesh: set "
            "StateDictType.SHARDED_STATE_DICT to get DTensors"
        )
    if member._unit.use_orig_params:
        raise RuntimeError(
            "LOCAL_STATE_DICT does not exist with use_orig_params=True, which has no flat "
            "parameters: set StateDictType.SHARDED_STATE_DICT"
        )
    if member._summoned:
        raise RuntimeError("LOCAL_STATE_DICT does not exist inside summon_full_params")


def before_save(member: Any) -> None:
    """Nothing to prepare: the modules write the flat parameters themselves. Local."""
    check(member)


def after_save(member: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Flat parameters become ShardedTensors. Local."""
    for index in range(len(member._unit.flat_params)):
        key = prefix + flat_param_name(index)
        if key in state_dict:
            state_dict[key] = _wrap(member._unit, index)


def before_load(
    member: Any, state_dict: dict[str, Any], prefix: str, error_msgs: list[str]
) -> None:
    """Copy this rank's part into its shard; the module then finds what it has. Local.

    A value that does not fit is reported in ``error_msgs`` and left out.
    """
    check(member)
    unit = member._unit
    for index, flat in enumerate(unit.flat_params):
        key = prefix + FSDP_PREFIX + flat_param_name(index)
        if key not in state_dict:
            continue
        own = _own_part(unit, index)
        part = _part_of(state_dict[key])
        if part is None or part.shape != own.shape:
            error_msgs.append(
                f"While loading {prefix}{flat_param_name(index)} of unit {unit.name!r}: rank "
                f"{unit.groups.shard.rank} holds {own.numel()} elements, but the value "
                f"{'no part of its own' if part is None else part.numel()}: a LOCAL_STATE_DICT "
                "fits the same wrapping on the same number of ranks only"
            )
        else:
            own.copy_(part)
        state_dict[key] = flat.detach()


def after_load(member: Any) -> None:
    """Nothing is left to do. Local."""


def _lengths(unit: Any, index: int) -> list[int]:
    """How many elements of a flat parameter each rank holds, padding at its end left out."""
    segment = unit.flat_segments[index]
    piece, numel = segment["piece_numel"], segment["numel"]
    return [min(max(numel - rank * piece, 0), piece) for rank in range(unit.groups.shard.world)]


def _own_part(unit: Any, index: int) -> torch.Tensor:
    length = _lengths(unit, index)[unit.groups.shard.rank]
    return unit.flat_params[index].detach()[:length]


def _part_of(value: Any) -> torch.Tensor | None:
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        return shards[0].tensor if shards else torch.empty(0, dtype=value.dtype, device=CPU)
    return value if type(value) is torch.Tensor else None


def _wrap(unit: Any, index: int) -> ShardedTensor:
    own, pg = _own_part(unit, index), unit.groups.shard_pg
    piece = unit.flat_segments[index]["piece_numel"]
    shards = [
        ShardMetadata(
            [rank * piece], [length], device_of(dist.get_global_rank(pg, rank), own.device)
        )
        for rank, length in enumerate(_lengths(unit, index))
        if length > 0
    ]
    local = [Shard(own, shards[pg.rank()])] if own.numel() else []
    metadata = ShardedTensorMetadata(
        shards,
        torch.Size([sum(shard.shard_sizes[0] for shard in shards)]),
        TensorProperties(
            dtype=own.dtype,
            layout=torch.strided,
            requires_grad=False,
            memory_format=torch.contiguous_format,
            pin_memory=False,
        ),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata, pg)
