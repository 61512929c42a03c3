"""The base of the wrapper class: torch's FullyShardedDataParallel in name, ``nn.Module`` in fact.

Frameworks ask ``isinstance(model, FullyShardedDataParallel)`` with torch's class, often through a
reference that nobody can find. Deriving from it is the one answer that always holds. None of its
code may run on fsdpc's instances though, so everything that torch's class defines is taken back:
what it overrides is ``nn.Module``'s again, the rest is not there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel

from fsdpc._torch import FSDPState

_KEPT = frozenset({"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__"})
_standing_in: list[type] = []  # fsdpc's class while it bears torch's name


def stand_in(cls: type | None) -> None:
    """From now on (``None``: no longer) torch's own instances count as ``cls``'s too. Local."""
    _standing_in[:] = [] if cls is None else [cls]


class _Absent:
    """A name that torch's class has and this one has not; ``__getattr__`` goes on as usual."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        raise AttributeError(f"type object {owner.__name__!r} has no attribute {self.name!r}")


class FaceType(type):
    """Behind torch's name, fsdpc's class must also know the models that torch's class made."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        return cls in _standing_in and isinstance(instance, FullyShardedDataParallel)


if TYPE_CHECKING:
    Face = nn.Module
else:

    class Face(FullyShardedDataParallel, metaclass=FaceType):
        """See the module's text; instances have no state of their own."""

    for _name in {*vars(FullyShardedDataParallel), *vars(FSDPState)} - _KEPT:
        setattr(Face, _name, getattr(nn.Module, _name, None) or _Absent(_name))
