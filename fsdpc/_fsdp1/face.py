"""The base of the wrapper class, which derives from torch's FullyShardedDataParallel but behaves as
``nn.Module``.

Frameworks test ``isinstance(model, FullyShardedDataParallel)`` with torch's class, often through
references that cannot be replaced. The wrapper must derive from torch's class so that the test
succeeds for every such reference. No code of torch's class may run on fsdpc's instances. Each
attribute of torch's class is therefore hidden: by ``nn.Module``'s attribute of the same name or, if
there is none, by a descriptor that raises ``AttributeError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel

from fsdpc._torch import FSDPState

_KEPT = frozenset({"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__"})
# Contains fsdpc's class as long as ``fsdpc.install()`` is in effect for FullyShardedDataParallel.
# Otherwise the list is empty.
_accepting: list[type] = []


def accept_torch_instances(cls: type | None) -> None:
    """Let torch's instances count as instances of ``cls`` too, until a call with ``cls=None``.
    Local.
    """
    _accepting[:] = [] if cls is None else [cls]


class _Absent:
    """A descriptor that hides an attribute of torch's class by raising ``AttributeError``, so that
    ``__getattr__`` still runs.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        raise AttributeError(f"type object {owner.__name__!r} has no attribute {self.name!r}")


class FaceType(type):
    """The metaclass of the wrapper class. Between ``accept_torch_instances(cls)`` and
    ``accept_torch_instances(None)``, instances of torch's class count as instances of ``cls``.
    """

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
