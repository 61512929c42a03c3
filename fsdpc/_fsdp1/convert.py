"""``Module._apply`` for sharded modules: ``to``, ``cuda``, ``half``, ``double`` and the like.

A conversion that keeps dtype and device skips the unit's parameters, because the engine owns their
memory. A change of dtype or device shards the unit anew from the converted full values. Parameter
objects, including flat parameters, keep their identity, because an optimizer may refer to them.
There is one exception: flat parameters of several dtypes that become one dtype are replaced by one
new flat parameter, and a warning says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fsdpc._engine.device import CPU
from fsdpc._engine.lowbit import check_is_kept, holds_codes
from fsdpc._engine.root import release
from fsdpc._engine.writeback import refuse_sharing
from fsdpc._fsdp1.args import GroupChoice
from fsdpc._fsdp1.placement import why_not
from fsdpc._fsdp1.summon import check_idle, flat_owner, install, site_params

Fn = Callable[[torch.Tensor], torch.Tensor]


def convert(member: Any, fn: Fn, rest: Callable[[], Any]) -> None:
    """Apply ``fn`` to all tensors of ``member``. ``rest()`` applies ``nn.Module._apply`` to the
    tensors that are registered at the time of the call.

    Local if dtypes and device do not change; otherwise collective over the unit's groups and only
    allowed between steps (``AssertionError``). ``NotImplementedError``: ``fn`` moves tensors to an
    unsupported device.
    """
    unit = member._unit
    if unit is not None:
        refuse_sharing(fn, unit.name)
        _check_codes(unit, fn)
    if member._summoned or member._exposed:
        rest()
        return
    if unit is not None and _is_format(fn(torch.empty(2, 2, 2, 2, device=member.compute_device))):
        of_images = [
            info.name
            for info, shape in zip(unit.infos, unit.shapes, strict=True)
            if len(shape) == 4
        ]
        _warn_of_format(unit.name, of_images)
    device = _target(member, fn)
    if unit is None:
        rest()
        if device != member.compute_device:
            release(member)
            _move_groups(member, device)
    elif device == member.compute_device and _keeps_dtypes(unit, fn):
        with _hidden(member):
            rest()
    else:
        check_idle(member)
        _rebuild(member, rest, fn, device)


def check_formats(member: Any, infos: list[Any]) -> None:
    """Warn if parameters have a channels_last format, which gathered weights do not keep. Local."""
    _warn_of_format(member._name, [info.name for info in infos if _is_format(info.param)])


def _is_format(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has a channels_last format (2-D or 3-D) and is not contiguous."""
    if tensor.is_contiguous() or tensor.dim() not in (4, 5):
        return False
    last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return tensor.is_contiguous(memory_format=last)


def _warn_of_format(unit_name: str, names: list[str]) -> None:
    if names:
        shown = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
        warnings.warn(
            f"channels_last is not kept for parameters {shown} of unit {unit_name!r}: gathered "
            "weights are contiguous. Values do not change, but convolutions convert the weights "
            "in every call. Inputs and buffers keep the format; to keep the weights' format, list "
            "their modules in ignored_modules",
            stacklevel=5,
        )


def convert_storage(member: Any, dtype: torch.dtype) -> None:
    """Convert the storage of the trainable floating-point parameters of one unit, without nested
    units, to ``dtype``. Frameworks do so to train a low-precision model in fp32.

    Collective over the sharding group and only allowed between steps (``AssertionError``); a no-op
    if ``dtype`` is the storage dtype already.
    """
    unit = member._unit

    def to(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def rest() -> None:
        for param, trainable in zip(site_params(unit), unit.trainable, strict=True):
            if trainable:
                param.data = to(param.data)

    if any(
        t and to(torch.empty(0, dtype=d, device=CPU)).dtype != d
        for t, d in zip(unit.trainable, unit.dtypes, strict=True)
    ):
        check_idle(member)
        _rebuild(member, rest, to, member.compute_device)


def _target(member: Any, fn: Fn) -> torch.device:
    """Return the device to which ``fn`` moves tensors of the member's device. A call of ``fn`` on
    an empty tensor finds this device.

    The member's own device is returned if ``fn`` keeps that device, or if ``fn`` moves a unit with
    offloaded shards to the CPU, which is a no-op.
    """
    here = member.compute_device
    device = fn(torch.empty(0, device=here)).device
    if device == here or (device == CPU and member.cpu_offload.offload_params):
        return here
    reason = why_not(device)
    if reason is not None:
        raise NotImplementedError(f"unit {member._name!r} cannot move to {device}: {reason}")
    return device


def _keeps_dtypes(unit: Any, fn: Fn) -> bool:
    """Return whether ``fn`` keeps every dtype in ``unit``. ``fn`` is tried on empty tensors."""
    dtypes = {param.dtype for param in unit.shard_params}
    return all(fn(torch.empty(0, dtype=d, device=unit.device)).dtype == d for d in dtypes)


def _check_codes(unit: Any, fn: Fn) -> None:
    for info, dtype in zip(unit.infos, unit.dtypes, strict=True):
        if holds_codes(info.param):
            to = fn(torch.empty(0, dtype=dtype, device=unit.device)).dtype
            check_is_kept(info.param, f"parameter {info.name!r} of unit {unit.name!r}", to)


def _move_groups(member: Any, device: torch.device) -> None:
    member.compute_device = device
    member._init_groups(GroupChoice(member.process_group, member._inter_node_pg))


@contextmanager
def _hidden(member: Any) -> Iterator[None]:
    """Replace the unit's parameters in their modules by None inside the context. The keys stay, so
    that the order of registration does not change.
    """
    tables = [module._parameters for info in member._unit.infos for module, _ in info.sites]
    tables.append(flat_owner(member)._parameters)
    managed = {id(param) for param in member._unit.shard_params}
    places = {
        (id(table), name): (table, name, param)
        for table in tables
        for name, param in table.items()
        if param is not None and id(param) in managed
    }
    for table, name, _ in places.values():
        table[name] = None
    try:
        yield
    finally:
        for table, name, param in places.values():
            table[name] = param


def _rebuild(member: Any, rest: Callable[[], Any], fn: Fn, device: torch.device) -> None:
    unit = member._unit
    release(member)
    grads = [None if grad is None else fn(grad) for grad in unit.gather_full_grads()]
    install(member, unit.gather_full())
    rest()
    for info, shown in zip(unit.infos, site_params(unit), strict=True):
        info.param.grad = None  # `info.param` is the user's object; it gets full values
        info.param.data = shown.detach()
        info.register(info.param)
    if device != member.compute_device:
        _move_groups(member, device)
    member._shard(unit.infos)
    if member._unit.former:
        _warn_of_new_flats(member._unit)
    if any(grad is not None for grad in grads):
        member._unit.scatter_full_grads(grads)


def _warn_of_new_flats(unit: Any) -> None:
    lost = ["/".join(names) for names in unit.former]
    unit.former.clear()
    warnings.warn(
        f"the conversion gave unit {unit.name!r} other flat parameters than "
        f"{', '.join(lost)}: an optimizer that holds those changes nothing any more. Make the "
        "optimizer after the conversion",
        stacklevel=5,
    )
