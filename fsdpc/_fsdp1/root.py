"""Lazy initialisation of a tree of units, at the first use of its outermost FSDP instance.

It finds the units and their nesting depth, checks the options that must be equal across the tree,
casts buffers, passes the units to the engine (``fsdpc._engine.tree.Tree``) and sets the precision
line. An inner instance that was a root before joins the outer instance's tree.
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
from fsdpc._engine import thaw as _thaw
from fsdpc._engine.compiled import call_untraced
from fsdpc._engine.inputs import preparation
from fsdpc._engine.tree import Tree
from fsdpc._fsdp1 import comm_hooks as _comm_hooks
from fsdpc._fsdp1.collect import is_unit_module, unit_modules
from fsdpc._fsdp1.handle import HandledUnit
from fsdpc._fsdp1.marks import attach_marked
from fsdpc._fsdp1.mixed import cast_buffers
from fsdpc._fsdp1.names import clean_fqn, join
from fsdpc.api import BackwardPrefetch

logger = logging.getLogger("fsdpc")

_SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_PREFETCH = {
    BackwardPrefetch.BACKWARD_PRE: "pre",
    BackwardPrefetch.BACKWARD_POST: "post",
    None: None,
}


def lazy_init(root: Any) -> None:
    """Make ``root`` the root of its tree unless it belongs to a tree already. Collective over the
    units' groups.

    Units of another root leave that root's tree, which is rebuilt at its next use. ``StateError``:
    the other root is in forward or backward. ``ValueError``: options or devices of the units
    differ. ``MismatchError``: ranks have different trees.
    """
    if root._is_root is not None and (root._unit is None or root._unit.tree is not None):
        return
    members = unit_modules(root)
    _check_homogeneous(members)
    _check_one_device(members)
    for member in members:
        _leave_tree(member, root)
    placed = list(placed_units(root))
    for name, _, member in placed:
        member._is_root = member is root
        member._root = weakref.ref(root)
        _prepare_member(member, name)
    units = [(depth, member._unit) for _, depth, member in placed if member._unit is not None]
    if root._unit is None and units:
        units = [(0, _pass_unit(root)), *((depth + 1, unit) for depth, unit in units)]
    _attach_tree(root, units)
    one_memory = all(unit.groups.shard.one_memory for _, unit in units)
    if root._tree is not None and not one_memory and root.world_size > 1:
        marked = attach_marked(root)
        if marked:
            root._tree.core.defer_reduces()
        root._mark_handles += marked
    root.precision_line = precision_line(root)
    if root.rank == 0:
        logger.info(root.precision_line)


def _pass_unit(root: Any) -> HandledUnit:
    """A unit without parameters, for a root that has none: its hooks mark the begin and end of a
    pass through the tree.
    """
    if root._pass_unit is None:
        unit = HandledUnit(
            root._name,
            [],
            root._groups,
            param_dtype=None,
            reduce_dtype=None,
            reshard_after_forward=True,
            use_orig_params=root._use_orig_params,
        )
        root._pass_unit = unit
        this = weakref.ref(root)
        unit.on_unattached = lambda: call_untraced(lazy_init, this())
        root._enter, root._leave = unit.pre_forward_hook, unit.post_forward_hook
    return root._pass_unit


def enter_without_unit(member: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pre-forward hook of an instance without a unit."""
    if member._is_root is None:
        call_untraced(lazy_init, member)
        if member._pass_unit is not None:
            member._enter(member, args, kwargs)


def _leave_tree(member: Any, root: Any) -> None:
    """Undo the lazy initialisation of ``member``'s previous root unless that is ``root``."""
    tree = None if member._unit is None else member._unit.tree
    if tree is not None and tree.training_state != "idle":
        raise _C.StateError(
            f"unit {member._unit.name!r} is in {tree.training_state} as part of another model on "
            f"rank {member.rank}, so {type(root.module).__name__} cannot use it now: finish the "
            "other model's step first, or give each model its own units (copy.deepcopy)"
        )
    before = None if member._root is None else member._root()
    if before is not None:
        release_tree(before)
    elif tree is not None:  # its root was deleted
        tree.detach()


def release_tree(root: Any) -> None:
    """Undo lazy initialisation: the units leave their tree, and the next use determines their root.
    Local.
    """
    if root._tree is not None:
        root._tree.detach()
    for handle in root._mark_handles:
        handle.remove()
    root._mark_handles = []
    if root._pass_unit is not None:
        root._pass_unit = None
        root.forget_unit_hooks()
    for member in unit_modules(root):
        member._is_root = member._root = member._tree = None


def _check_homogeneous(members: list[Any]) -> None:
    for attr in ("_use_orig_params", "limit_all_gathers"):
        values = {getattr(member, attr) for member in members}
        if len(values) > 1:
            name = attr.lstrip("_")
            raise ValueError(
                f"Expects one homogeneous value for {attr} but got {sorted(values)}: pass the "
                f"same {name} to every FullyShardedDataParallel of a model"
            )


