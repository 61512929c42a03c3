"""Tell the simulated GPU what torch's operators read and write.

torch's operators run on the processor at once; on a GPU they would be work on the compute stream.
`Operators()` is a context in which each operator says what it touches in the device's memory before
it runs, so that the simulator's vector clocks see, for example, a slot that is refilled while an
operator may still read it. Tensors in pinned memory count as touched by the processor.

Only operators on the thread of the context are watched; the backward of CPU tensors runs on that
thread, too. A tensor with gaps counts as touched from its first element to its last.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import simgpu
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that take a tensor only for its shape or dtype.
ONLY_LOOK_PREFIXES = ("aten::new_", "aten::sym_", "aten::_has_", "aten::size", "aten::stride")
ONLY_LOOK_NAMES = {"aten::is_same_size", "aten::set_", "aten::resize_", "prim::device"}


class Operators(TorchDispatchMode):
    """A context that declares the accesses of every operator that runs in it.

    With `everywhere`, all memory counts as the device's, as if it came from torch's caching
    allocator. In that allocator, memory that one operator frees may go to another operator while a
    stream still uses the memory.
    """

    def __init__(self, everywhere: bool = False) -> None:
        super().__init__()
        self.everywhere = everywhere
        self.declare = simgpu.cuda().simgpu_host_operator
        self.seen = 0  # how many accesses to the device's memory there were

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, FakeTensor) for t in types):
            return func(*args, **kwargs)  # a fake tensor has no memory
        if any(t is not Tensor and t.__torch_dispatch__ is not _DISABLED for t in types):
            return NotImplemented  # the subclass then calls operators on plain tensors
        touches = touches_of(func)
        if touches is not None:
            for value, write in touches(args, kwargs):
                self.touch(value, write, func)
        result = func(*args, **kwargs)
        if self.everywhere and touches is not None:
            for made in tensors_in(result):
                self.touch(made, True, func)
        return result

    def touch(self, tensor: Tensor, write: bool, func: Any) -> None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel():
            return
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        name = str(func).encode()
        nbytes = extent * tensor.element_size()
        known = self.declare(tensor.data_ptr(), nbytes, write, name)
        self.seen += known
        if self.everywhere and not known:
            library = simgpu.cuda()
            access = library.simgpu_host_write if write else library.simgpu_host_read
            access(tensor.data_ptr(), nbytes, name)


@contextmanager
def watched(drain: bool = True) -> Iterator[None]:
    """Provide the context in which a rank of a test runs. Raise AssertionError if the simulated GPU
    has reported anything.

    With `drain`, the work that is held back runs at the end. Pass drain=False if other ranks may
    have ended early, because work that waits for them never runs. Operators are watched unless
    `FSDPC_TEST_WATCH` is 0. The harness sets that variable to 0 in the modules of `UNWATCHED`
    (applies.py). If `FSDPC_TEST_WATCHED` is set, the harness also does so in all modules that
    `FSDPC_TEST_WATCHED` does not name.
    """
    if not simgpu.is_on():
        yield
        return
    with Operators() if os.environ.get("FSDPC_TEST_WATCH") != "0" else nullcontext():
        yield
    assert not drain or simgpu.drain(), "work that was queued can never run"
    found = simgpu.reports()
    assert not found, "the simulated GPU reported\n" + "\n".join(found)


_DISABLED = torch._C._disabled_torch_dispatch_impl

Touches = Callable[[tuple[Any, ...], dict[str, Any]], Iterator[tuple[Tensor, bool]]]


@functools.cache
def touches_of(func: Any) -> Touches | None:
    """Return a function that yields (tensor, written) for each tensor that a call accesses.

    Return None if `func` accesses the elements of no tensor.
    """
    schema = func._schema
    name = schema.name
    writes = {a.name: bool(a.alias_info and a.alias_info.is_write) for a in schema.arguments}
    order = [writes[a.name] for a in schema.arguments]
    is_view = any(r.alias_info for r in schema.returns) and not any(order)
    looks = name in ONLY_LOOK_NAMES or name.endswith("_like") or name.startswith(ONLY_LOOK_PREFIXES)
    if is_view or looks:
        return None

    def touches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
        for value, write in zip(args, order, strict=False):
            yield from ((t, write) for t in tensors_in(value))
        for key, value in kwargs.items():
            yield from ((t, writes.get(key, False)) for t in tensors_in(value))

    return touches


def tensors_in(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
