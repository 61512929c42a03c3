"""The modules below one that a unit owns, and their parameters with all registration sites."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import nn

from fsdpc._engine.unit import ParamInfo


def join(prefix: str, name: str) -> str:
    """``prefix.name``, or ``name`` alone under an empty prefix."""
    return f"{prefix}.{name}" if prefix else name


def walk(
    root: nn.Module,
    left_out: Callable[[nn.Module], bool],
    prefix: str = "",
    *,
    shared_twice: bool = False,
) -> Iterator[tuple[str, nn.Module]]:
    """``(name, module)`` of ``root`` and all below it in registration order, without modules that
    are ``left_out`` and what is below these. A module registered twice is listed once, or under
    each name with ``shared_twice``.
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
) -> list[ParamInfo]:
    """The modules' parameters in registration order, each once with all its sites. ``check`` gets
    each and its name, and raises for one that a unit cannot shard.
    """
    infos: dict[int, ParamInfo] = {}
    for module_name, module in modules:
        for attribute, param in module._parameters.items():
            if param is None or ignored(param):
                continue
            info = infos.get(id(param))
            if info is None:
                name = join(module_name, attribute)
                check(param, name)
                info = infos[id(param)] = ParamInfo(name, param)
            info.sites.append((module, attribute))
    return list(infos.values())
