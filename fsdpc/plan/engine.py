"""The memory of the engine, computed by the C functions that also size the engine's allocations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fsdpc import _C
from fsdpc.plan.model import Param, Setup, Unit

NARROW = ("bfloat16", "float16")
RESHARDS = ("FULL_SHARD", "HYBRID_SHARD")
Spec = tuple[str, int, str, str, str, bool, int, str, str, bool]
OWN = "own"  # a value of Unit.compute and Unit.reduce: the dtype of the unit's parameters


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on each rank. ``stats`` has the names of ``fsdpc.memory_stats``, ``by_unit`` the
    footprint of every unit, and ``slot_of`` every unit's gather slot (-1: none).
    """

    stats: dict[str, int]
    by_unit: tuple[dict[str, Any], ...]
    slot_of: tuple[int, ...]


def specs_of(unit: Unit, setup: Setup) -> tuple[Spec, ...]:
    """Return the descriptions of parameters from which the engine computes the unit's layout."""
    return tuple(_spec(p, unit, setup) for p in unit.params)


def _spec(param: Param, unit: Unit, setup: Setup) -> Spec:
    storage = param.dtype or setup.storage
    if storage == "uint8":
        return (param.name, param.numel, "uint8", "uint8", "uint8", False, param.row, "", "", False)
    compute = _choice(unit.compute, setup.compute) or storage
    reduce = _choice(unit.reduce, setup.reduce) or default_reduce(compute, setup)
    return (
        param.name,
        param.numel,
        storage,
        compute,
        reduce,
        param.trainable,
        param.row,
        *param.codecs,
    )


def _choice(own: str | None, plans: str | None) -> str | None:
    return None if own == OWN else own or plans


def default_reduce(compute: str, setup: Setup) -> str:
    """Return the dtype in which gradients are sent if the user gives no ``reduce_dtype``. NCCL
    rounds sums of narrow values after each rank, so more than two ranks send float32
    (fsdpc/_comm/wire.py). On one host with NCCL's symmetric kernels a run sends the compute dtype;
    the plan assumes the larger float32 there, too.
    """
    rounds = setup.transport == "stream" and setup.shards > 2
    return "float32" if rounds and compute in NARROW else compute


@lru_cache(maxsize=4096)
def _footprint(
    specs: tuple[Spec, ...],
    world: int,
    align: int,
    grain: int,
    page: int,
    replicas: int,
    offload: bool,
    senders: int,
    foreign: bool,
    to_all: bool,
) -> dict[str, Any]:
    return _C.footprint(
        specs, world, align, grain, page, replicas, offload, senders, foreign, to_all
    )


def _landing_replicas(setup: Setup) -> int:
    """Return ``replicas`` of ``csrc/unit/footprint.h``. 0: there are no replicas; 1: replicas are
    summed in place, by a collective; n > 1: n replicas send each other shares of their sums, which
    need memory.
    """
    swaps = setup.swaps
    if swaps is None:
        apart = setup.transport == "shared" and setup.world > setup.ranks_per_host
        swaps = apart or setup.transport == "wire"
    if setup.replicas == 1:
        return 0
    return setup.replicas if swaps else 1


def footprint(unit: Unit, setup: Setup) -> dict[str, Any]:
    """Return the dictionary of ``_C.footprint`` for one unit; callers must not change it."""
    return _footprint(
        specs_of(unit, setup),
        setup.shards,
        setup.align_bytes,
        setup.range_grain,
        setup.page_bytes,
        _landing_replicas(setup),
        _offloaded(unit, setup),
        0 if setup.transport == "shared" else setup.senders or setup.shards - 1,
        unit.foreign,
        setup.transport == "stream",
    )


def reshards(unit: Unit, setup: Setup) -> bool:
    """Return whether the unit is released after forward. With one shard,
    only a unit that is cast to a compute dtype has a copy that can be released.
    """
    if unit.reshard is not None:
        return unit.reshard
    if setup.shards == 1 and _choice(unit.compute, setup.compute) is None:
        return False
    return setup.strategy in RESHARDS


