"""Lazy initialisation of a tree of units, at the first use of the outermost host.

A host (``UnitHost``) is an object that owns a unit. Lazy initialisation finds the units and their
nesting depths, checks the options that must be equal in a tree, passes the units to the engine
(``fsdpc._engine.tree.Tree``) and sets the precision line. An inner host that was a root before
joins the outer host's tree.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdpc import _C
from fsdpc._comm import wire as _wire
from fsdpc._comm.channel import this_rank
from fsdpc._engine import hooked as _hooked
from fsdpc._engine import thaw as _thaw
from fsdpc._engine.companions import explain
from fsdpc._engine.compiled import call_untraced
from fsdpc._engine.host import FrontEnd
from fsdpc._engine.interop import refuse_export
from fsdpc._engine.marks import attach_marked, hosts
from fsdpc._engine.registered import Watch
from fsdpc._engine.tree import Tree

logger = logging.getLogger("fsdpc")

_SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def lazy_init(root: Any) -> None:
    """Make ``root`` the root of its tree unless it belongs to a tree already. Collective over the
    units' groups.

    If a unit belongs to another root's tree, that tree is detached, and is rebuilt at its next use.
    ``StateError``: the other root is in forward or backward. ``ValueError``: options or devices of
    the units differ. ``MismatchError``: ranks have different trees.
    """
    if root._is_root is not None and (root._unit is None or root._unit.tree is not None):
        return
    refuse_export()
    front: FrontEnd = root._front
    placed = list(front.placed(front.modules(root)))
    members = [member for _, _, member in placed]
    front.check(members)
    _check_one_device(front, members)
    for member in members:
        _leave_tree(member, root)
    for name, _, member in placed:
        member._is_root = member is root
        member._root = weakref.ref(root)
        front.prepare(member, name)
    units = [(depth, member._unit) for _, depth, member in placed if member._unit is not None]
    if root._unit is None and units:
        units = [(0, front.pass_unit(root)), *((depth + 1, unit) for depth, unit in units)]
    try:
        _attach_tree(root, units)
    except BaseException as error:
        explain(error, "the first forward, making slots", placed=units)
        raise
    root.precision_line = precision_line(root, [unit for _, unit in units])
    if root.rank == 0:
        logger.info(root.precision_line)


def _leave_tree(member: Any, root: Any) -> None:
    """Undo the lazy initialisation of the root to which ``member`` belonged before.

    ``StateError``: the previous root is in forward or backward.
    """
    tree = None if member._unit is None else member._unit.tree
    if tree is not None and tree.training_state != "idle":
        raise _C.StateError(
            f"unit {member._unit.name!r} is in {tree.training_state} as part of another model on "
            f"rank {this_rank(member._unit.groups.shard)}, so {root._front.describe(root)} cannot "
            "use it now: finish the other model's step first, or give each model its own units "
            "(copy.deepcopy)"
        )
    if not release(member) and tree is not None:  # if the old tree's root was deleted
        tree.detach()


def start_at_first_use(unit: Any, host: Any) -> None:
    """Let the first hook of ``unit`` initialise the tree of ``host``. Local."""
    this = weakref.ref(host)
    unit.flat.on_unattached = lambda: call_untraced(lazy_init, this())


def release(host: Any) -> bool:
    """Undo the lazy initialisation of the host's root, if there is one: the root's units belong to
    no tree until their next use. Return whether there was a root. Local.
    """
    root = None if host._root is None else host._root()
    if root is None:
        return False
    if root._tree is not None:
        root._tree.detach()
    for handle in root._mark_handles:
        handle.remove()
    root._mark_handles = []
    if root._pass_unit is not None:
        root._pass_unit = None
        root._front.forget_pass_unit(root)
    for _, _, member in root._front.placed(root._front.modules(root)):
        member._is_root = member._root = member._tree = None
    return True


def _check_one_device(front: FrontEnd, members: list[Any]) -> None:
    names: dict[torch.device, str] = {}
    for member in members:
        if member._unit is not None:
            names.setdefault(member.compute_device, member._unit.name)
    if len(names) > 1:
        found = ", ".join(f"{name or '(root)'!r} on {device}" for device, name in names.items())
        raise ValueError(
            f"the units of a model must be on one device, but found {found}: {front.one_device}"
        )


def _attach_tree(root: Any, units: list[tuple[int, Any]]) -> None:
    if not units:
        return
    options = root._front.options(root)
    root._tree = Tree(
        [unit for _, unit in units],
        [depth for depth, _ in units],
        backward_prefetch=options.backward_prefetch,
        forward_prefetch=options.forward_prefetch,
    )
    this = weakref.ref(root)
    root._tree.core.on_thaw = lambda: call_untraced(_thaw_tree, this())
    attach_hooks(root)
    Watch(root)
    one_memory = all(unit.groups.shard.one_memory for _, unit in units)
    if one_memory or root.world_size == 1:
        return
    if not root._mark_handles:
        root._mark_handles = [h for m in root._front.modules(root) for h in attach_marked(m)]
    if root._mark_handles:
        root._tree.core.defer_reduces()


def attach_hooks(root: Any) -> None:
    """Let the functions ``_summing`` of hosts sum gradients in place of the engine. Local."""
    if root._tree is not None:
        placed = root._front.placed(root._front.modules(root))
        _hooked.attach(root._tree, [host for _, _, host in placed if host._unit is not None])


def _thaw_tree(root: Any) -> None:
    """Rebuild the tree after parameters were unfrozen, with memory for their gradients.

    Collective over the units' groups; runs between passes.
    """
    old = root._tree
    old.core.announce(*_thaw.first(old.units))
    _thaw.agree(old.units)
    units = list(zip(old.depths, old.units, strict=True))
    old.detach()
    old.core.close()
    try:
        for _, unit in units:
            _thaw.thaw(unit)
        _attach_tree(root, units)
    except BaseException:
        release(root)  # the next forward retries, on all ranks
        raise
    root.precision_line = precision_line(root, [unit for _, unit in units])


@contextmanager
def no_sync(units: list[Any]) -> Iterator[None]:
    """Do not reduce the gradients of ``units`` inside the block: this rank accumulates unsharded
    gradients in fp32. On exit, also after an exception, the previous setting of each unit is
    restored. Local.
    """
    before = [unit.flat.sync for unit in units]
    for unit in units:
        unit.flat.sync = False
    try:
        yield
    finally:
        for unit, value in zip(units, before, strict=True):
            unit.flat.sync = value


def precision_line(root: Any, units: list[Any]) -> str:
    """Return a line that says in which dtypes the tree stores, computes, reduces and accumulates.
    The line is for the log and for ``model.precision_line``.
    """
    units = [unit for unit in units if unit is not root._pass_unit]
    segments = [segment for unit in units for segment in unit.flat.layout()["segments"]]
    trained = [segment for segment in segments if segment["trainable"]]
    divide = units[0].groups.divide if units else 1
    travels = _dtypes(trained, "reduce")
    rounding = _wire.remark(units[0].groups.shard, travels) if units else ""
    parts = [
        f"fsdpc: storage {_dtypes(segments, 'storage')}",
        f"compute {_dtypes(segments, 'compute')}",
        f"reduce {travels}{rounding}",
        f"accumulate {_dtypes(trained, 'accumulate')}",
        f"optimizer {_dtypes(trained, 'storage')}",
        f"gradients / {divide:g}",
        f"{_count(len(units), 'unit')}{_slots(root)}",
    ]
    return " | ".join(parts)


def _dtypes(segments: list[dict[str, Any]], role: str) -> str:
    """Return short names of the segments' dtypes, e.g. ``fp32`` or ``bf16+fp32``. ``role``: what
    the dtypes are for, such as "storage".
    """
    names = sorted({_SHORT.get(segment[role], segment[role]) for segment in segments})
    return "+".join(names) or "none"


def _slots(root: Any) -> str:
    """Return a text such as ``, 2 gather slots of 436 MB, 1 reduce slot``."""
    if root._tree is None:
        return ""
    stats = root._tree.memory_stats()
    megabytes = stats["gather_slot_bytes"] / 1e6
    size = f"{megabytes:.0f} MB" if megabytes >= 10 else f"{megabytes:.2g} MB"
    gather = f"{_count(stats['gather_slots'], 'gather slot')} of {size}"
    return f", {gather}, {_count(stats['reduce_slots'], 'reduce slot')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def forget_lost(model: nn.Module) -> None:
    """Drop the quantization errors of earlier gradients, after ``model`` has got other values.
    Otherwise error feedback would add these errors to the next gradients. If ``model`` is part of a
    tree, the errors of the whole tree are dropped. Local.
    """
    trees = {host._unit.tree for host in hosts(model) if host._unit is not None}
    for tree in trees - {None}:
        tree.core.forget()


def barrier(model: nn.Module) -> None:
    """Wait until all ranks of ``model`` have called this function. Collective over the units'
    groups.

    Ranks of one host that share memory may have run different numbers of batches without gradients
    since their last backward or barrier. Each of these ranks must have run at least one batch;
    otherwise ``MismatchError`` is raised later if weights change. Ranks that do not share memory
    must have run the same number of batches. While a rank waits in the barrier, other ranks of its
    host can finish their batches. After the barrier all ranks may sum metrics with other libraries,
    change weights, save and evaluate again. ``torch.distributed.barrier`` cannot replace this
    function, because fsdpc does not know which ranks wait in it. For a model without units the
    function returns at once.

    ``TypeError``: ``model`` is not an ``nn.Module``. ``StateError``: ``model`` is in forward or
    backward. ``MismatchError``: another rank calls another collective. ``PeerError``: a rank has
    ended. ``CommTimeout``: a rank does not make the call within ``FSDPC_TIMEOUT``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"barrier expects an nn.Module but got {type(model).__name__}")
    units = [host._unit for host in hosts(model) if host._unit is not None]
    trees = [tree for tree in dict.fromkeys(unit.tree for unit in units) if tree is not None]
    for tree in trees:
        if tree.training_state != "idle":
            raise _C.StateError(
                f"fsdpc.barrier was called in {tree.training_state}: call it between two batches"
            )
    units += [unit for tree in trees for unit in tree.units]  # a tree may be larger than ``model``
    for comm in {id(comm): comm for unit in units for comm in unit.groups.comms}.values():
        comm.barrier("fsdpc.barrier")
    for tree in trees:
        tree.core.meet()


