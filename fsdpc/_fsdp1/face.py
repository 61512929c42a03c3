"""The base of the wrapper class: torch's FullyShardedDataParallel in name, ``nn.Module`` in fact.

Frameworks test ``isinstance(model, FullyShardedDataParallel)`` with torch's class, often through
references that cannot be replaced, so only deriving from torch's class always works. None of that
class's code may run on fsdpc's instances, so each of its attributes is hidden: its overrides by
``nn.Module``'s attributes, the rest by ``AttributeError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel

from fsdpc._torch import FSDPState

_KEPT = frozenset({"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__"})
_accepting: list[type] = []  # fsdpc's class while torch's name is bound to it


def accept_torch_instances(cls: type | None) -> None:
    """Make torch's instances count as instances of ``cls`` too (``None``: stop). Local."""
    _accepting[:] = [] if cls is None else [cls]


class _Absent:
    """Hides an attribute of torch's class; ``__getattr__`` still runs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        raise AttributeError(f"type object {owner.__name__!r} has no attribute {self.name!r}")


class FaceType(type):
    """While torch's name is bound to fsdpc's class, torch's instances are instances of it."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        return cls in _accepting and isinstance(instance, FullyShardedDataParallel)


if TYPE_CHECKING:
    Face = nn.Module
else:

    class Face(FullyShardedDataParallel, metaclass=FaceType):
        """See the module docstring; instances have no state."""

    for _name in {*vars(FullyShardedDataParallel), *vars(FSDPState)} - _KEPT:
        setattr(Face, _name, getattr(nn.Module, _name, None) or _Absent(_name))
