"""A bridge for ``torch.distributed.checkpoint.state_dict``: ``get_state_dict``, ``set_state_dict``
and the like on fsdpc models.

That module finds units and their state through one class, its global ``FSDP``. ``attach()``
replaces this global by an object that dispatches to fsdpc's or torch's class by the model's units;
models without units of either class, such as FSDP2's and DDP's, go to torch's class as before. The
first fsdpc model attaches the bridge.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from typing import Any

from torch import nn
from torch.distributed.fsdp.fully_sharded_data_parallel import (
    FullyShardedDataParallel as TorchFSDP,
)

from fsdpc._fsdp1.collect import is_unit_module, unit_modules
from fsdpc._fsdp1.names import CHECKPOINT_WRAPPED, FLAT_PARAM, FSDP_WRAPPED, flat_param_name
from fsdpc._torch import GET_FQNS

_CLIENT = "torch.distributed.checkpoint.state_dict"


@cache
def attach() -> None:
    """Make torch's module work with fsdpc models too, once. Local."""
    client = import_module(_CLIENT)
    for name, ours in (("FSDP", Names()), (GET_FQNS, partial(names_of, vars(client)[GET_FQNS]))):
        if name in vars(client):  # else a version of torch without this name
            setattr(client, name, ours)


def class_for(model: nn.Module) -> Any:
    """The class of the units in ``model``. Local.

    ``RuntimeError``: the model has units of both classes, whose state dicts no single call makes.
    """
    if not unit_modules(model):
        return TorchFSDP
    for name, module in model.named_modules():
        if isinstance(module, TorchFSDP) and not is_unit_module(module):
            raise RuntimeError(
                f"module {name!r} is wrapped by torch's FullyShardedDataParallel, but the model "
                "has fsdpc units too: get the state dicts of torch's and fsdpc's modules separately"
            )
    return sys.modules["fsdpc.fsdp"].FullyShardedDataParallel


class Names:
    """The replacement of torch's class: its static methods, dispatched on the model's units."""

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, TorchFSDP)

    @contextmanager
    def state_dict_type(self, module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[None]:
        """As torch's method; for fsdpc's units, one name of a tied parameter suffices on load,
        because torch's module drops its other names when it broadcasts a dict.
        """
        members = unit_modules(module)
        with class_for(module).state_dict_type(module, *args, **kwargs):
            for member in members:
                member._fill_ties = True
            try:
                yield
            finally:
                for member in members:
                    member._fill_ties = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        getattr(TorchFSDP, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            model = args[0] if args else kwargs.get("module", kwargs.get("model"))
            return getattr(class_for(model), name)(*args, **kwargs)

        return call


class _InOrder(set[str]):
    """Names in an order independent of their common prefix: torch's module iterates over two sets
    in parallel and pairs their names.
    """

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))


def names_of(
    theirs: Callable[..., set[str]], model: nn.Module, name: str, *args: Any, **kwargs: Any
) -> set[str]:
    """The names of the original parameters behind ``name`` in the model; torch's function handles
    only one flat parameter per unit.
    """
    path, _, last = name.rpartition(".")
    flats = _flats_at(model, path) if last.startswith(FLAT_PARAM) else {}
    if last not in flats:
        return theirs(model, name, *args, **kwargs)
    of_first = theirs(model, f"{path}.{FLAT_PARAM}", *args, **kwargs)
    prefix = min(of_first).removesuffix(min(flats[FLAT_PARAM]._fqns))
    return _InOrder(prefix + fqn for fqn in flats[last]._fqns)


def _flats_at(model: nn.Module, path: str) -> dict[str, Any]:
    """fsdpc's flat parameters registered at the module ``path`` of the model, by name."""
    names = path.split(".")
    if names[-1] == CHECKPOINT_WRAPPED:
        names.pop()
    if not names or names.pop() != FSDP_WRAPPED:
        return {}
    member: Any = model.get_submodule(".".join(names))
    if not is_unit_module(member) or member._unit is None:
        return {}
    return {flat_param_name(i): flat for i, flat in enumerate(member._unit.flat_params)}
