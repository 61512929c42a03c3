"""FSDP1's part of lazy initialisation (see ``fsdpc/_engine/root.py``): which instances belong to a
root, what each needs of its position, the root's communication hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from fsdpc._engine import root as _root
from fsdpc._engine.compiled import call_untraced
from fsdpc._engine.host import FrontEnd, TreeOptions
from fsdpc._engine.inputs import preparation
from fsdpc._fsdp1 import comm_hooks as _comm_hooks
from fsdpc._fsdp1.collect import is_unit_module, unit_modules
from fsdpc._fsdp1.handle import HandledUnit
from fsdpc._fsdp1.mixed import cast_buffers
from fsdpc._fsdp1.names import clean_fqn, join
from fsdpc.api import BackwardPrefetch

_PREFETCH = {
    BackwardPrefetch.BACKWARD_PRE: "pre",
    BackwardPrefetch.BACKWARD_POST: "post",
    None: None,
}


def lazy_init(root: Any) -> None:
    """``fsdpc._engine.root.lazy_init`` of an FSDP instance."""
    _root.lazy_init(FRONT, root)


def release_tree(root: Any) -> None:
    """``fsdpc._engine.root.release_tree`` of an FSDP instance."""
    _root.release_tree(FRONT, root)


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


def _check_homogeneous(members: list[Any]) -> None:
    for attr in ("_use_orig_params", "limit_all_gathers"):
        values = {getattr(member, attr) for member in members}
        if len(values) > 1:
            name = attr.lstrip("_")
            raise ValueError(
                f"Expects one homogeneous value for {attr} but got {sorted(values)}: pass the "
                f"same {name} to every FullyShardedDataParallel of a model"
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


def _options(root: Any) -> TreeOptions:
    """Without ``limit_all_gathers``: slots bound the gathers in any case."""
    return TreeOptions(_PREFETCH[root.backward_prefetch], root.forward_prefetch)


def tree_units(root: Any) -> list[Any]:
    """The engine's units in ``root``, depth first."""
    return [member._unit for member in unit_modules(root) if member._unit is not None]


def no_sync(root: Any) -> AbstractContextManager[None]:
    """Leave gradients unreduced in every unit below ``root``; restored on exit. Local."""
    return _root.no_sync(tree_units(root))


FRONT = FrontEnd(
    members=placed_units,
    describe=lambda root: type(root.module).__name__,
    check=_check_homogeneous,
    prepare=_prepare_member,
    pass_unit=_pass_unit,
    forget_pass_unit=lambda root: root.forget_unit_hooks(),
    options=_options,
    attached=_comm_hooks.attach,
    modules=lambda root: [root],
    ignored=lambda root: [
        item for member in unit_modules(root) for item in member._ignored.everything()
    ],
    clean=clean_fqn,
    one_device="pass the same device_id to every FullyShardedDataParallel of a model",
)
