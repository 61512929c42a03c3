"""The units of a module tree that is sharded, or that a wrap policy would shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdpc._companions.matrices import is_matrix
from fsdpc._engine.interop import check_trains, computes, dtype_name
from fsdpc._engine.lowbit import holds_codes
from fsdpc._fsdp1.collect import Ignored, find_ignored, is_unit_module, owned_modules
from fsdpc._fsdp1.names import FSDP_WRAPPED, join
from fsdpc._fsdp1.root import FRONT
from fsdpc._fsdp1.wrap import apply_policy
from fsdpc._fsdp2.quantized import codecs_of
from fsdpc._fsdp2.state import FRONT as FRONT2
from fsdpc._spans.rows import row_numel
from fsdpc.api import MixedPrecision
from fsdpc.plan.engine import OWN
from fsdpc.plan.model import Param, Unit
from fsdpc.plan.sources.planned import Call, planning


class _StandIn(nn.Module):
    """A stand-in for an FSDP instance while a policy is applied."""

    _fsdpc_is_unit = True

    def __init__(self, module: nn.Module, full_precision: bool) -> None:
        super().__init__()
        self.add_module(FSDP_WRAPPED, module)
        self._ignored = Ignored()
        self.full_precision = full_precision
        self.params: list[tuple[str, nn.Parameter]] = []
        self._unit: Any = None

    def take(self, ignored: Ignored) -> None:
        """Find the parameters of the module that are in no nested unit, each once."""
        module = self._modules[FSDP_WRAPPED]
        assert module is not None
        seen: set[int] = set()
        for name, below in owned_modules(module, ignored.modules):
            for attr, param in below._parameters.items():
                if param is None or param in ignored.params or id(param) in seen:
                    continue
                seen.add(id(param))
                self.params.append((join(name, attr), param))
                param._fsdp_flattened = True  # type: ignore[attr-defined]  # policies count the rest
        self._unit = self.params or None


@contextmanager
def _wrapped(
    root: nn.Module, policy: Any, mixed: MixedPrecision | None, ignored: Ignored
) -> Iterator[_StandIn]:
    """Yield ``root`` with stand-ins in place of FSDP instances. Restore its modules on exit."""
    classes = tuple(mixed._module_classes_to_ignore) if mixed is not None else ()
    made: list[_StandIn] = []

    def wrapper(module: nn.Module, **kwargs: Any) -> nn.Module:
        made.append(_StandIn(module, kwargs.get("mixed_precision") is None))
        made[-1].take(ignored)
        return made[-1]

    try:
        if policy is not None:
            apply_policy(root, policy, classes, ignored, {"mixed_precision": mixed}, wrapper)
        yield wrapper(root, mixed_precision=mixed)  # type: ignore[misc]
    finally:
        for stand_in in made:
            for _, param in stand_in.params:
                param.__dict__.pop("_fsdp_flattened", None)
        for module in [m for m in root.modules() if not isinstance(m, _StandIn)]:
            for name, child in list(module._modules.items()):
                if isinstance(child, _StandIn):
                    module._modules[name] = child._modules[FSDP_WRAPPED]


def units_of(
    module: nn.Module,
    policy: Any = None,
    *,
    mixed_precision: MixedPrecision | None = None,
    ignored_states: Any = None,
) -> tuple[Unit, ...]:
    """Return the units that ``FullyShardedDataParallel(module, auto_wrap_policy=policy)`` would
    make, in module order, beginning with the root. Local. ``module`` may be on the meta device, and
    is unchanged afterwards. ``ValueError``: ``module`` is sharded already.
    """
    if any(is_unit_module(m) for m in module.modules()):
        raise ValueError("this model is sharded already; see fsdpc.memory_report(model)")
    ignored = find_ignored(module, None, ignored_states)
    kept: dict[tuple[Param, ...], tuple[Param, ...]] = {}
    with _wrapped(module, policy, mixed_precision, ignored) as root:
        placed = [each for each in FRONT.placed([root]) if each[2]._unit]
        if not root._unit and placed:  # the tree of a root without parameters has an empty unit
            placed = [("", 0, root), *((name, depth + 1, m) for name, depth, m in placed)]
        return tuple(_unit(name, depth, m, mixed_precision, kept) for name, depth, m in placed)


def _unit(
    name: str,
    depth: int,
    stand_in: _StandIn,
    mixed: MixedPrecision | None,
    kept: dict[tuple[Param, ...], tuple[Param, ...]],
) -> Unit:
    params = tuple(_param(n, p) for n, p in stand_in.params)
    own = stand_in.full_precision or mixed is None
    return Unit(
        name,
        depth,
        kept.setdefault(params, params),
        reshard=None if params else True,
        compute=OWN if own else _name(mixed.param_dtype) or OWN,  # type: ignore[union-attr]
        reduce=OWN if own else _name(mixed.reduce_dtype) or OWN,  # type: ignore[union-attr]
    )


def units_of_calls(module: nn.Module, shard: Callable[[nn.Module], Any]) -> tuple[Unit, ...]:
    """Return the units that ``shard(module)`` makes by calls of ``fsdpc.fully_shard``, in module
    order, beginning with the root. Local; ``module`` is treated as in ``units_of``. ``ValueError``:
    ``shard`` does not call ``fully_shard`` with ``module`` itself.
    """
    with planning() as calls:
        shard(module)
        root = module.__dict__.get("_fsdpc_state")
        if root is None:
            raise ValueError(
                f"shard made {len(calls)} calls of fsdpc.fully_shard, none of them with the model "
                "itself: fully_shard(model) comes last"
            )
        placed = [
            (name, depth, call) for name, depth, call in FRONT2.placed(root.modules) if call._unit
        ]
        if root._unit is None:  # the tree of a root without parameters has an empty unit
            placed = [(name, depth + 1, call) for name, depth, call in placed]
        units = [_unit_of_call(name, depth, call, call is root) for name, depth, call in placed]
        return (*(() if root._unit else (Unit("", 0, (), reshard=True),)), *units)


def _unit_of_call(name: str, depth: int, call: Call, is_root: bool) -> Unit:
    given = call.reshard_after_forward
    params = tuple(
        _param_of(
            info.name,
            param.shape,
            param.dtype,
            param.requires_grad,
            row_numel(param.shape),
            name,
            codecs_of(call.precision, param.shape, param.dtype),
            holds_codes(param),
        )
        for info, param in ((info, info.param) for info in call.infos)
    )
    reshard = not is_root if given is None else given is True or given > 1
    return Unit(
        name,
        depth,
        params,
        reshard=reshard,
        compute=_name(call.precision.param_dtype) or OWN,
        reduce=_name(call.precision.reduce_dtype) or OWN,
    )


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else dtype_name(dtype)


def _param(name: str, param: nn.Parameter) -> Param:
    held = holds_codes(param)
    return _param_of(name, param.shape, param.dtype, param.requires_grad, carried=held)


def units_of_tree(tree: Any) -> tuple[Unit, ...]:
    """Return the units of an engine's tree, as the engine has made them. Works for both front
    ends.
    """
    groups: dict[int, str] = {}
    found = []
    for unit, depth in zip(tree.units, tree.depths, strict=True):
        compute, reduce = _name(unit.param_dtype), _name(unit.reduce_dtype)
        params = tuple(
            _param_of(
                info.name,
                shape,
                dtype,
                trainable,
                row_numel(shape) if unit.by_rows else 0,
                unit.name,
                unit.codecs[i],
                unit.carried[i],
            )
            for i, (info, shape, dtype, trainable) in enumerate(
                zip(unit.infos, unit.shapes, unit.dtypes, unit.trainable, strict=True)
            )
        )
        found.append(
            Unit(
                unit.name,
                depth,
                params,
                reshard=unit.flat.reshards,
                keeps=unit.flat.keeps,
                foreign=unit.foreign,
                offload=unit.offload,
                inside=unit.stepper is not None,
                compute=compute or OWN,
                reduce=reduce or OWN,
                group=groups.setdefault(id(unit.groups.shard), f"group {len(groups)}"),
            )
        )
    return tuple(found)


def _param_of(
    name: str,
    shape: torch.Size,
    dtype: torch.dtype,
    trainable: bool,
    row: int = 0,
    unit: str = "",
    codecs: tuple[str, str, bool] = ("", "", False),
    carried: bool = False,
) -> Param:
    if trainable:
        check_trains(f"parameter {name}", dtype)
    if carried or not computes(dtype):
        size = dtype.itemsize
        return Param(name, shape.numel() * size, "uint8", False, row * size)
    rows, columns = shape[-2:] if len(shape) > 1 else (0, 0)
    looked_up = not is_matrix(f"{unit}.{name}".lstrip("."), shape)
    kind, sides = dtype_name(dtype), (rows, columns)
    return Param(name, shape.numel(), kind, trainable, row, sides, codecs, looked_up)