def memory_stats(model: nn.Module) -> dict[str, int]:
    """Return the bytes that the engine has allocated for ``model`` on this rank, by purpose. Local.

    The values are sums of ``Tree.memory_stats()`` over the trees in ``model``; the dict is empty
    before the first forward. On a GPU, slots (``gather_bytes``, ``reduce_bytes``, ``spare_bytes``)
    are mapped from the driver and are not in torch's statistics. ``gather_bytes`` and
    ``reduce_bytes`` include ``coded_bytes`` (gathered codes, and what error feedback keeps). These
    coded bytes are not in slots. Like the memory of all other keys (shards and shard gradients
    unless offloaded, gradients of ``no_sync``), the coded bytes are in torch's cache and in
    ``torch.cuda.memory_allocated()``. ``sent_bytes`` is the number of bytes that this rank has sent
    for its units: over a wire to other hosts, or over NCCL to other ranks (computed as for NCCL's
    rings). Bytes that a replayed CUDA graph sends are not counted. ``TypeError``: ``model`` is not
    an ``nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"memory_stats expects an nn.Module but got {type(model).__name__}")
    trees = {id(host._tree): host._tree for host in hosts(model) if host._tree is not None}
    total: dict[str, int] = {}
    for tree in trees.values():
        for key, value in tree.memory_stats().items():
            total[key] = total.get(key, 0) + value
    return total
