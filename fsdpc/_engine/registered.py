"""Detection of parameters and modules that the program registers below an already sharded module.

No unit manages a new parameter: no backward averages its gradient over the ranks, so the ranks'
values would diverge. torch calls a hook at each registration. After a registration below a root,
the root's next pass looks for such parameters. Replacing a unit's parameter during a pass raises,
because the new parameter would be lost at the end of the pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from fsdpc import _C
from fsdpc._comm.channel import this_rank
from fsdpc._engine.compiled import call_untraced
from fsdpc._engine.host import FrontEnd
from fsdpc._engine.marks import hosts, is_replicated
from fsdpc._engine.modules import has_replicate, join, walk

# {module below a root that has a tree: the root's Watch}. Keys are weak; a Watch keeps no module
# alive.
_WATCHED: weakref.WeakKeyDictionary[nn.Module, Watch] = weakref.WeakKeyDictionary()
_hooks: list[Any] = []


class Watch:
    """A check of the parameters below ``root``, which runs when the root's next pass begins, and
    again in the first pass after each registration below ``root``. Local.
    """

    def __init__(self, root: Any) -> None:
        self.front: FrontEnd = root._front
        self.root = weakref.ref(root)
        if not _hooks:
            _hooks.append(register_module_module_registration_hook(_registered))
            _hooks.append(register_module_parameter_registration_hook(_registered))
        root._tree.core.before_pass = self

    def __call__(self) -> None:
        call_untraced(self._check)

    def registered(self, module: nn.Module, name: str, value: Any) -> None:
        """Called before ``value`` is registered as ``module.name``."""
        root = self.root()
        if root is None or root._tree is None:
            return
        if root._tree.training_state != "idle" and isinstance(value, nn.Parameter):
            _refuse_replacement(root, module, name)
        root._tree.core.before_pass = self

    def _check(self) -> None:
        root = self.root()
        if root is None or root._tree is None:
            return
        names = list(self._unmanaged(root))
        comms = [comm for unit in root._tree.units for comm in unit.groups.comms]
        if not names or all(comm.world == 1 for comm in comms):
            return
        shown = ", ".join(map(repr, names[:4])) + (", ..." if len(names) > 4 else "")
        raise _C.StateError(
            f"parameters {shown} were added after {self.front.describe(root)} was sharded, and no "
            f"unit manages them on rank {this_rank(comms[0])}: their gradients would not be "
            "averaged over the ranks. Add them before sharding, shard the new module "
            "(fully_shard, FullyShardedDataParallel) before it is added, or freeze them; if the "
            "program averages their gradients itself, call fsdpc.mark_replicated(module)"
        )

    def _unmanaged(self, root: Any) -> Iterator[str]:
        modules = self.front.modules(root)
        units = [h._unit for module in modules for h in hosts(module) if h._unit is not None]
        known = {id(param) for unit in units for param in unit.shard_params}
        sites = {(id(m), key) for unit in units for info in unit.infos for m, key in info.sites}
        left_out = {id(item) for item in self.front.ignored(root)}

        # Whether to skip the module, because code outside fsdpc averages its gradients or because
        # the user has excluded the module.
        def averaged(module: nn.Module) -> bool:
            apart = isinstance(module, DistributedDataParallel) or has_replicate(module)
            return apart or is_replicated(module) or id(module) in left_out

        for name, module in (found for one in modules for found in walk(one, averaged)):
            if type(module).__hash__ is not None:
                _WATCHED[module] = self
            for key, param in module._parameters.items():
                if param is None or not param.requires_grad or (id(module), key) in sites:
                    continue
                if (
                    id(param) not in known
                    and id(param) not in left_out
                    and not is_replicated(param)
                ):
                    yield self.front.clean(join(name, key))


def _registered(module: nn.Module, name: str, value: Any) -> None:
    """The hook that torch calls before each registration of a module or parameter. Local."""
    watch = _WATCHED.get(module) if type(module).__hash__ is not None else None
    if watch is not None:
        watch.registered(module, name, value)


def _refuse_replacement(root: Any, module: nn.Module, name: str) -> None:
    for unit in root._tree.units:
        for info in unit.infos:
            if any(site is module and key == name for site, key in info.sites):
                raise _C.StateError(
                    f"parameter {info.name!r} of unit {unit.name!r} was replaced in forward or "
                    f"backward on rank {this_rank(unit.groups.shard)}, where modules show copies "
                    "that end with it: change parameters between steps, or compute with a tensor "
                    "of your own (weight = self.weight.clamp(-1, 1))"
                )