def engine_memory(units: tuple[Unit, ...], setup: Setup) -> EngineMemory:
    """Return what each rank allocates. Ranks do not differ, because all shards have one size."""
    prints = tuple(footprint(unit, setup) for unit in units)
    slot_of = [-1] * len(units)
    slot_bytes: list[int] = []
    reduce_bytes = reduce_slots = grad_bytes = coded_bytes = 0
    for group in dict.fromkeys(unit.group for unit in units):
        members = [i for i, unit in enumerate(units) if unit.group == group]
        needs = [
            (
                units[i].depth,
                reshards(units[i], setup) and not units[i].keeps,
                prints[i]["direct"],
                prints[i]["range_bytes"],
            )
            for i in members
        ]
        wire = setup.transport == "wire" and setup.shards > 1
        found, sizes = _C.plan_slots(needs, setup.gather_slots, wire)
        for i, slot in zip(members, found, strict=True):
            slot_of[i] = slot + len(slot_bytes) if slot >= 0 else -1
        slot_bytes += sizes
        coded_bytes += _coded_bytes([(found[k], prints[i]) for k, i in enumerate(members)], setup)
        largest = max(prints[i]["reduce_bytes"] for i in members)
        count = _C.plan_reduce_slots(
            setup.shards,
            any(_offloaded(units[i], setup) for i in members),
            largest,
            setup.reduce_slots,
        )
        reduce_slots += count
        receivers = setup.shards - 1 if setup.receivers is None else setup.receivers
        lost_bytes = receivers * sum(prints[i]["lost_bytes"] for i in members)
        reduce_bytes += count * largest + lost_bytes
        inside = [i for i in members if _shares_grads(units[i], setup)]
        grad_bytes += _grad_bytes([prints[i] for i in inside], count)
        grad_bytes += _grad_bytes([prints[i] for i in members if i not in inside], None)
    stats = {
        "gather_bytes": sum(slot_bytes) + coded_bytes,
        "reduce_bytes": reduce_bytes,
        "master_bytes": sum(p["master_bytes"] for p in prints),
        "grad_bytes": grad_bytes,
        "local_bytes": sum(p["local_bytes"] for p in prints) if _keeps_local(setup) else 0,
        "gather_slots": len(slot_bytes),
        "gather_slot_bytes": max((p["range_bytes"] for p in prints), default=0),
        "reduce_slots": reduce_slots,
    }
    return EngineMemory(stats, prints, tuple(slot_of))


def _coded_bytes(placed: list[tuple[int, dict[str, Any]]], setup: Setup) -> int:
    """Return the bytes of buffers for quantized gathers. ``placed``: the gather slot and the
    footprint of each unit. A GPU has one buffer, which units use in turn. A wire has one buffer for
    each slot. Ranks that share memory have none.
    """
    if setup.transport == "stream":
        return max((p["coded_bytes"] for _, p in placed), default=0)
    largest: dict[int, int] = {}
    for slot, print_ in placed:
        if slot >= 0 and setup.transport == "wire" and setup.shards > 1:
            largest[slot] = max(largest.get(slot, 0), print_["coded_bytes"])
    return sum(largest.values())


def _grad_bytes(prints: list[dict[str, Any]], reduce_slots: int | None) -> int:
    """Return the bytes of units' gradients. ``reduce_slots``: the number of reduce slots if the
    units step in backward, else None.
    """
    if reduce_slots is not None and prints:
        sizes = [p["grads_bytes"] for p in prints]
        slots = _C.plan_grad_slots(max(sizes), sum(sizes), reduce_slots)
        if slots:
            return slots * max(sizes)
    return sum(p["grad_bytes"] + p["grad_out_bytes"] + p["partial_bytes"] for p in prints)


def _shares_grads(unit: Unit, setup: Setup) -> bool:
    inside = setup.in_backward if unit.inside is None else unit.inside
    return inside and setup.transport == "stream" and not _offloaded(unit, setup)


def _offloaded(unit: Unit, setup: Setup) -> bool:
    own = setup.offload if unit.offload is None else unit.offload
    return own and setup.transport == "stream"


def _keeps_local(setup: Setup) -> bool:
    return setup.sync == "last" and setup.accumulation > 1