def _check_one_device(members: list[Any]) -> None:
    names: dict[torch.device, str] = {}
    for member in members:
        if member._unit is not None:
            names.setdefault(member.compute_device, member._unit.name)
    if len(names) > 1:
        found = ", ".join(f"{name or '(root)'!r} on {device}" for device, name in names.items())
        raise ValueError(
            f"the units of a model must be on one device, but found {found}: pass the same "
            "device_id to every FullyShardedDataParallel of a model"
        )


def placed_units(root: Any) -> Iterator[tuple[str, int, Any]]:
    """``(clean name, nesting depth among units, FSDP instance)`` in module order, each instance
    once.
    """
    seen: set[nn.Module] = set()
    stack: list[tuple[str, int, nn.Module]] = [("", 0, root)]
    while stack:
        name, depth, module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        if is_unit_module(module):
            yield clean_fqn(name), depth, module
            depth += module._unit is not None
        children = [
            (join(name, key), depth, c) for key, c in module._modules.items() if c is not None
        ]
        stack.extend(reversed(children))


def _prepare_member(member: Any, name: str) -> None:
    """Set what depends on the position in the tree: unit name, casts of inputs and buffers."""
    if member._unit is not None:
        member._unit.name = name or member._unit.name
    mixed = member.mixed_precision
    casts = mixed.cast_forward_inputs and member._unit is not None
    casts = casts or (member._is_root and mixed.cast_root_forward_inputs)
    device = member.compute_device
    member._prepare_inputs = preparation(
        device if member._is_root else None, mixed.param_dtype if casts else None
    )
    changed = cast_buffers(
        member._fsdp_wrapped_module,
        member._ignored.modules,
        mixed.buffer_dtype,
        None if device.type == "cpu" else device,
    )
    member._buffer_dtypes.update(changed)


def _attach_tree(root: Any, units: list[tuple[int, Any]]) -> None:
    if not units:
        return
    root._tree = Tree(
        [unit for _, unit in units],
        [depth for depth, _ in units],
        backward_prefetch=_PREFETCH[root.backward_prefetch],
        forward_prefetch=root.forward_prefetch,
        limit_all_gathers=root.limit_all_gathers,
    )
    this = weakref.ref(root)
    root._tree.core.on_thaw = lambda: call_untraced(_thaw_tree, this())
    _comm_hooks.attach(root)


def _thaw_tree(root: Any) -> None:
    """Rebuild the tree with memory for the gradients of unfrozen parameters. Collective over the
    units' groups, between passes.
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
        release_tree(root)  # the next forward retries, on all ranks
        raise
    if root._mark_handles:
        root._tree.core.defer_reduces()
    root.precision_line = precision_line(root)


def tree_units(root: Any) -> list[Any]:
    """The engine's units in ``root``, depth first."""
    return [member._unit for member in unit_modules(root) if member._unit is not None]


@contextmanager
def no_sync(root: Any) -> Iterator[None]:
    """Leave gradients unreduced in every unit below ``root``; restored on exit, also after
    exceptions. Local.
    """
    units = tree_units(root)
    before = [unit.require_sync for unit in units]
    for unit in units:
        unit.require_sync = False
    try:
        yield
    finally:
        for unit, value in zip(units, before, strict=True):
            unit.require_sync = value


def precision_line(root: Any) -> str:
    """One line with the dtype of each role, for the log and for ``model.precision_line``."""
    units = tree_units(root)
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
    """Short names of the dtypes in one role, e.g. ``fp32`` or ``bf16+fp32``."""
    names = sorted({_SHORT.get(segment[role], segment[role]) for segment in segments})
    return "+".join(names) or "none"


def _slots(root: Any) -> str:
    """``, 2 gather slots of 436 MB, 1 reduce slot``."""
    if root._tree is None:
        return ""
    stats = root._tree.memory_stats()
    megabytes = stats["gather_slot_bytes"] / 1e6
    size = f"{megabytes:.0f} MB" if megabytes >= 10 else f"{megabytes:.2g} MB"
    gather = f"{_count(stats['gather_slots'], 'gather slot')} of {size}"
    return f", {gather}, {_count(stats['reduce_slots'], 'reduce slot')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def memory_stats(model: nn.Module) -> dict[str, int]:
    """Bytes allocated by the engine for ``model`` on this rank, by purpose. Local.

    Sums of ``Tree.memory_stats()`` over the trees in ``model``; empty before the first forward. On
    a GPU slots (``gather_bytes``, ``reduce_bytes``, ``spare_bytes``) are mapped from the driver and
    not in torch's statistics; the other keys (shards and shard gradients unless offloaded,
    gradients of ``no_sync``) are in torch's cache and in ``torch.cuda.memory_allocated()``.
    ``TypeError``: ``model`` is not an ``nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"memory_stats expects an nn.Module but got {type(model).__name__}")
    total: dict[str, int] = {}
    for member in unit_modules(model):
        if member._tree is not None:
            for key, value in member._tree.memory_stats().items():
                total[key] = total.get(key, 0) + value
    return total
