"""The interface between the engine and its front ends, ``FullyShardedDataParallel`` and
``fully_shard``.

A front end provides a ``UnitHost`` for each unit, and one ``FrontEnd``: the functions that lazy
initialisation calls. A third front end that provides both needs no change in the engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fsdpc._comm.bootstrap import Groups
from fsdpc._engine.hooked import Summing
from fsdpc._engine.modules import join
from fsdpc._engine.tree import Tree
from fsdpc._engine.unit import Unit


class UnitHost(Protocol):
    """The object that owns at most one unit: an instance of a wrapper class, or the state of one
    call of ``fully_shard``.

    ``_unit``: the unit, or None if the host manages no parameters. ``_pass_unit``: for a root
    without a unit, a unit without parameters whose hooks mark the begin and the end of a pass.
    ``_root``, ``_tree``, ``_is_root``: None until lazy initialisation; ``_tree`` is set on roots
    only. ``_mark_handles``: handles of the hooks to remove when the tree is detached. ``_others``:
    hosts of further units of the same modules. ``_summing``: the function that sums the unit's
    gradients in place of the engine, or None.
    """

    _front: FrontEnd
    _others: tuple[Any, ...]
    _name: str
    _unit: Any
    _pass_unit: Any
    _groups: Groups
    _tree: Tree | None
    _root: weakref.ref[Any] | None
    _is_root: bool | None
    _mark_handles: list[Any]
    rank: int
    world_size: int
    compute_device: torch.device
    precision_line: str
    _summing: Summing | None


@dataclass(frozen=True)
class TreeOptions:
    """The options of a tree, taken from its root. ``backward_prefetch``: "pre", "post" or None."""

    backward_prefetch: str | None = "pre"
    forward_prefetch: bool = False


@dataclass(frozen=True)
class FrontEnd:
    """The functions of a front end that lazy initialisation calls; see ``fsdpc/_engine/root.py``.

    ``hosts(module)``: return the hosts of this front end for the module. ``describe(host)``: return
    a description of the host for errors. ``check(hosts)``: called before hosts join a tree; applies
    the options that the user has changed, and raises ``ValueError`` if hosts differ in an option
    that must be equal in a tree. ``prepare(host, name)``: set what depends on the host's position
    in the tree. ``pass_unit(root)``: return the root's ``_pass_unit``, made at the first call.
    ``forget_pass_unit(root)``: called when the ``_pass_unit`` is dropped. ``options(root)``: return
    the tree's options. ``modules(root)``: return the modules that the root owns. ``ignored(root)``:
    return the modules and parameters below the root that the user has excluded. ``clean(name)``:
    return a module's name as the user knows it. ``one_device``: the text that tells users in errors
    how to put all units on one device.
    """

    hosts: Callable[[nn.Module], Iterable[Any]]
    describe: Callable[[Any], str]
    check: Callable[[list[Any]], None]
    prepare: Callable[[Any, str], None]
    pass_unit: Callable[[Any], Unit]
    forget_pass_unit: Callable[[Any], None]
    options: Callable[[Any], TreeOptions]
    modules: Callable[[Any], list[nn.Module]]
    ignored: Callable[[Any], Iterable[nn.Module | nn.Parameter]]
    clean: Callable[[str], str]
    one_device: str

    def placed(self, modules: Iterable[nn.Module]) -> Iterator[tuple[str, int, Any]]:
        """Yield ``(clean name, nesting depth among units, host)`` once for each host at or below
        these modules, in module order. Local.
        """
        done: set[int] = set()
        seen: set[nn.Module] = set()
        stack = [("", 0, module) for module in reversed(list(modules))]
        while stack:
            name, depth, module = stack.pop()
            if module in seen:
                continue
            seen.add(module)
            for host in self.hosts(module):
                if id(host) not in done:
                    done.add(id(host))
                    yield self.clean(name), depth, host
                depth += host._unit is not None
            below = [
                (join(name, key), depth, c) for key, c in module._modules.items() if c is not None
            ]
            stack.extend(reversed(below))
