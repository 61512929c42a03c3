"""What the engine needs of a front end: the description of a unit's host, and the front end's
part of lazy initialisation. ``FullyShardedDataParallel`` and ``fully_shard`` provide both; a third
front end needs no change in the engine if it has a ``UnitHost`` and a ``FrontEnd``.
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

    ``_unit``: None without managed parameters. ``_pass_unit``: a unit without parameters whose
    hooks mark the begin and end of a pass, for a root without a unit. ``_root``, ``_tree``,
    ``_is_root``: None until lazy initialisation; ``_tree`` is set on roots only. ``_mark_handles``:
    hooks to be removed when the tree ends. ``_others``: hosts of further units of the same modules.
    ``_summing``: what sums the unit's gradients in place of the engine, or None.
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
    """Options of a tree, read from its root. ``backward_prefetch``: "pre", "post" or None."""

    backward_prefetch: str | None = "pre"
    forward_prefetch: bool = False


@dataclass(frozen=True)
class FrontEnd:
    """A front end's part of lazy initialisation; see ``fsdpc/_engine/root.py``.

    ``hosts(module)``: the hosts of this front end for the module. ``describe(host)``: what the host
    is, for errors. ``check(hosts)``: called before hosts join a tree; takes over what the user has
    changed, and raises ``ValueError`` if options that must be equal in a tree differ.
    ``prepare(host, name)``: sets what depends on the position in the tree. ``pass_unit(root)``: the
    root's ``_pass_unit``, made on demand. ``forget_pass_unit(root)``: called when that is dropped.
    ``options(root)``: the tree's options. ``modules(root)``: the modules that the root owns.
    ``ignored(root)``: modules and parameters below it that the user left out. ``clean``: a name as
    the user knows it. ``one_device``: how a user puts units on one device.
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
        """``(clean name, nesting depth among units, host)`` of the hosts at or below these modules,
        in module order, each once. Local.
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
