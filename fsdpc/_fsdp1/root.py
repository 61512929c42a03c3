"""FSDP1's part of lazy initialisation (see ``fsdpc/_engine/root.py``): the instances that belong to
a root, and the settings of an instance that depend on its position in the tree.
"""

from __future__ import annotations

from typing import Any

from fsdpc._engine.compiled import call_untraced
from fsdpc._engine.host import FrontEnd, TreeOptions
from fsdpc._engine.inputs import preparation
from fsdpc._engine.root import lazy_init, start_at_first_use
from fsdpc._fsdp1.collect import is_unit_module, unit_modules
from fsdpc._fsdp1.handle import HandledUnit
from fsdpc._fsdp1.mixed import cast_buffers
from fsdpc._fsdp1.names import clean_fqn
from fsdpc.api import BackwardPrefetch

_PREFETCH = {
    BackwardPrefetch.BACKWARD_PRE: "pre",
    BackwardPrefetch.BACKWARD_POST: "post",
    None: None,
}


def _pass_unit(root: Any) -> HandledUnit:
    """Return a unit without parameters for a root that has no parameters. The hooks of this unit
    mark the begin and the end of a pass through the tree.
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
        start_at_first_use(unit, root)
        root._enter, root._leave = unit.pre_forward_hook, unit.post_forward_hook
    return root._pass_unit


def enter_without_unit(member: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Initialise the tree if an instance without a unit is called before its root is known.
    Registered as a forward pre-hook.
    """
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


def _prepare_member(member: Any, name: str) -> None:
    """Set what depends on the instance's position in the tree: the unit's name, and how inputs and
    buffers are cast.
    """
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
    """Return the tree's options. ``limit_all_gathers`` is not one of them, because the number of
    slots limits the gathers in any case.
    """
    return TreeOptions(_PREFETCH[root.backward_prefetch], root.forward_prefetch)


def tree_units(root: Any) -> list[Any]:
    """Return the engine's units in ``root``, depth first."""
    return [member._unit for member in unit_modules(root) if member._unit is not None]


FRONT = FrontEnd(
    hosts=lambda module: (module,) if is_unit_module(module) else (),
    describe=lambda root: type(root.module).__name__,
    check=_check_homogeneous,
    prepare=_prepare_member,
    pass_unit=_pass_unit,
    forget_pass_unit=lambda root: root.forget_unit_hooks(),
    options=_options,
    modules=lambda root: [root],
    ignored=lambda root: [
        item for member in unit_modules(root) for item in member._ignored.everything()
    ],
    clean=clean_fqn,
    one_device="pass the same device_id to every FullyShardedDataParallel of a model",
)
