"""A bridge that lets the functions of ``torch.distributed.checkpoint.state_dict``, such as
``get_state_dict`` and ``set_state_dict``, work on fsdpc models.

torch's module finds units and their state through one class, the module's global ``FSDP``.
``attach()`` replaces this global by an object that dispatches to fsdpc's or torch's class by the
model's units. Models without units of either class, such as FSDP2's and DDP's, go to torch's class
as before. The bridge is attached when the first fsdpc model is made.
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
    """Make ``torch.distributed.checkpoint.state_dict`` work with fsdpc models too. Further calls do
    nothing. Local.
    """
    client = import_module(_CLIENT)
    for name, ours in (("FSDP", Names()), (GET_FQNS, partial(names_of, vars(client)[GET_FQNS]))):
        if name in vars(client):  # some versions of torch lack one of these names
            setattr(client, name, ours)


def class_for(model: nn.Module) -> Any:
    """Return the class of the units in ``model``, or torch's class if there are no units. Local.

    ``RuntimeError``: the model has units of fsdpc's class and of torch's class. No single call can
    make the state dicts of both.
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
    """The replacement of torch's class. It dispatches each static method to the class of the
    model's units.
    """

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, TorchFSDP)

    @contextmanager
    def state_dict_type(self, module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Do what torch's method does. A dict that is loaded into fsdpc's units needs only one of
        the names of a tied parameter, because torch's module drops the other names when it
        broadcasts a dict.
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
    """A set of names that iterates in sorted order, which does not depend on a common prefix of the
    names. torch's module iterates over two sets in parallel and pairs their names.
    """

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))


def names_of(
    theirs: Callable[..., set[str]], model: nn.Module, name: str, *args: Any, **kwargs: Any
) -> set[str]:
    """Return the names of the original parameters that ``name``, a name in the model, stands for.
    torch's function handles only one flat parameter per unit.
    """
    path, _, last = name.rpartition(".")
    flats = _flats_at(model, path) if last.startswith(FLAT_PARAM) else {}
    if last not in flats:
        return theirs(model, name, *args, **kwargs)
    of_first = theirs(model, f"{path}.{FLAT_PARAM}", *args, **kwargs)
    prefix = min(of_first).removesuffix(min(flats[FLAT_PARAM]._fqns))
    return _InOrder(prefix + fqn for fqn in flats[last]._fqns)


def _flats_at(model: nn.Module, path: str) -> dict[str, Any]:
    """Return fsdpc's flat parameters that are registered at the module ``path`` of the model, by
    name.
    """
    names = path.split(".")
    if names[-1] == CHECKPOINT_WRAPPED:
        names.pop()
    if not names or names.pop() != FSDP_WRAPPED:
        return {}
    member: Any = model.get_submodule(".".join(names))
    if not is_unit_module(member) or member._unit is None:
        return {}
    return {flat_param_name(i): flat for i, flat in enumerate(member._unit.flat_params)}
