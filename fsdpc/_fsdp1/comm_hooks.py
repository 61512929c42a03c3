"""Communication hooks: a user's function that replaces the engine's reduction of gradients.

Collectives in hooks match by order, so before each call the ranks exchange which unit is next and
which of its parameters have gradients. If the units differ (data-dependent routing), calls are
deferred from then on to the end of backward, and made in module order. A unit without gradients on
any rank makes no call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fsdpc import _C
from fsdpc._fsdp1.args import HYBRID
from fsdpc._fsdp1.collect import unit_modules
from fsdpc._torch import default_hooks

Hook = Callable[..., Any]
_END = -1  # in place of a unit's number: this rank has no unit left to reduce
_COMPRESSING = (
    (default_hooks.fp16_compress_hook, torch.float16),
    (default_hooks.bf16_compress_hook, torch.bfloat16),
)


def register(root: Any, state: object, hook: Hook) -> None:
    """See ``FullyShardedDataParallel.register_comm_hook``."""
    if not root.check_is_root():
        raise AssertionError("register_comm_hook can only be called on a root instance.")
    members = unit_modules(root)
    for member in members:
        if member.sharding_strategy in HYBRID:
            raise AssertionError(
                "Communication hook is not supported for hybrid strategies: "
                f"{member.sharding_strategy} of unit {member._name!r}"
            )
        if member._comm_hook is not None:
            raise AssertionError("A communication hook is already registered")
    if not callable(hook):
        raise ValueError(f"The communication hook must be callable but got {hook}")
    for member in members:
        member._comm_hook, member._comm_hook_state = hook, state
    attach(root)


def attach(root: Any) -> None:
    """Pass the hooks registered on ``root``'s instances to the engine. Local."""
    if root._tree is None:
        return
    hooks = {
        id(member._unit): (member._comm_hook, member._comm_hook_state)
        for member in unit_modules(root)
        if member._unit is not None and member._comm_hook is not None
    }
    units = [unit for unit in root._tree.units if id(unit) in hooks and any(unit.trainable)]
    if not units:
        return
    orders = {id(comm): _HookOrder(comm, root._tree) for comm in map(_comm_of, units)}
    for number, unit in enumerate(units):
        orders[id(_comm_of(unit))].add(number, _Hooked(unit, *hooks[id(unit)]))
    everyone = list(orders.values())
    root._tree.core.before_end = lambda: [order.call_deferred() for order in everyone]


def _comm_of(unit: Any) -> Any:
    """The communicator of the ranks whose gradients the unit's hook reduces."""
    return unit.groups.replicate or unit.groups.shard


class _Hooked:
    """One unit's hook: packs the gradients, calls the hook, accumulates the result."""

    def __init__(self, unit: Any, hook: Hook, state: object) -> None:
        self.unit = weakref.ref(unit)
        self.hook, self.state = hook, state
        layout = unit.flat.layout()
        self.bytes = layout["reduce_bytes"]
        self.segments = [segment for segment in layout["segments"] if segment["trainable"]]

    def reduce(self, used: bytes) -> None:
        unit = self.unit()
        buffer = torch.empty(self.bytes, dtype=torch.uint8, device=unit.device)
        unit.flat.pack_grads(buffer)
        with torch.no_grad():
            pieces = [self._call(unit, buffer, segment) for segment in self.segments]
        unit.flat.take_sums(pieces, used)

    def _call(self, unit: Any, buffer: torch.Tensor, segment: dict[str, Any]) -> torch.Tensor:
        dtype, piece = getattr(torch, segment["reduce"]), segment["piece_numel"]
        begin = segment["reduce_offset"]
        end = begin + piece * unit.groups.shard.world * dtype.itemsize
        grad = buffer[begin:end].view(dtype).detach()
        output = None
        if unit.is_sharded:
            output = torch.empty(piece, dtype=dtype, device=unit.device)
        tensors = (grad,) if output is None else (grad, output)
        for hook, low in _COMPRESSING:
            if self.hook is hook:
                return _compressed(low, self.state, *tensors)
        self.hook(self.state, *tensors)
        return tensors[-1]


def _compressed(
    dtype: torch.dtype, state: Any, grad: torch.Tensor, output: torch.Tensor | None = None
) -> torch.Tensor:
    """torch's two compressing hooks without their last step, which needs a stream and so fails on
    the CPU; the engine casts the result.
    """
    grad = grad.to(dtype)
    if output is None:
        default_hooks.allreduce_hook(state, grad)
        return grad
    output = output.to(dtype)
    default_hooks.reduce_scatter_hook(state, grad, output)
    return output


class _HookOrder:
    """The hooked units of one communicator; its ranks agree on the order of calls."""

    def __init__(self, comm: Any, tree: Any) -> None:
        self.comm = comm
        self.tree = weakref.ref(tree)
        self.members: list[_Hooked] = []
        self.width = 0

    def add(self, number: int, member: _Hooked) -> None:
        """``number``: the unit's index among the hooked ones, equal on all ranks."""
        unit = member.unit()
        self.members.append(member)
        self.width = max(self.width, len(unit.infos), len(self.members))
        unit.flat.comm_hook = lambda: self._call_in_order(number, member)

    def _call_in_order(self, number: int, member: _Hooked) -> bool:
        unit = member.unit()
        used = self._agree(number, unit.flat.grad_bits(), f"communication hook of {unit.name}")
        if used is None:
            self.tree().core.defer_reduces()
            return False
        if any(used):
            member.reduce(used)
        return True

    def call_deferred(self) -> None:
        """Make the deferred calls, at the end of every backward. Collective. ``MismatchError``:
        ranks called hooks of different units.
        """
        what = "communication hooks at the end of backward"
        while True:
            kept = bytes(member.unit().flat.kept for member in self.members)
            some = self._agree(_END, kept, what)
            if some is None:
                raise _C.MismatchError(
                    f"{what}: the ranks of the process group called hooks of different units "
                    f"(rank {self.comm.rank} has no call left)"
                )
            if not any(some):
                return
            for member, waits in zip(self.members, some, strict=True):
                if waits:
                    name = member.unit().name
                    bits = member.unit().flat.grad_bits()
                    used = self._agree(_END, bits, f"communication hook of {name}")
                    member.reduce(used)

    def _agree(self, number: int, own: Sequence[int], what: str) -> bytes | None:
        """Elementwise OR of ``own`` over ranks; None if ``number`` differs. Collective."""
        if self.comm.world == 1:
            return bytes(own)
        mine = np.zeros(4 + self.width, np.uint8)
        mine[:4] = np.array([number], np.int32).view(np.uint8)
        mine[4 : 4 + len(own)] = np.frombuffer(bytes(own), np.uint8)
        rows = np.tile(mine, (self.comm.world, 1))  # a fake process group does not write them
        self.comm.all_gather(rows, what=what)
        if (rows[:, :4] != mine[:4]).any():
            return None
        return rows[:, 4 : 4 + len(own)].max(axis=0).tobytes()
