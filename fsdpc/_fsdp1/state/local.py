"""LOCAL_STATE_DICT of one unit: the unit's flat parameters without copies, each as a
``ShardedTensor`` under ``_flat_param``.

The dict loads only with the same wrapping. With another number of ranks it loads only after
``torch.distributed.checkpoint`` has resharded it. With ``use_orig_params`` the dict also has this
rank's elements of each parameter under the parameter's name, as in torch. Loading reads only the
flat parameters, so that a dict loads with the other value of ``use_orig_params`` too.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdpc._engine import writeback as _writeback
from fsdpc._engine.device import CPU
from fsdpc._fsdp1.names import FSDP_PREFIX, flat_param_name
from fsdpc._fsdp1.state.keys import managed_names
from fsdpc._spans.rows import dtype_of, sharded_tensor
from fsdpc._torch import EnumerableShardingSpec, ShardedTensor

# The shards do not have torch's sizes, so a value's spec lists the sizes. ``torch.load`` with
# ``weights_only=True`` accepts only allowed classes, so allow the class of such specs.
torch.serialization.add_safe_globals([EnumerableShardingSpec])


def refuse_mesh(member: Any) -> None:
    """Raise torch's ``RuntimeError`` if the model was built with a device mesh. Local."""
    if member._device_mesh is not None:
        name = member._name if member._unit is None else member._unit.name
        raise RuntimeError(
            "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with "
            "LOCAL_STATE_DICT. Please set state_dict_type to SHARDED_STATE_DICT to get DTensor "
            f"state_dict. (unit {name!r} was built with device_mesh)"
        )


def check(member: Any) -> None:
    """Call ``refuse_mesh``, and raise ``RuntimeError`` inside ``summon_full_params``."""
    refuse_mesh(member)
    if member._summoned:
        raise RuntimeError(
            f"unit {member._unit.name!r} has no LOCAL_STATE_DICT inside summon_full_params: leave "
            "the context first"
        )


def before_save(member: Any) -> None:
    """Check that the unit can be saved, and copy the user's changes into the shard. The modules
    then save their parameters themselves. Local.
    """
    check(member)
    _writeback.adopt_values(member._unit)


def after_save(member: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace flat parameters by ShardedTensors. Local."""
    unit = member._unit
    for index, (segment, flat) in enumerate(_flats(unit)):
        key = prefix + flat_param_name(index)
        if key in state_dict or unit.use_orig_params:
            state_dict[key] = _wrap(unit, segment, flat)


def before_load(
    member: Any, state_dict: dict[str, Any], prefix: str, error_msgs: list[str]
) -> None:
    """Copy this rank's part of the loaded values into this rank's shard, and put the unit's own
    tensors into ``state_dict``. The modules therefore load what they have already. Local.

    A value of another size is skipped and reported in ``error_msgs``.
    """
    check(member)
    unit = member._unit
    _writeback.adopt_values(unit)
    found = []
    for index, (segment, flat) in enumerate(_flats(unit)):
        key = prefix + FSDP_PREFIX + flat_param_name(index)
        if key not in state_dict:
            continue
        own = _own_part(unit, segment, flat)
        part = _part_of(state_dict[key])
        if part is None or part.shape != own.shape:
            error_msgs.append(
                f"While loading {prefix}{flat_param_name(index)} of unit {unit.name!r}: rank "
                f"{unit.groups.shard.rank} holds {own.numel()} elements, but the value has "
                f"{'no shard for this rank' if part is None else part.numel()}: a LOCAL_STATE_DICT "
                "needs the same wrapping and number of ranks"
            )
        else:
            own.copy_(part)
        state_dict[key] = flat
        found.append((key, segment))
    _settle_originals(member, state_dict, prefix, [segment for _, segment in found], error_msgs)
    if unit.use_orig_params:
        for key, _ in found:
            del state_dict[key]


def _settle_originals(
    member: Any,
    state_dict: dict[str, Any],
    prefix: str,
    loaded: list[dict[str, Any]],
    error_msgs: list[str],
) -> None:
    """Replace the values of original parameters, which a dict saved with ``use_orig_params`` has in
    addition to the flat parameters. If this unit has ``use_orig_params``, its modules load their
    current values, which come from the loaded flat parameters. Otherwise the values are removed,
    and the modules load nothing.
    """
    unit = member._unit
    layout = unit.flat.layout()
    for name, i in managed_names(member).items():
        key = prefix + FSDP_PREFIX + name
        has_flat = layout["segments"][layout["params"][i]["segment"]] in loaded
        if key in state_dict and not has_flat:
            error_msgs.append(
                "No `FlatParameter` in `state_dict` for this FSDP instance but it has parameters: "
                f"the LOCAL_STATE_DICT has {prefix}{name} of unit {unit.name!r} without its flat "
                "parameter; set the state dict type used for saving"
            )
        if not unit.use_orig_params:
            state_dict.pop(key, None)
        elif key in state_dict or has_flat:
            state_dict[key] = unit.infos[i].param.detach()


def after_load(member: Any) -> None:
    """A no-op. Local."""


def _flats(unit: Any) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Return the unit's segments and this rank's flat parameter of each segment, trainable segments
    first.
    """
    segments = unit.segments()
    flats = unit.flat_params or [unit.make_flat_param(*each) for each in segments]
    return [(segment, flat.detach()) for (_, segment), flat in zip(segments, flats, strict=True)]


def _lengths(unit: Any, segment: dict[str, Any]) -> list[int]:
    """Return the number of elements of a flat parameter on each rank, without the padding at the
    end.
    """
    piece, numel = segment["piece_numel"], segment["numel"]
    return [min(max(numel - rank * piece, 0), piece) for rank in range(unit.groups.shard.world)]


def _own_part(unit: Any, segment: dict[str, Any], flat: torch.Tensor) -> torch.Tensor:
    return flat[: _lengths(unit, segment)[unit.groups.shard.rank]]


def _part_of(value: Any) -> torch.Tensor | None:
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        return shards[0].tensor if shards else torch.empty(0, dtype=dtype_of(value), device=CPU)
    return value if type(value) is torch.Tensor else None


def _wrap(unit: Any, segment: dict[str, Any], flat: torch.Tensor) -> ShardedTensor:
    piece, lengths = segment["piece_numel"], _lengths(unit, segment)
    blocks = [([rank * piece], [length]) for rank, length in enumerate(lengths)]
    own, pg = _own_part(unit, segment, flat), unit.groups.shard_pg
    return sharded_tensor(own, [sum(lengths)], blocks, pg)
