"""The modules that a unit owns, and their parameters with all places of registration."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fsdpc._engine import lowbit as _lowbit
from fsdpc._engine.unit import ParamInfo
from fsdpc._torch import REGISTRY_KEY


def join(prefix: str, name: str) -> str:
    """Return ``prefix.name``, or ``name`` if ``prefix`` is empty."""
    return f"{prefix}.{name}" if prefix else name


def has_replicate(module: nn.Module) -> bool:
    """Whether torch's ``replicate`` manages the module and its submodules. Local."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, ())


def walk(
    root: nn.Module,
    left_out: Callable[[nn.Module], bool],
    prefix: str = "",
    *,
    shared_twice: bool = False,
) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``(name, module)`` of ``root`` and its submodules, in registration order.

    A module for which ``left_out`` is true is skipped together with its submodules. A module that
    is registered under several names is listed once, or with ``shared_twice`` under each name.
    """
    listed: set[nn.Module] = set()
    stack = [(prefix, root)]
    while stack:
        name, module = stack.pop()
        if left_out(module) or (module in listed and not shared_twice):
            continue
        listed.add(module)
        yield name, module
        children = [
            (join(name, key), child) for key, child in module._modules.items() if child is not None
        ]
        stack.extend(reversed(children))


def collect(
    modules: Iterable[tuple[str, nn.Module]],
    ignored: Callable[[nn.Parameter], bool],
    check: Callable[[nn.Parameter, str], None],
    what: str,
) -> list[ParamInfo]:
    """Return the modules' parameters in registration order. Each parameter is listed once, with all
    places where it is registered.

    ``check(param, name)`` must raise if a unit cannot shard the parameter. ``what`` names the unit
    in errors.
    """
    infos: dict[int, ParamInfo] = {}
    for module_name, module in modules:
        for attribute, param in module._parameters.items():
            if param is not None:
                _lowbit.let_load(module, param)
            if param is None or ignored(param):
                continue
            info = infos.get(id(param))
            if info is None:
                name = join(module_name, attribute)
                _check_kind(module, param, name, what)
                _lowbit.check(module, param, f"parameter {name!r} of {what}")
                check(param, name)
                info = infos[id(param)] = ParamInfo(name, param)
            info.sites.append((module, attribute))
    check_apart(((info.name, info.param) for info in infos.values()), what)
    return list(infos.values())


def _check_kind(module: nn.Module, param: nn.Parameter, name: str, what: str) -> None:
    """Raise ``ValueError`` if a parameter has no shape yet or belongs to a TorchScript module."""
    if is_lazy(param):
        raise ValueError(
            f"parameter {name!r} of {what} has no shape yet (a lazy module, such as "
            "LazyLinear): run a forward of the unsharded model once, then shard it"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"parameter {name!r} of {what} belongs to a TorchScript module, whose parameters "
            "cannot be replaced: shard the module that was scripted or traced, or list its "
            "parameters as ignored"
        )


def check_apart(named: Iterable[tuple[str, nn.Parameter]], what: str) -> None:
    """Raise ``ValueError`` if two different Parameters share memory and at least one is trainable.

    Sharding would silently give the two Parameters separate memory. Local.
    """
    spans = []
    for name, param in dict((id(p), (n, p)) for n, p in named).values():
        plain = type(param.data) is torch.Tensor and param.layout is torch.strided
        if plain and not param.is_meta and param.numel() > 0:
            last = sum((s - 1) * d for s, d in zip(param.shape, param.stride(), strict=True))
            begin = param.data_ptr()
            end = begin + (last + 1) * param.element_size()
            spans.append((begin, end, name, param.requires_grad))
    spans.sort()
    for (_, end, first, trains), (begin, _, second, trains_too) in itertools.pairwise(spans):
        if begin < end and (trains or trains_too):
            raise ValueError(
                f"parameters {first!r} and {second!r} of {what} are different Parameters over "
                "common memory, which sharding would separate: register one Parameter in both "
                "modules, or give one of them memory of its own (clone)"
            )
